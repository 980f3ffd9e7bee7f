"""Constraints are checked by a process of its own, once each, and what cannot be enforced is refused."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from dataplane.engine.grammar import GrammarCompiler
from dataplane.frontend.grammars import CheckLimits, Constraint, Grammars
from veneer.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError, UnavailableError

SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
SLOW = Constraint("json", json.dumps({"type": "integer", "multipleOf": 99_999_989}))
"""It compiles for minutes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, byte_level_path: Path) -> Path:
    folder = tmp_path_factory.mktemp("grammars")
    (folder / "tokenizer.json").write_bytes(byte_level_path.read_bytes())
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    return folder


@pytest.fixture
async def grammars(folder: Path) -> AsyncIterator[Grammars]:
    made = Grammars(folder, vocab_size=500, eos_ids=(0,), limits=CheckLimits(timeout_s=60))
    yield made
    made.close()


def sent(grammars: Grammars) -> int:
    """How many constraints went to the process so far."""
    return int(str(grammars._numbers)[len("count(") : -1])


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("json", SCHEMA),
        Constraint("json", "true"),
        Constraint("json", '{"enum": ["' + '", "'.join(f"value {i}" for i in range(4000)) + '"]}'),
        Constraint("json", json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(300)}})),
        Constraint("regex", "[a-z]{2,5}(-[0-9]+)?"),
        Constraint("grammar", 'start: "a" | "b" start'),
        Constraint("grammar", 'root ::= "a" | "b" root'),
        Constraint("grammar", r'root ::= "\u00e9" | "\x41" | "\U0001F600" | "\\x" | [\u00e0-\u00ff\x00-\x1f]'),
    ],
)
async def test_what_can_be_enforced_compiles(grammars: Grammars, folder: Path, constraint: Constraint) -> None:
    grammar = await grammars.check(constraint)
    GrammarCompiler(folder, vocab_size=500).compile(grammar)


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("json", "{nonsense"),
        Constraint("json", '{"type": "nonsense"}'),
        Constraint("json", '{"type": "array", "uniqueItems": true}'),
        Constraint("json", '{"type": "array", "uniqueItems": true, "x-guidance": {"lenient": true}}'),
        Constraint("json", '{"$ref": "#/$defs/none"}'),
        Constraint("json", "[" * 20_000),
        Constraint("json", '{"type": "number", "maximum": 1e999}'),
        Constraint("json", '{"type": "number", "maximum": NaN}'),
        Constraint("json", f'{{"type": "number", "exclusiveMinimum": 1{"0" * 400}}}'),
        Constraint("json", f'{{"type": "integer", "maximum": -1{"0" * 400}}}'),
        Constraint("json", '{"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2}'),
        Constraint("regex", "(a"),
        Constraint("regex", "(?=a)b"),
        Constraint("regex", r"(a)\1"),
        Constraint("regex", "a" * 1025),
        Constraint("regex", ""),
        Constraint("grammar", "start: nothing"),
        Constraint("grammar", "root ::= nothing"),
        Constraint("grammar", "root ::= " + "(" * 8000),
        Constraint("grammar", "start: " + "x" * (16 << 10)),
        Constraint("grammar", '{"grammars": [{"lark_grammar": "start: /a/"}]}'),
    ],
)
async def test_what_cannot_is_refused_by_its_field_and_stays_refused(grammars: Grammars, constraint: Constraint) -> None:
    messages = []
    for _ in range(2):
        with pytest.raises(InvalidArgumentError) as caught:
            await grammars.check(constraint)
        assert [violation.field for violation in caught.value.violations] == [f"sampling.structured_outputs.{constraint.kind}"]
        messages.append(caught.value.message)
    assert messages[0] == messages[1]
    assert sent(grammars) <= 1
    assert not grammars._heavy, "what is wrong ends no process"


