"""Sequences whose grammar's mask is not there leave the steps and come back; in integers, with the plan ahead and without."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from dataplane.engine.messages import Submit
from dataplane.engine.plan import Plan, Result
from dataplane.engine.sampler import HELD
from tests.dataplane.engine.driving import Device, Loop, assert_idle, expected, make, rows_of, submit


class Mask:
    """A mask that comes when the test says."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.is_ready = self.has_begun = self.is_stopped = False

    def begin(self) -> None:
        self.has_begun = True

    def allowed(self, index: int) -> bytes | None:
        return b"\xff" if self.is_ready and index == len(self.tokens) else None

    def advance(self, token: int) -> None:
        self.tokens.append(token)
        self.is_ready = False

    def stop(self) -> None:
        self.is_stopped = True


class MaskedDevice(Device):
    """Holds a row whose mask is not there, as the sampler and the runner do."""

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size)
        self.num_held = 0

    def run_masked(self, plan: Plan, masks: dict[str, Mask]) -> list[Result]:
        before = dict(self.last)
        sampled = [rows for rows in rows_of(plan) if rows.sampling is not None]
        results: list[Result] = []
        for rows, token in zip(sampled, self.run(plan), strict=True):
            assert token is not None
            mask = masks.get(self.owners[rows.seat].request_id)
            if mask is not None and mask.allowed(rows.sample_index) is None:
                self.last[rows.seat] = rows.ids[-1] if rows.ids else before[rows.seat]
                self.num_held += 1
                results.append(HELD)
                continue
            if mask is not None:
                mask.advance(token)
            results.append(token)
        return results


class MaskedLoop(Loop):
    """A loop over requests that have masks, by their ids."""

    def __init__(self, scheduler: object, *, lag: int) -> None:
        super().__init__(scheduler, lag=lag)  # type: ignore[arg-type]
        self.masks: dict[str, Mask] = {}
        self.masked = MaskedDevice(4)
        self.device = self.masked
        self.masked.run = self._run  # type: ignore[method-assign]

    def _run(self, plan: Plan) -> list[Result]:  # type: ignore[override]
        self.masked.run = lambda plan: Device.run(self.masked, plan)  # type: ignore[method-assign]
        results = self.masked.run_masked(plan, self.masks)
        self.masked.run = self._run  # type: ignore[method-assign]
        return results

    def add(self, request: Submit, *, has_mask: bool) -> None:
        mask = None
        if has_mask:
            mask = self.masks[request.request_id] = Mask()
            request = replace(request, sampling=replace(request.sampling, grammar="g"))
        self.scheduler.add(request, 0.0, mask=mask)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_sequence_is_out_of_the_steps_until_its_mask_comes_and_loses_nothing(lag: int) -> None:
    scheduler = make()
    loop = MaskedLoop(scheduler, lag=lag)
    loop.add(submit("masked", max_tokens=6), has_mask=True)
    loop.add(submit("free", (9, 9), max_tokens=9), has_mask=False)
    mask = loop.masks["masked"]
    assert not mask.has_begun
    loop.run()
    assert mask.has_begun
    assert loop.finished == {"free": "length"}
    num_held = loop.masked.num_held
    assert num_held <= 1 + lag, "it is not tried again before its mask is there"
    assert scheduler.num_running == 1
    assert scheduler.num_pages_used > 0
    for done in range(1, 7):
        mask.is_ready = True
        loop.run()
        assert len(loop.outputs["masked"]) == done
    assert loop.outputs == {"masked": expected((1, 2, 3, 4), 6, ()), "free": expected((9, 9), 9, ())}
    assert mask.is_stopped
    assert_idle(scheduler)
    assert scheduler._seating.held == {}


