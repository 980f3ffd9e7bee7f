"""Grammars in the engine: what comes out matches, neighbours do not notice, and what is wrong ends its own request."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest
from tokenizers import Tokenizer

from dataplane.engine import grammar as module
from dataplane.engine.client import EngineClient
from dataplane.engine.config import EngineConfig
from dataplane.engine.grammar import GrammarCompiler, GrammarMask, Grammars, Lexers, explain, read_eos_ids
from dataplane.engine.messages import Sampling, Submit
from tests.dataplane.engine.conftest import EOS
from tests.dataplane.engine.conftest import SPOKEN_VOCAB as VOCAB
from tests.dataplane.engine.heavy_grammars import HEAVY, of_regex, of_schema
from veneer.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["fox", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


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


def token_of(compiler: GrammarCompiler, text: str) -> int:
    assert compiler._tokenizer is not None
    return int(compiler._tokenizer.tokenize_str(text)[0])


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


async def test_a_grammar_that_is_complete_ends_the_stream_before_min_tokens(client: EngineClient, spoken_dir: Path) -> None:
    ids = await ids_of(client, request("r", of_regex("ab"), min_tokens=9))
    assert ids[-1] == EOS
    assert Tokenizer.from_file(str(spoken_dir / "tokenizer.json")).decode(ids) == "ab"


async def test_a_grammar_that_may_go_on_does_so_until_min_tokens(client: EngineClient) -> None:
    assert len(await ids_of(client, request("r", of_regex("a*"), min_tokens=20, max_tokens=30))) > 20


async def test_rules_that_leave_no_token_end_the_request(client: EngineClient, spoken_dir: Path) -> None:
    letter = Tokenizer.from_file(str(spoken_dir / "tokenizer.json")).encode("a").ids[0]
    with pytest.raises(InvalidArgumentError, match="leave no token"):
        await ids_of(client, request("r", of_regex("a"), bad_words=((letter,),)))
    assert (await client.state()).kv_pages_used == 0


@pytest.mark.parametrize("grammar", [of_regex("[ab]{9}"), of_schema(SCHEMA), of_regex("a{1,4}b*")])
async def test_a_grammar_whose_texts_end_is_compiled_once(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch, grammar: str
) -> None:
    """The token that ends a complete text is no fault of the lexer, which the tenant's other requests share."""
    compiled = []
    compile_ = GrammarCompiler.compile

    def count(self: GrammarCompiler, grammar: str) -> Any:
        compiled.append(grammar)
        return compile_(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "compile", count)
    for number in range(4):
        assert (await ids_of(client, request(f"r{number}", grammar, temperature=1.0, seed=number)))[-1] == EOS
    assert len(compiled) == 1


