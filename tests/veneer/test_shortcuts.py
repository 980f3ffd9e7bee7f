"""Answers that a method gave before: who gets them, what is counted and logged, and what goes the long way."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from tests.veneer.plane import BAD, GOOD, OPERATOR, REVOKED, SECRET, Raw, counted, digest, refusal, serving
from veneer.access import Identity, Rule
from veneer.call_records import CallSummary
from veneer.dataplane.v1 import generation_pb2 as pb
from veneer.errors import NotFoundError

METHOD = "/test.Four/UnaryUnary"
RULE = Rule.of("tenant", roles=["caller"])


class Kept:
    """Keeps every answer."""

    def __init__(self) -> None:
        self.answers: dict[tuple[bytes, bytes], bytes] = {}
        self.marks = 0

    def find(self, identity: Identity, request: bytes) -> bytes | None:
        return self.answers.get((identity.key_digest, request))

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def keep(self, mark: int, identity: Identity, request: bytes, response: Any, answer: bytes) -> None:
        assert mark == self.marks
        assert response.SerializeToString() == answer
        self.answers[identity.key_digest, request] = answer


async def test_a_second_answer_is_the_first_one_and_the_method_is_not_called() -> None:
    async with serving(RULE, {METHOD: Kept()}) as plane:
        answers = [await plane.call("UnaryUnary", GOOD) for _ in range(3)]
        other = await plane.call("UnaryUnary", pb.GenerateRequest(text="other"))
        assert answers == [answers[0]] * 3 == [other] * 3
        assert [request.text for request in plane.seen] == ["hello", "other"]
        await counted(plane, "UnaryUnary", "OK")
        assert plane.running() == 0


@pytest.mark.parametrize(
    ("secret", "status"), [(None, "UNAUTHENTICATED"), (REVOKED, "UNAUTHENTICATED"), (OPERATOR, "PERMISSION_DENIED")]
)
async def test_nobody_gets_an_answer_that_the_method_would_refuse_it(secret: str | None, status: str) -> None:
    shortcut = Kept()
    async with serving(RULE, {METHOD: shortcut}) as plane:
        await plane.call("UnaryUnary", GOOD)
        [(_, request), answer] = next(iter(shortcut.answers.items()))
        shortcut.answers |= {(digest(one), request): answer for one in (REVOKED, OPERATOR)}
        assert (await refusal(plane, "UnaryUnary", GOOD, secret=secret)).status == status


async def test_a_refusal_goes_the_long_way_each_time() -> None:
    shortcut = Kept()
    async with serving(RULE, {METHOD: shortcut}) as plane:

        async def body(context: Any) -> AsyncGenerator[pb.GenerateResponse]:
            raise NotFoundError("no such thing")
            yield

        plane.body = body
        for _ in range(2):
            assert (await refusal(plane, "UnaryUnary", GOOD)).status == "NOT_FOUND"
            assert (await refusal(plane, "UnaryUnary", BAD)).status == "INVALID_ARGUMENT"
            assert (await refusal(plane, "UnaryUnary", Raw(b"\xff" * 40))).status == "INVALID_ARGUMENT"  # type: ignore[arg-type]
        assert plane.seen == [GOOD, GOOD]
        assert shortcut.answers == {}


async def test_answers_from_memory_are_logged_together_and_others_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="veneer")
    async with serving(RULE, {METHOD: Kept()}) as plane:
        for _ in range(5):
            await plane.call("UnaryUnary", GOOD)
        await refusal(plane, "UnaryUnary", GOOD, secret=REVOKED)
    lines = [vars(record) for record in caplog.records if record.message == "call ended"]
    assert [line["code"] for line in lines] == ["OK", "UNAUTHENTICATED"]
    together = [vars(record) for record in caplog.records if record.message == "calls answered from memory"]
    assert sum(line["calls"] for line in together) == 4
    assert {(line["method"], line["listener"], line["code"], line["key_id"]) for line in together} == {
        (METHOD, "callers", "OK", "k1")
    }
    assert SECRET not in str(together)


async def test_a_summary_has_a_line_for_each_method_and_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="veneer")
    summary = CallSummary("callers")
    for key, seconds in (("a", 0.25), ("b", 1.0), ("a", 0.5)):
        summary.add("/x/Y", key, seconds=seconds)
    summary.flush()
    summary.flush()
    lines = [vars(record) for record in caplog.records]
    assert [(line["key_id"], line["calls"], line["seconds"]) for line in lines] == [("a", 2, 0.75), ("b", 1, 1.0)]