@pytest.mark.parametrize("lag", [0, 1])
def test_a_mask_that_does_not_come_ends_its_request_at_the_limit_and_no_other(lag: int) -> None:
    scheduler = make(max_mask_wait_s=2.0)
    loop = MaskedLoop(scheduler, lag=lag)
    loop.add(submit("masked"), has_mask=True)
    loop.add(submit("later"), has_mask=True)
    loop.run()
    assert scheduler.next_deadline is None
    assert scheduler.expire(5.0) == []
    assert scheduler.next_deadline == 7.0
    loop.masks["later"].is_ready = True
    loop.run()
    assert scheduler.expire(6.0) == []
    (failed,) = scheduler.expire(7.0)
    assert (failed.request_id, failed.status) == ("masked", "RESOURCE_EXHAUSTED")
    assert "within 2 s" in failed.message
    assert scheduler.expire(7.9) == []
    assert [failed.request_id for failed in scheduler.expire(8.0)] == ["later"]
    assert_idle(scheduler)


def test_a_held_sequence_gives_its_pages_to_others_and_comes_to_the_same_text() -> None:
    scheduler = make(num_pages=8, max_sequences=2)
    loop = MaskedLoop(scheduler, lag=0)
    loop.add(submit("masked", (1, 2, 3), max_tokens=12), has_mask=True)
    loop.masks["masked"].is_ready = True
    loop.turn()
    loop.add(submit("free", (7, 8, 9), max_tokens=28), has_mask=False)
    loop.run()
    assert loop.finished == {"free": "length"}
    for _ in range(12):
        loop.masks["masked"].is_ready = True
        loop.run()
    assert loop.outputs["masked"] == expected((1, 2, 3), 12, ())
    assert_idle(scheduler)


def test_a_wait_for_a_mask_ends_at_its_limit_also_when_its_sequence_gave_way_meanwhile() -> None:
    scheduler = make(num_pages=8, max_sequences=2, max_mask_wait_s=2.0)
    loop = MaskedLoop(scheduler, lag=0)
    loop.add(submit("masked", (1, 2, 3), max_tokens=12), has_mask=True)
    loop.masks["masked"].is_ready = True
    loop.turn()
    loop.turn()
    assert len(loop.outputs["masked"]) == 1
    assert scheduler.expire(5.0) == []
    loop.add(submit("free", (7, 8, 9), max_tokens=28), has_mask=False)
    loop.run()
    assert loop.finished == {"free": "length"}
    assert scheduler.num_running == 1, "it gave way, and is back"
    (failed,) = scheduler.expire(7.0)
    assert (failed.request_id, failed.status) == ("masked", "RESOURCE_EXHAUSTED")
    assert_idle(scheduler)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_comes_late_every_request_gets_its_own_tokens(lag: int, seed: int) -> None:
    rng = random.Random(seed)
    scheduler = make(num_pages=20, max_sequences=5)
    loop = MaskedLoop(scheduler, lag=lag)
    wanted, gone = {}, set()
    for number in range(25):
        prompt = tuple(rng.randrange(1, 50) for _ in range(rng.randrange(1, 14)))
        name, count = f"r{number}", rng.randrange(1, 12)
        loop.add(submit(name, prompt, max_tokens=count, tenant=rng.choice("abc")), has_mask=rng.random() < 0.7)
        wanted[name] = expected(prompt, count, ())
    for _ in range(3000):
        for name, mask in loop.masks.items():
            if mask.has_begun and rng.random() < 0.4:
                mask.is_ready = True
            if rng.random() < 0.02:
                scheduler.pause(name, paused=rng.random() < 0.5)
            if rng.random() < 0.0005 and scheduler.abort(name):
                gone.add(name)
        loop.turn()
        if not scheduler.request_ids:
            break
    for name in scheduler.request_ids:
        scheduler.pause(name, paused=False)
    for _ in range(3000):
        for mask in loop.masks.values():
            mask.is_ready = True
        loop.turn()
    assert {name: output for name, output in loop.outputs.items() if name not in gone} == {
        name: tokens for name, tokens in wanted.items() if name not in gone
    }
    assert loop.masked.num_held
    assert_idle(scheduler)
    assert scheduler._seating.held == {}
    assert all(mask.is_stopped for mask in loop.masks.values())
