"""How long answers are used, with a clock in the test's hand."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from dataplane.enrollment import NotEnrolledError
from dataplane.resolution import Answer, Refusal, Target
from dataplane.resolve_cache import Key, ResolveCache, Subject
from tests.dataplane.doubles import answer, caller, resolution
from veneer.errors import DeadlineExceededError, ResourceExhaustedError, UnauthenticatedError, UnavailableError
from veneer.key_lookups import KeyLookups, LookupLimits

KEY = Key(b"k" * 32, Target("bot"))
AWAY = UnavailableError("away")


class Plane:
    """A control plane that answers what the test says, when the test says, on the test's clock."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.wall_s = 5000.0
        self.says: Answer | Exception = answer(resolution(1))
        self.takes_s = 0.0
        self.num_asked = 0
        self.gate: asyncio.Event | None = None
        self.cache = ResolveCache(
            self.ask, soft_age_s=2, hard_age_s=60, max_entries=3, clock=lambda: self.now_s, wall_clock=lambda: self.wall_s
        )

    async def ask(self, key: Key) -> Answer:
        self.num_asked += 1
        says = self.says
        if self.gate is not None:
            await self.gate.wait()
        self.now_s += self.takes_s
        if isinstance(says, Exception):
            raise says
        return says

    def start(self, key: Key = KEY) -> asyncio.Task[Answer]:
        return asyncio.create_task(self.cache.resolve(key))


@pytest.fixture
def plane() -> Plane:
    return Plane()


async def test_a_fresh_answer_is_used_without_asking(plane: Plane) -> None:
    await plane.cache.resolve(KEY)
    plane.now_s += 1.99
    await plane.cache.resolve(KEY)
    assert plane.num_asked == 1


async def test_past_the_soft_age_the_control_plane_is_asked(plane: Plane) -> None:
    await plane.cache.resolve(KEY)
    plane.now_s += 2
    plane.says = answer(Refusal.RETIRED)
    assert (await plane.cache.resolve(KEY)).outcome is Refusal.RETIRED


async def test_the_age_counts_from_the_start_of_the_call(plane: Plane) -> None:
    plane.takes_s = 1.5
    await plane.cache.resolve(KEY)
    plane.now_s += 0.6
    await plane.cache.resolve(KEY)
    assert plane.num_asked == 2


@pytest.mark.parametrize("error", [AWAY, DeadlineExceededError("late")])
async def test_while_the_control_plane_is_away_the_old_answer_serves_up_to_the_hard_age(plane: Plane, error: Exception) -> None:
    old = await plane.cache.resolve(KEY)
    plane.says = error
    plane.now_s += 59.9
    assert await plane.cache.resolve(KEY) is old
    plane.now_s += 0.1
    with pytest.raises(UnavailableError):
        await plane.cache.resolve(KEY)


async def test_a_stale_answer_is_not_made_younger_by_its_use(plane: Plane) -> None:
    await plane.cache.resolve(KEY)
    plane.says = AWAY
    for _ in range(6):
        plane.now_s += 10
        if plane.now_s < 1060:
            await plane.cache.resolve(KEY)
    with pytest.raises(UnavailableError):
        await plane.cache.resolve(KEY)


async def test_a_revoked_key_ends_at_once_and_leaves_no_reserve(plane: Plane) -> None:
    await plane.cache.resolve(KEY)
    plane.now_s += 2
    plane.says = UnauthenticatedError("no")
    with pytest.raises(UnauthenticatedError):
        await plane.cache.resolve(KEY)
    plane.now_s += 1  # as long as a refusal is remembered
    plane.says = AWAY
    with pytest.raises(UnavailableError):
        await plane.cache.resolve(KEY)


