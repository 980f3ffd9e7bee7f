"""Constraints are checked beside the event loop, once each, and what cannot be enforced is refused."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dataplane.engine.grammar import GrammarCompiler
from dataplane.frontend.grammars import Constraint, Grammars
from veneer.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError

SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})


class Counting:
    """A compiler that counts, and waits when the test says."""

    def __init__(self, folder: Path) -> None:
        self.inner = GrammarCompiler(folder, vocab_size=500)
        self.compiled: list[str] = []
        self.gate: threading.Event | None = None

    def compile(self, grammar: str) -> Any:
        self.compiled.append(grammar)
        if self.gate is not None:
            self.gate.wait(60)
        return self.inner.compile(grammar)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, byte_level_path: Path) -> Path:
    folder = tmp_path_factory.mktemp("grammars")
    (folder / "tokenizer.json").write_bytes(byte_level_path.read_bytes())
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    return folder


@pytest.fixture
def compiler(folder: Path) -> Counting:
    return Counting(folder)


@pytest.fixture
async def grammars(compiler: Counting) -> AsyncIterator[Grammars]:
    made = Grammars(compiler, timeout_s=60, max_pending=2, max_entries=3)  # type: ignore[arg-type]
    yield made
    if compiler.gate is not None:
        compiler.gate.set()
    made.close()


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("json", SCHEMA),
        Constraint("json", "true"),
        Constraint("regex", "[a-z]{2,5}(-[0-9]+)?"),
        Constraint("grammar", 'start: "a" | "b" start'),
        Constraint("grammar", 'root ::= "a" | "b" root'),
    ],
)
async def test_what_can_be_enforced_compiles(grammars: Grammars, compiler: Counting, constraint: Constraint) -> None:
    grammar = await grammars.check(constraint)
    assert compiler.compiled == [grammar]


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("json", "{nonsense"),
        Constraint("json", '{"type": "nonsense"}'),
        Constraint("json", '{"type": "array", "uniqueItems": true}'),
        Constraint("json", '{"type": "array", "uniqueItems": true, "x-guidance": {"lenient": true}}'),
        Constraint("json", '{"$ref": "#/$defs/none"}'),
        Constraint("json", "[" * 20_000),
        Constraint("regex", "(a"),
        Constraint("regex", "(?=a)b"),
        Constraint("regex", r"(a)\1"),
        Constraint("regex", "a" * 1025),
        Constraint("regex", ""),
        Constraint("grammar", "start: nothing"),
        Constraint("grammar", "root ::= nothing"),
        Constraint("grammar", "root ::= " + "(" * 8000),
        Constraint("grammar", "start: " + "x" * (16 << 10)),
    ],
)
async def test_what_cannot_is_refused_by_its_field_and_stays_refused(
    grammars: Grammars, compiler: Counting, constraint: Constraint
) -> None:
    messages = []
    for _ in range(2):
        with pytest.raises(InvalidArgumentError) as caught:
            await grammars.check(constraint)
        assert [violation.field for violation in caught.value.violations] == [f"sampling.structured_outputs.{constraint.kind}"]
        messages.append(caught.value.message)
    assert messages[0] == messages[1]
    assert len(compiler.compiled) <= 1


async def test_equal_constraints_are_compiled_once_and_the_oldest_verdict_is_forgotten(
    grammars: Grammars, compiler: Counting
) -> None:
    await asyncio.gather(*(grammars.check(Constraint("regex", "a")) for _ in range(9)))
    for pattern in ("b", "c", "a", "d"):
        await grammars.check(Constraint("regex", pattern))
    assert len(compiler.compiled) == 4
    await grammars.check(Constraint("regex", "a"))
    assert len(compiler.compiled) == 4
    await grammars.check(Constraint("regex", "b"))
    assert len(compiler.compiled) == 5


async def test_one_that_takes_too_long_or_waits_behind_too_many_is_refused_and_the_loop_goes_on(compiler: Counting) -> None:
    compiler.gate = threading.Event()
    grammars = Grammars(compiler, timeout_s=0.05, max_pending=2)  # type: ignore[arg-type]
    slow = [asyncio.create_task(grammars.check(Constraint("regex", pattern))) for pattern in "ab"]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhaustedError, match="wait to be compiled"):
        await grammars.check(Constraint("regex", "c"))
    outcomes = await asyncio.gather(*slow, return_exceptions=True)
    compiler.gate.set()
    assert all(isinstance(outcome, ResourceExhaustedError) and "within" in outcome.message for outcome in outcomes)
    grammars.close()


async def test_a_base_without_an_end_of_sequence_says_so(tmp_path: Path, byte_level_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(byte_level_path.read_bytes())
    grammars = Grammars(GrammarCompiler(tmp_path, vocab_size=500))
    with pytest.raises(FailedPreconditionError, match="end-of-sequence"):
        await grammars.check(Constraint("regex", "a"))
    grammars.close()


async def test_white_space_in_json_is_free_but_has_an_end(grammars: Grammars, compiler: Counting) -> None:
    grammar = await grammars.check(Constraint("json", SCHEMA))
    ids = {text: compiler.inner._tokenizer.tokenize_str(text) for text in ('{ \n "a" :\t1 }', "{" + " " * 40)}
    taken = {text: compiler.inner.compile(grammar).try_consume_tokens(tokens) for text, tokens in ids.items()}
    assert [taken[text] == len(tokens) for text, tokens in ids.items()] == [True, False]
