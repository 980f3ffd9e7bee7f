from __future__ import annotations

import asyncio

import pytest

from veneer import locations
from veneer.errors import UnavailableError
from veneer.locations import Location, Locations


class Control:
    """Answers as told, and counts questions."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.answer: Location | Exception = Location("acme/tone", ("a:1",))
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.now_s = 0.0

    async def ask(self, adapter: str, owner: str) -> Location:
        self.asked.append((adapter, owner))
        await self.may_answer.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def clock(self) -> float:
        return self.now_s


async def test_an_answer_is_kept_for_a_while_and_used_while_another_is_asked_for() -> None:
    control = Control()
    known = Locations(control.ask, clock=control.clock)
    assert await known.of("tone", "") == Location("acme/tone", ("a:1",))
    assert await known.of("tone", "") == Location("acme/tone", ("a:1",))
    assert control.asked == [("tone", "")]
    control.now_s, control.answer = 13.0, Location("acme/tone", ("b:2",))
    control.may_answer.clear()
    assert (await known.of("tone", "")).addresses == ("a:1",), "nobody waits for the new one"
    control.may_answer.set()
    async with asyncio.timeout(60):
        while (await known.of("tone", "")).addresses != ("b:2",):  # noqa: ASYNC110  what is tried is what callers see
            await asyncio.sleep(0)
    assert len(control.asked) == 2
    await known.close()


async def test_a_slow_answer_delays_a_request_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations, "_PATIENCE_S", 0.01)
    control = Control()
    control.may_answer.clear()
    known = Locations(control.ask)
    assert await known.of("tone", "acme") == Location("acme/tone")
    assert await known.of("tone", "acme") == Location("acme/tone")
    assert control.asked == [("tone", "acme")], "one question at a time"
    await known.close()


async def test_a_failure_costs_nothing_and_keeps_what_was_known() -> None:
    control = Control()
    control.answer = UnavailableError("away")
    known = Locations(control.ask, clock=control.clock)
    assert await known.of("tone", "") == Location("/tone")
    control.now_s, control.answer = 13.0, Location("acme/tone", ("a:1",))
    async with asyncio.timeout(60):
        while (await known.of("tone", "")).addresses != ("a:1",):  # noqa: ASYNC110  what is tried is what callers see
            await asyncio.sleep(0)
    control.now_s, control.answer = 26.0, UnavailableError("away")
    await known.of("tone", "")
    await known.close()
    assert (await known.of("tone", "")).addresses == ("a:1",)
    await known.close()


async def test_the_base_and_a_client_without_a_control_plane_ask_nobody() -> None:
    control = Control()
    assert await Locations(control.ask).of("", "") == Location("")
    assert await Locations(None).of("tone", "acme") == Location("acme/tone")
    assert control.asked == []


async def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations, "_MAX_ADAPTERS", 3)
    control = Control()
    known = Locations(control.ask)
    for number in range(5):
        await known.of(f"tone-{number}", "")
    assert len(known._known) == 3