async def test_unknown_keys_are_asked_about_so_often_and_known_ones_as_ever(plane: Plane) -> None:
    await plane.cache.resolve(KEY)
    plane.says = UnauthenticatedError("no")
    limits = LookupLimits(per_s=0.001, burst=3, wait_s=0.01)
    plane.cache._lookups = KeyLookups(limits, clock=lambda: plane.now_s)
    refusals = []
    for number in range(6):
        with pytest.raises((UnauthenticatedError, ResourceExhaustedError)) as caught:
            await plane.cache.resolve(Key(b"%d" % number, KEY.target))
        refusals.append(caught.value.status)
    assert refusals == ["UNAUTHENTICATED"] * 3 + ["RESOURCE_EXHAUSTED"] * 3
    assert plane.num_asked == 4
    await plane.cache.resolve(KEY)


async def test_callers_that_ask_the_same_share_one_call(plane: Plane) -> None:
    plane.gate = asyncio.Event()
    tasks = [plane.start() for _ in range(20)]
    other = plane.start(Key(b"o" * 32, Target("bot")))
    await asyncio.sleep(0)
    tasks[0].cancel()
    plane.gate.set()
    await asyncio.gather(*tasks[1:], other)
    assert plane.num_asked == 2
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]


async def test_an_invalidated_answer_is_asked_again_but_stays_a_reserve(plane: Plane) -> None:
    await plane.cache.resolve(KEY)
    plane.cache.invalidate([Subject("acme", "bot")])
    plane.says = answer(resolution(1, generation=2))
    assert await plane.cache.resolve(KEY) is plane.says
    plane.cache.invalidate()
    newest, plane.says = plane.says, AWAY
    assert await plane.cache.resolve(KEY) is newest


@pytest.mark.parametrize(
    ("subject", "asked_again"),
    [
        (Subject("acme", "bot"), True),
        (Subject("acme"), True),
        (Subject("acme", "other"), False),
        (Subject("other", "bot"), False),
        (Subject("other"), False),
    ],
)
async def test_an_invalidation_concerns_what_changed_only(plane: Plane, subject: Subject, asked_again: bool) -> None:
    await plane.cache.resolve(KEY)
    plane.cache.invalidate([subject])
    await plane.cache.resolve(KEY)
    assert (plane.num_asked == 2) is asked_again


async def test_a_change_of_the_callers_own_keys_concerns_foreign_adapters_too(plane: Plane) -> None:
    key = Key(b"k" * 32, Target("bot", owner="other"))
    await plane.cache.resolve(key)
    plane.cache.invalidate([Subject("acme")])
    await plane.cache.resolve(key)
    assert plane.num_asked == 2


async def test_a_call_that_began_before_a_change_does_not_answer_those_who_come_after_it(plane: Plane) -> None:
    plane.gate = asyncio.Event()
    early = plane.start()
    for _ in range(3):
        await asyncio.sleep(0)
    assert plane.num_asked == 1
    plane.cache.invalidate([Subject("acme", "bot")])
    plane.says = answer(Refusal.RETIRED)
    late = plane.start()
    await asyncio.sleep(0)
    plane.gate.set()
    assert (await late).outcome is Refusal.RETIRED
    assert (await early).outcome is not Refusal.RETIRED
    assert (await plane.cache.resolve(KEY)).outcome is Refusal.RETIRED


async def test_an_alias_never_goes_back(plane: Plane) -> None:
    plane.says = answer(resolution(1, generation=5))
    await plane.cache.resolve(KEY)
    plane.now_s += 2
    plane.says = answer(resolution(1, generation=4))
    served = await plane.cache.resolve(KEY)
    assert served.outcome == resolution(1, generation=5)
    assert plane.cache.counts.regressed == 2
    with pytest.raises(UnavailableError):
        await plane.cache.resolve(Key(b"o" * 32, Target("bot")))
    plane.says = answer(resolution(1, generation=6))
    assert (await plane.cache.resolve(KEY)).outcome == resolution(1, generation=6)


async def test_an_older_answer_that_comes_late_is_asked_once_more(plane: Plane) -> None:
    plane.says = answer(resolution(1, generation=5))
    await plane.cache.resolve(KEY)
    late = [answer(resolution(1, generation=4)), answer(resolution(1, generation=5))]

    async def ask(key: Key) -> Answer:
        return late.pop(0)

    plane.cache._ask = ask
    plane.now_s += 2
    assert (await plane.cache.resolve(KEY)).outcome == resolution(1, generation=5)


