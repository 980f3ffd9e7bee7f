"""Grammars in the engine: what comes out matches, neighbours do not notice, and what is wrong ends its own request."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import llguidance
import pytest
from tokenizers import Tokenizer

from dataplane.engine import grammar as module
from dataplane.engine.client import EngineClient
from dataplane.engine.config import EngineConfig
from dataplane.engine.grammar import GrammarCompiler, GrammarMask, Grammars, read_eos_ids
from dataplane.engine.intake import Arrival
from dataplane.engine.messages import Sampling, Submit
from tests.dataplane.engine.conftest import EOS
from tests.dataplane.engine.conftest import SPOKEN_VOCAB as VOCAB
from veneer.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["fox", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def of_regex(pattern: str) -> str:
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def of_schema(schema: dict[str, Any]) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})


@pytest.fixture(scope="module")
def compiler(spoken_dir: Path) -> GrammarCompiler:
    return GrammarCompiler(spoken_dir, vocab_size=VOCAB)


@pytest.fixture
async def client(spoken_dir: Path) -> AsyncIterator[EngineClient]:
    config = EngineConfig(
        model_dir=str(spoken_dir), dtype="float32", num_threads=1, max_sequences=8, max_step_tokens=32, kv_bytes=1 << 20,
        arena_bytes=0, max_slots=1,
    )  # fmt: skip
    started = await EngineClient.start(config, in_process=True)
    yield started
    await started.stop()


def request(name: str, grammar: str = "", **fields: Any) -> Submit:
    values = {"max_tokens": 80, "temperature": 0.0, "stop_token_ids": (EOS,)} | fields
    return Submit(request_id=name, tenant="t", prompt=(5, 6, 7), sampling=Sampling(grammar=grammar, **values))


def arrival(name: str, grammar: str) -> Arrival:
    return Arrival(request(name, grammar))


async def ids_of(client: EngineClient, submit: Submit) -> list[int]:
    return [id_ async for delta in client.submit(submit) for id_ in delta.ids]


@pytest.mark.parametrize("temperature", [0.0, 2.0])
async def test_constrained_texts_match_and_their_neighbours_are_as_alone(
    client: EngineClient, spoken_dir: Path, temperature: float
) -> None:
    tokenizer = Tokenizer.from_file(str(spoken_dir / "tokenizer.json"))
    alone = await ids_of(client, request("alone", max_tokens=40, stop_token_ids=()))
    patterns = ["[a-c]{3}-[0-9]{2}", "(the|a) (fox|dog)", "naïve café|👩‍👩‍👧"]
    runs = await asyncio.gather(
        *(
            ids_of(client, request(f"r{i}", of_regex(pattern), temperature=temperature, seed=i))
            for i, pattern in enumerate(patterns)
        ),
        *(ids_of(client, request(f"j{i}", of_schema(SCHEMA), temperature=temperature, seed=i)) for i in range(2)),
        ids_of(client, request("free", max_tokens=40, stop_token_ids=())),
    )
    for pattern, ids in zip(patterns, runs, strict=False):
        assert ids[-1] == EOS
        assert re.fullmatch(pattern, tokenizer.decode(ids))
    for ids in runs[3:5]:
        value = json.loads(tokenizer.decode(ids))
        assert value["name"] in ("fox", "dog")
        assert 0 <= value["age"] <= 99
    assert runs[5] == alone


async def test_a_grammar_goes_on_where_it_was_after_a_preemption(spoken_dir: Path) -> None:
    page_bytes = 2 * 2 * 16 * 32 * 4
    config = EngineConfig(
        model_dir=str(spoken_dir), dtype="float32", num_threads=1, max_sequences=4, max_step_tokens=32,
        kv_bytes=6 * page_bytes, arena_bytes=0, max_slots=1, max_context=70,
    )  # fmt: skip
    client = await EngineClient.start(config, in_process=True)
    tokenizer = Tokenizer.from_file(str(spoken_dir / "tokenizer.json"))
    runs = await asyncio.gather(*(ids_of(client, request(f"r{i}", of_regex("([ab]{2}c){13}d"))) for i in range(3)))
    for ids in runs:
        assert re.fullmatch("([ab]{2}c){13}d", tokenizer.decode(ids))
    await client.stop()


async def test_a_grammar_that_does_not_compile_ends_its_own_request(client: EngineClient) -> None:
    good, bad = await asyncio.gather(
        ids_of(client, request("good", of_regex("ab"))),
        ids_of(client, request("bad", of_regex("(?=a)b"))),
        return_exceptions=True,
    )
    assert isinstance(bad, InvalidArgumentError)
    assert isinstance(good, list)
    state = await client.state()
    assert (state.running, state.waiting, state.kv_pages_used) == (0, 0, 0)


async def test_rules_that_leave_no_token_end_the_request(client: EngineClient) -> None:
    with pytest.raises(InvalidArgumentError, match="leave no token"):
        await ids_of(client, request("r", of_regex("a"), min_tokens=9))
    assert (await client.state()).kv_pages_used == 0


async def test_an_engine_that_stops_ends_requests_whose_grammar_is_being_compiled(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, gate = threading.Event(), threading.Event()
    compile_ = GrammarCompiler.compile

    def wait(self: GrammarCompiler, grammar: str) -> Any:
        entered.set()
        gate.wait(60)
        return compile_(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "compile", wait)
    held = asyncio.create_task(ids_of(client, request("held", of_regex("ab"))))
    gone = asyncio.create_task(ids_of(client, request("gone", of_regex("cd"))))
    assert await asyncio.to_thread(entered.wait, 60)
    assert len(await ids_of(client, request("other", max_tokens=5, stop_token_ids=()))) == 5, "no step waits for a compilation"
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    gate.set()
    assert (await held)[-1] == EOS
    assert (await client.state()).waiting == 0


def test_a_mask_that_takes_too_much_work_is_the_requests_own_fault(compiler: GrammarCompiler) -> None:
    grammars = Grammars(compiler, wake=lambda: None, max_pending=1)
    mask = GrammarMask(compiler.compile(of_regex("ab")), grammars._masks)
    assert len(mask.allowed()) * 8 >= VOCAB
    mask.advance(EOS)
    with pytest.raises(ResourceExhaustedError):
        mask.allowed()
    grammars.stop()


def test_grammars_that_wait_are_bounded_and_their_ids_unique(compiler: GrammarCompiler) -> None:
    woken = threading.Event()
    grammars = Grammars(compiler, wake=woken.set, max_pending=2)
    grammars.prepare(arrival("a", of_regex("a")), 1.0)
    with pytest.raises(InvalidArgumentError, match="in use"):
        grammars.prepare(arrival("a", of_regex("a")), 1.0)
    grammars.prepare(arrival("b", of_regex("a")), 2.0)
    with pytest.raises(ResourceExhaustedError):
        grammars.prepare(arrival("c", of_regex("a")), 3.0)
    grammars.drop("b")
    assert woken.wait(60)
    grammars.stop()
    assert [(settled.submit.request_id, came) for settled, came, _ in grammars.settle()] == [("a", 1.0)]
    assert grammars.request_ids == ()


def test_without_the_library_only_structured_outputs_are_missing(spoken_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FailedPreconditionError, match="llguidance"):
        GrammarCompiler(spoken_dir, vocab_size=VOCAB).compile(of_regex("a"))


def test_a_base_without_an_end_has_no_structured_outputs(spoken_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((spoken_dir / "tokenizer.json").read_bytes())
    with pytest.raises(FailedPreconditionError, match="end-of-sequence"):
        GrammarCompiler(tmp_path, vocab_size=VOCAB).compile(of_regex("a"))


def test_an_end_that_only_the_tokenizer_names_is_enough_for_structured_outputs(spoken_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((spoken_dir / "tokenizer.json").read_bytes())
    compiler = GrammarCompiler(tmp_path, vocab_size=VOCAB, eos_ids=(EOS,))
    assert not compiler.compile(of_regex("a")).is_error()


@pytest.mark.parametrize(("content", "ids"), [({"eos_token_id": 2}, (2,)), ({"eos_token_id": [3, 4]}, (3, 4)), ({}, (7,))])
def test_ends_of_sequences_come_from_the_generation_config_first(tmp_path: Path, content: Any, ids: tuple[int, ...]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert read_eos_ids(tmp_path) == ids