async def test_no_step_waits_for_a_compilation(client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert len(await ids_of(client, request("other", max_tokens=5, stop_token_ids=()))) == 5
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    gate.set()
    assert (await held)[-1] == EOS
    assert (await client.state()).waiting == 0


class SlowMasks:
    """Every mask waits until a test lets it go; the grammar is found as ever."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Semaphore(0)
        find = GrammarMask._find

        def wait(mask: GrammarMask) -> bytes:
            self.gate.acquire()
            return find(mask)

        monkeypatch.setattr(GrammarMask, "_find", wait)


@pytest.mark.parametrize("stepping", ["serial", "overlapped"])
@pytest.mark.parametrize("temperature", [0.0, 2.0])
async def test_a_row_without_its_mask_leaves_the_step_and_comes_to_the_same_text(
    spoken_dir: Path, monkeypatch: pytest.MonkeyPatch, stepping: str, temperature: float
) -> None:
    config = EngineConfig(
        model_dir=str(spoken_dir), dtype="float32", num_threads=1, max_sequences=8, max_step_tokens=32, kv_bytes=1 << 20,
        arena_bytes=0, max_slots=1, stepping=stepping, batch_invariant=True,
    )  # fmt: skip
    engine = await EngineClient.start(config, in_process=True)
    fields = {"temperature": temperature, "seed": 3, "frequency_penalty": 0.5, "logprobs": 1}
    wanted = await ids_of(engine, request("quick", of_regex("[a-z ]{9}"), **fields))
    free = await ids_of(engine, request("free", max_tokens=30, stop_token_ids=()))
    slow = SlowMasks(monkeypatch)
    late = asyncio.create_task(ids_of(engine, request("late", of_regex("[a-z ]{9}"), **fields)))
    for number in range(len(wanted)):
        assert await ids_of(engine, request(f"free{number}", max_tokens=30, stop_token_ids=())) == free
        slow.gate.release()
    for _ in range(99):
        slow.gate.release()
    assert await late == wanted
    async with asyncio.timeout(30):
        while (await engine.state()).kv_pages_used:  # the last step may still run
            pass
    await engine.stop()


async def test_a_mask_that_does_not_come_ends_its_request_at_the_limit(spoken_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowMasks(monkeypatch)
    config = EngineConfig(
        model_dir=str(spoken_dir), dtype="float32", num_threads=1, max_sequences=8, max_step_tokens=32, kv_bytes=1 << 20,
        arena_bytes=0, max_slots=1, grammar_timeout_s=0.05,
    )  # fmt: skip
    engine = await EngineClient.start(config, in_process=True)
    with pytest.raises(
        ResourceExhaustedError, match=r"structured_outputs: the mask for output token 0 was not found within 0.05 s"
    ):
        await ids_of(engine, request("late", of_regex("ab")))
    assert (await engine.state()).kv_pages_used == 0
    for _ in range(99):
        slow.gate.release()
    await engine.stop()


def grammars_of(compiler: GrammarCompiler, *, max_bytes: int = 64 << 20) -> tuple[Grammars, threading.Event]:
    woken = threading.Event()
    return Grammars(compiler, wake=woken.set, max_bytes=max_bytes), woken


def next_mask(mask: GrammarMask, woken: threading.Event) -> bytes:
    """Waits for a mask as the step loop does."""
    while not mask.is_ready:
        assert woken.wait(60)
        woken.clear()
    found = mask.allowed(len(mask._tokens))
    assert found is not None
    return found


def test_a_mask_is_for_one_place_of_the_output_and_nothing_waits_for_it(compiler: GrammarCompiler) -> None:
    grammars, woken = grammars_of(compiler)
    mask = grammars.mask("t", of_regex("ab"))
    assert (mask.is_ready, mask.allowed(0)) == (False, None)
    mask.begin()
    mask.begin()
    assert len(next_mask(mask, woken)) * 8 >= VOCAB
    assert mask.allowed(1) is None
    mask.stop()
    grammars.stop()


def test_an_end_that_has_a_text_of_its_own_is_left_out_until_the_text_is_complete(
    compiler: GrammarCompiler, spoken_dir: Path
) -> None:
    a, b = token_of(compiler, "a"), token_of(compiler, "b")
    grammars, woken = grammars_of(GrammarCompiler(spoken_dir, vocab_size=VOCAB, eos_ids=[a]))
    mask = grammars.mask("t", of_regex("[ab]{2}"))
    mask.begin()
    for _ in range(2):
        bits = next_mask(mask, woken)
        assert not bits[a >> 3] >> (a & 7) & 1
        assert bits[b >> 3] >> (b & 7) & 1
        mask.advance(b)
    bits = next_mask(mask, woken)
    assert bits[a >> 3] >> (a & 7) & 1
    grammars.stop()


def test_a_grammar_that_takes_too_much_work_is_its_requests_own_fault(compiler: GrammarCompiler) -> None:
    grammars, woken = grammars_of(compiler)
    mask = grammars.mask("t", llguidance.LLMatcher.grammar_from_lark('start: e\ne: e e | e e e | "a" | /[a-z ]/'))
    mask.begin()
    with pytest.raises(ResourceExhaustedError, match=r"structured_outputs: at output token .* takes too much work.*10,000"):
        for _ in range(99):
            next_mask(mask, woken)
            mask.advance(token_of(compiler, "a"))
    mask.stop()
    grammars.stop()


def test_a_lexer_that_ran_into_a_limit_stops_no_other_request(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with one grammar share its lexer, and a limit stops a lexer for good."""
    grammars, woken = grammars_of(compiler)
    pattern = of_regex("(.{0,40}a.{0,40}b)*")
    first, second = grammars.mask("t", pattern), grammars.mask("t", pattern)
    for mask in (first, second):
        mask.begin()
        next_mask(mask, woken)
    shared = first._lexer
    assert shared is second._lexer
    assert shared is not None
    with monkeypatch.context() as patch:
        patch.setattr(GrammarMask, "_step", lambda mask: (None, "lexer error: too many states"))
        first.advance(token_of(compiler, "a"))
        with pytest.raises(ResourceExhaustedError, match="states"):
            next_mask(first, woken)
    assert shared.is_retired
    second.advance(token_of(compiler, "a"))
    want = compiler.compile(pattern)
    want.consume_token(token_of(compiler, "a"))
    assert next_mask(second, woken) == want.compute_bitmask()
    assert second._lexer is not shared
    for mask in (first, second):
        mask.stop()
    grammars.stop()


def test_the_bytes_of_grammars_are_bounded_and_one_tenant_displaces_its_own(compiler: GrammarCompiler) -> None:
    lexers = Lexers(compiler, max_bytes=8 << 20)
    kept, _ = lexers.open("quiet", of_regex("quiet"))
    lexers.close(kept)
    for number in range(40):
        lexer, is_new = lexers.open("greedy", of_regex(f"x{number}"))
        assert is_new
        lexers.worked(lexer, 0.001)
        lexers.close(lexer)
        assert lexers.num_bytes <= 8 << 20
    assert not kept.is_retired
    assert lexers.open("quiet", of_regex("quiet")) == (kept, False)
    assert lexers.open("greedy", of_regex("quiet"))[0] is not kept, "tenants share no lexer"


def test_a_lexer_that_grows_beyond_its_part_is_left_and_its_request_goes_on(compiler: GrammarCompiler) -> None:
    grammars, woken = grammars_of(compiler)
    mask = grammars.mask("t", of_regex("[a-c]{9}"))
    mask.begin()
    next_mask(mask, woken)
    before = mask._lexer
    assert before is not None
    grammars.lexers.worked(before, 1.0)
    mask.advance(token_of(compiler, "a"))
    next_mask(mask, woken)
    assert mask._lexer is not before
    assert grammars.lexers.num_bytes < 8 << 20
    mask.stop()
    grammars.stop()
    grammars.lexers.retire(mask._lexer or before)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (of_regex("(?=a)b"), "look-around"),
        (of_regex(r"(a)\1"), "backreferences"),
        (of_regex("(a"), "unclosed group"),
        (of_schema({"type": "string", "pattern": "^(?!a)b$"}), "look-around"),
        (of_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}), "lead in a circle"),
        (llguidance.LLMatcher.grammar_from_lark("start: a\na: b\nb: a"), "lead in a circle"),
    ],
)
def test_a_grammar_that_does_not_compile_is_told_the_cause(compiler: GrammarCompiler, grammar: str, words: str) -> None:
    # Rules in a circle compile; it is their first mask that fails.
    with pytest.raises(InvalidArgumentError, match=words):
        matcher = compiler.compile(grammar)
        matcher.compute_bitmask()
        raise InvalidArgumentError(explain(matcher.get_error()))