@pytest.mark.parametrize(("after_s", "valid"), [(59.0, True), (61.0, False)])
async def test_without_the_control_plane_a_key_ends_when_it_says_with_leeway_for_two_clocks(
    plane: Plane, after_s: float, valid: bool
) -> None:
    plane.says = Answer(caller(expire_unix_s=plane.wall_s), resolution(1))
    await plane.cache.resolve(KEY)
    plane.says = UnavailableError("away")
    plane.now_s += 10
    plane.wall_s += after_s
    if valid:
        await plane.cache.resolve(KEY)
        return
    with pytest.raises(UnauthenticatedError):
        await plane.cache.resolve(KEY)


async def test_a_clock_that_is_set_forward_ends_no_key_that_the_control_plane_knows(plane: Plane) -> None:
    plane.says = Answer(caller(expire_unix_s=plane.wall_s + 600), resolution(1))
    plane.wall_s += 3600
    for _ in range(2):
        assert await plane.cache.resolve(KEY) == plane.says
    plane.now_s += 10
    assert await plane.cache.resolve(KEY) == plane.says


async def test_the_least_recently_used_answer_goes_first(plane: Plane) -> None:
    keys = [Key(bytes([number]) * 32, Target("bot")) for number in range(4)]
    for key in keys[:3]:
        await plane.cache.resolve(key)
    await plane.cache.resolve(keys[0])
    await plane.cache.resolve(keys[3])
    assert len(plane.cache) == 3
    await plane.cache.resolve(keys[0])
    assert plane.num_asked == 4
    await plane.cache.resolve(keys[1])
    assert plane.num_asked == 5


async def test_an_adapter_was_asked_for_lately_by_those_who_may_use_it(plane: Plane) -> None:
    assert not plane.cache.was_asked_lately("acme", "bot")
    plane.says = answer(Refusal.NOT_FOUND)
    await plane.cache.resolve(KEY)
    assert not plane.cache.was_asked_lately("acme", "bot")
    plane.says = answer(resolution(1))
    plane.now_s += 2
    await plane.cache.resolve(KEY)
    assert plane.cache.was_asked_lately("acme", "bot")
    assert not plane.cache.was_asked_lately("other", "bot")
    plane.now_s += 600
    assert not plane.cache.was_asked_lately("acme", "bot")


async def test_only_so_many_adapters_are_remembered(plane: Plane) -> None:
    for number in range(4):
        plane.says = answer(replace(resolution(1), adapter=f"bot-{number}"))
        await plane.cache.resolve(Key(b"k" * 32, Target(f"bot-{number}")))
    assert [plane.cache.was_asked_lately("acme", f"bot-{number}") for number in range(4)] == [False, True, True, True]


async def test_a_node_that_is_refused_uses_no_answer_that_it_kept(plane: Plane) -> None:
    await plane.cache.resolve(KEY)
    plane.now_s += 2
    plane.says = NotEnrolledError()
    with pytest.raises(NotEnrolledError):
        await plane.cache.resolve(KEY)
    plane.says = AWAY
    with pytest.raises(UnavailableError, match="unreachable"):
        await plane.cache.resolve(KEY)


async def test_forgotten_answers_are_asked_again_also_those_that_were_on_their_way(plane: Plane) -> None:
    await plane.cache.resolve(KEY)
    other = Key(b"o" * 32, Target("bot"))
    plane.gate = asyncio.Event()
    flight = plane.start(other)
    await asyncio.sleep(0)
    plane.cache.forget()
    assert len(plane.cache) == 0
    plane.gate.set()
    await flight
    asked = plane.num_asked
    plane.says = NotEnrolledError()
    for key in (KEY, other):
        with pytest.raises(NotEnrolledError):
            await plane.cache.resolve(key)
    assert plane.num_asked == asked + 2
