"""The demonstration's parts notice what is not as it must be, also where a service would hide it."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

from rich.console import Console

from demo.run import Story, _refusals
from demo.show import Screen
from demo.styles import PIRATE
from veneer.client import Client
from veneer.dataplane.v1 import generation_pb2
from veneer.errors import NotFoundError, PermissionDeniedError
from veneer.operator_client import OperatorClient

BASE, FIRST = "b" * 64, "1" * 64
REFUSAL = "no such adapter, alias or version"
Answer = Callable[[dict[str, Any]], generation_pb2.Served]


class Service:
    """Answers as a function of the request says; the function refuses by raising."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def generate(self, prompt: object, **wanted: Any) -> AsyncIterator[object]:
        yield self._answer(wanted)
        yield generation_pb2.Chunk(index=0, ids=[7], text="[pirate v1]" if wanted["owner"] else "A volcano.")
        yield generation_pb2.Finish(reason=generation_pb2.FINISH_REASON_STOP)


def by_base() -> generation_pb2.Served:
    reason = generation_pb2.FALLBACK_REASON_NOT_FOUND
    return generation_pb2.Served(base_digest=BASE, fallback=True, fallback_reason=reason)


def proper(wanted: dict[str, Any]) -> generation_pb2.Served:
    if wanted["fallback"] == generation_pb2.FALLBACK_MODE_ANY:
        return by_base()
    raise NotFoundError(REFUSAL)


async def faults_with(answer: Answer) -> list[str]:
    screen = Screen(Console(file=io.StringIO()))
    story = Story(screen, cast("OperatorClient", None), {"garden": cast("Client", Service(answer))}, BASE, {FIRST: PIRATE})
    await _refusals(story)
    return story.faults


async def test_proper_refusals_have_no_fault() -> None:
    assert await faults_with(proper) == []


async def test_a_foreign_adapter_that_answers_is_noticed() -> None:
    def answer(wanted: dict[str, Any]) -> generation_pb2.Served:
        if wanted["owner"]:
            return generation_pb2.Served(base_digest=BASE, version=FIRST, owner="harbor", adapter="pirate")
        return proper(wanted)

    assert "the foreign adapter was answered" in await faults_with(answer)


async def test_a_foreign_adapter_refused_in_other_words_than_an_unknown_one_is_noticed() -> None:
    def answer(wanted: dict[str, Any]) -> generation_pb2.Served:
        if wanted["owner"]:
            raise NotFoundError("not yours")
        return proper(wanted)

    assert await faults_with(answer) == ["foreign and unknown adapters are told apart by the text of the refusal"]


async def test_a_foreign_adapter_refused_with_another_status_is_noticed() -> None:
    def answer(wanted: dict[str, Any]) -> generation_pb2.Served:
        if wanted["owner"]:
            raise PermissionDeniedError(REFUSAL)
        return proper(wanted)

    assert any("the foreign adapter was answered with" in fault for fault in await faults_with(answer))


async def test_a_base_that_answers_without_saying_so_is_noticed() -> None:
    def answer(wanted: dict[str, Any]) -> generation_pb2.Served:
        served = proper(wanted)
        served.ClearField("fallback")
        served.ClearField("fallback_reason")
        return served

    faults = await faults_with(answer)
    assert any("did not say so" in fault for fault in faults)
    assert "the answer does not say why the base gave it" in faults