@pytest.mark.parametrize(
    ("text", "reading"),
    [
        ('?start: "a"', ""),
        ('!start: "a"', ""),
        ('start[lazy]: /a*/ "b"', ""),
        ('// a comment with root ::= in it\nstart: "x ::= y"', ""),
        ('# a comment with start: in it\nroot ::= "start: a"', ""),
        ('%ignore / /\nstart: "a"', ""),
        ('root ::=\n  "a" |\n  [a-z:]+', ""),
        ('start.2: "a"', "read as Lark: "),
        ('?start: "a" nothing', "read as Lark: "),
        ('A.1: "a"\nstart: A', "read as Lark: "),
        ('start{x}: "a"', "read as Lark: "),
        ('root ::= "a" nothing', "read as GBNF: "),
        ('other ::= "a"', "read as GBNF: "),
        ('start: "a"\nroot ::= "a"', "defines rules both as Lark (`start:`) and as GBNF (`root ::=`)"),
        ("just a text", "is neither Lark"),
    ],
)
async def test_lark_and_gbnf_are_told_apart_and_an_error_says_which_was_read(grammars: Grammars, text: str, reading: str) -> None:
    if not reading:
        await grammars.check(Constraint("grammar", text))
        return
    with pytest.raises(InvalidArgumentError) as caught:
        await grammars.check(Constraint("grammar", text))
    assert caught.value.violations[0].description.startswith(reading)


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (
            Constraint("grammar", "start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(20)) + "\nT20: /[a-z]/"),
            "read as Lark: takes too much work: the expressions in it take more than 200,000 units of work to compile",
        ),
        (SLOW, "takes more than 0.5 s of processor time to compile"),
        (Constraint("grammar", "start: A\nA: " + " & ".join(f"/(.{{{i + 3}}})*/" for i in range(12))), "to compile"),
        (
            Constraint("json", json.dumps({"$ref": "#/$defs/d0", "$defs": {
                **{f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(24)},
                "d24": {"type": "string", "pattern": "^a*b$"},
            }})),
            "to compile",
        ),
    ],
)  # fmt: skip
async def test_what_takes_too_much_work_is_refused_by_name(folder: Path, constraint: Constraint, words: str) -> None:
    grammars = Grammars(folder, vocab_size=500, eos_ids=(0,), limits=CheckLimits(timeout_s=60, max_cpu_s=0.5))
    with pytest.raises(InvalidArgumentError) as caught:
        await grammars.check(constraint)
    assert words in caught.value.violations[0].description
    await grammars.check(Constraint("regex", "a"))
    grammars.close()


async def test_what_takes_too_much_memory_is_refused_by_name(folder: Path) -> None:
    grammars = Grammars(
        folder, vocab_size=500, eos_ids=(0,), limits=CheckLimits(timeout_s=60, max_cpu_s=60, memory_bytes=32 << 20)
    )
    with pytest.raises(InvalidArgumentError, match="takes more than 32 MiB of memory to compile"):
        await grammars.check(SLOW)
    grammars.close()


async def test_equal_constraints_of_a_tenant_are_checked_once(grammars: Grammars) -> None:
    await asyncio.gather(*(grammars.check(Constraint("regex", "a"), tenant="t") for _ in range(9)))
    assert sent(grammars) == 1
    await grammars.check(Constraint("regex", "a"), tenant="t")
    assert sent(grammars) == 1
    await grammars.check(Constraint("regex", "a"), tenant="u")
    assert sent(grammars) == 2


async def test_the_bytes_of_verdicts_are_bounded_and_one_tenant_displaces_its_own(folder: Path) -> None:
    grammars = Grammars(folder, vocab_size=500, eos_ids=(0,), limits=CheckLimits(timeout_s=60, max_bytes=8 << 10))
    await grammars.check(Constraint("regex", "quiet"), tenant="quiet")
    for number in range(20):
        await grammars.check(Constraint("regex", f"x{number}"), tenant="greedy")
    assert sum(grammars._num_bytes.values()) <= 8 << 10
    done = sent(grammars)
    await grammars.check(Constraint("regex", "quiet"), tenant="quiet")
    assert sent(grammars) == done
    await grammars.check(Constraint("regex", "x0"), tenant="greedy")
    assert sent(grammars) == done + 1
    grammars.close()


async def test_a_tenants_slow_constraints_hold_up_nobody_else(folder: Path) -> None:
    grammars = Grammars(folder, vocab_size=500, eos_ids=(0,), limits=CheckLimits(timeout_s=60, max_cpu_s=60, max_pending=16))
    await grammars.check(Constraint("regex", "a"))
    slow = [
        asyncio.create_task(
            grammars.check(Constraint("json", f'{{"type": "integer", "multipleOf": {99_999_989 + i}}}'), tenant="slow")
        )
        for i in range(5)
    ]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhaustedError, match="wait to be checked"):
        await grammars.check(Constraint("regex", "b"), tenant="slow")
    for number in range(5):
        await grammars.check(Constraint("regex", f"b{number}"), tenant="quick")
    assert not any(task.done() for task in slow)
    grammars.close()
    outcomes = await asyncio.gather(*slow, return_exceptions=True)
    assert all(isinstance(outcome, UnavailableError) for outcome in outcomes)