def test_a_mask_looks_no_further_than_one_token(compiler: GrammarCompiler, spoken_dir: Path) -> None:
    """Where a text can go on in one way only, each token that begins it is allowed: nothing finds out how far that way goes."""
    text = "the quick fox" * 400
    pieces = Tokenizer.from_file(str(spoken_dir / "tokenizer.json")).get_vocab()
    begins = {id_ for piece, id_ in pieces.items() if id_ != EOS and text.startswith(piece.replace("Ġ", " "))}
    mask = np.unpackbits(np.frombuffer(compiler.compile(of_regex(text)).compute_bitmask(), dtype=np.uint8), bitorder="little")
    assert set(mask.nonzero()[0].tolist()) == begins
    assert len(begins) > 1


@pytest.mark.parametrize("kind", HEAVY)
def test_each_piece_of_a_heavy_grammars_work_has_an_end(compiler: GrammarCompiler, kind: str) -> None:
    matcher = compiler.compile(HEAVY[kind])
    for _ in range(12):
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        if matcher.is_error():
            assert "takes too much work" in explain(matcher.get_error())
            return
        matcher.consume_token(int(mask.nonzero()[0][-1]))


def test_what_grammars_hold_is_no_more_than_they_are_taken_to_hold(spoken_dir: Path) -> None:
    """In a process of its own, whose resident memory is theirs; the library does not say what it holds."""
    command = [sys.executable, "-m", "tests.dataplane.engine.heavy_grammars", str(spoken_dir), str(VOCAB)]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=300).stdout)
    for kind, (held, taken) in told.items():
        assert held <= taken + (4 << 20), kind
        assert held < 48 << 20, kind


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