async def test_tenants_whose_checks_are_ended_leave_a_place_to_others(folder: Path) -> None:
    grammars = Grammars(folder, vocab_size=500, eos_ids=(0,), limits=CheckLimits(timeout_s=60, max_cpu_s=0.2))
    heavy = [f"heavy-{number}" for number in range(3)]
    outcomes = await asyncio.gather(*(grammars.check(SLOW, tenant=name) for name in heavy), return_exceptions=True)
    assert all(isinstance(outcome, InvalidArgumentError) for outcome in outcomes)
    again = [
        asyncio.create_task(
            grammars.check(Constraint("json", f'{{"type": "integer", "multipleOf": {99_999_971 + i}}}'), tenant=name)
        )
        for i, name in enumerate(heavy)
    ]
    await asyncio.sleep(0)
    assert len(grammars._running) == 1
    await grammars.check(Constraint("regex", "quick"), tenant="quiet")
    grammars.close()
    await asyncio.gather(*again, return_exceptions=True)


async def test_an_answer_to_a_check_that_failed_with_the_process_before_is_nobodys(grammars: Grammars) -> None:
    await grammars.check(Constraint("regex", "a"))
    process = grammars._process
    await grammars._send([next(grammars._numbers), "regex", "b", False])  # of which nothing is remembered
    await asyncio.gather(*(grammars.check(Constraint("regex", f"c{number}")) for number in range(3)))
    assert grammars._process is process


async def test_one_that_takes_too_long_is_told_and_its_verdict_is_kept(folder: Path) -> None:
    grammars = Grammars(folder, vocab_size=500, eos_ids=(0,), limits=CheckLimits(timeout_s=0.001))
    with pytest.raises(ResourceExhaustedError, match=r"not checked within 0\.001 s"):
        await grammars.check(Constraint("regex", "a"))
    (future,) = grammars._pending.values()
    await future
    await grammars.check(Constraint("regex", "a"))
    grammars.close()


async def test_a_process_that_was_killed_ends_its_checks_and_another_one_follows(grammars: Grammars) -> None:
    await grammars.check(Constraint("regex", "a"))
    waiting = asyncio.create_task(grammars.check(SLOW))
    await asyncio.sleep(0)
    assert grammars._process is not None
    grammars._process.kill()
    with pytest.raises(UnavailableError):
        await waiting
    await grammars.check(Constraint("regex", "b"))


async def test_a_process_that_hangs_is_replaced(grammars: Grammars) -> None:
    await grammars.check(Constraint("regex", "a"))
    hung = grammars._process
    assert hung is not None
    os.kill(hung.pid, signal.SIGSTOP)
    patient = grammars._limits
    grammars._limits = replace(patient, timeout_s=0.01, patience_s=0.0)
    with pytest.raises(ResourceExhaustedError, match="not checked within"):
        await grammars.check(Constraint("regex", "b"))
    assert hung.returncode == -signal.SIGKILL
    grammars._limits = patient
    await grammars.check(Constraint("regex", "b"))


async def test_the_end_of_the_process_is_seen_though_a_compilation_of_it_stands_still(grammars: Grammars) -> None:
    await grammars.check(Constraint("regex", "a"))
    waiting = asyncio.create_task(grammars.check(SLOW))
    assert grammars._process is not None
    pid = grammars._process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children")
    while not (compiling := children.read_text().split()):  # noqa: ASYNC110  the state of another process
        await asyncio.sleep(0)
    while os.getpriority(os.PRIO_PROCESS, int(compiling[0])) == os.getpriority(os.PRIO_PROCESS, pid):  # noqa: ASYNC110  as above
        await asyncio.sleep(0)  # it has begun
    os.kill(int(compiling[0]), signal.SIGSTOP)
    try:
        grammars._process.kill()
        with pytest.raises(UnavailableError, match="structured outputs ended"):
            await waiting
    finally:
        os.kill(int(compiling[0]), signal.SIGKILL)


async def test_a_base_without_an_end_of_sequence_says_so(folder: Path) -> None:
    grammars = Grammars(folder, vocab_size=500, eos_ids=())
    with pytest.raises(FailedPreconditionError, match="end-of-sequence"):
        await grammars.check(Constraint("regex", "a"))
    grammars.close()


async def test_white_space_in_json_is_free_but_has_an_end(grammars: Grammars, folder: Path) -> None:
    grammar = await grammars.check(Constraint("json", SCHEMA))
    compiler = GrammarCompiler(folder, vocab_size=500)
    ids = {text: compiler._tokenizer.tokenize_str(text) for text in ('{ \n "a" :\t1 }', "{" + " " * 40)}  # type: ignore[attr-defined]
    taken = {text: compiler.compile(grammar).try_consume_tokens(tokens) for text, tokens in ids.items()}
    assert [taken[text] == len(tokens) for text, tokens in ids.items()] == [True, False]
