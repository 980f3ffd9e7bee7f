"""What answers when a version cannot be had: every cause by every mode by every policy, with everything else scripted."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, replace

import pytest

from dataplane.binding import Served
from dataplane.fallback import FallbackMode, FallbackReason
from dataplane.resolution import Answer, Arm, Refusal, Resolution
from dataplane.transfer import CorruptVersionError, DeletedVersionError, WithdrawnVersionError
from tests.dataplane.doubles import BASE, OTHER, VERSION, answer, resolution, until
from tests.dataplane.stage import REQUEST, Stage
from veneer.errors import UnavailableError, VeneerError

NONE, NOT_READY, ANY, PREVIOUS, FAIL = FallbackMode
BEFORE = Arm(OTHER, 6, 1, 8, 1000, "READY")
POLICIES = {"allowed": (True, True), "forbidden": (False, True), "exact": (False, False)}
ASKED = (None, *FallbackMode)


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a version cannot be had, or that it can.

    Attributes:
        outcome: What the control plane says.
        load: Error of the load; None and `is_slow`: it never ends; None else: the version is there.
        is_crowded: It is in host memory, and the device has no room for it.
        previous_load: Error of the load of the version before it.
    """

    outcome: Resolution | Refusal
    load: VeneerError | None = None
    is_slow: bool = False
    is_crowded: bool = False
    previous_load: VeneerError | None = None


_WITH, _WITHOUT = resolution(1, previous=BEFORE), resolution(1)
_AWAY = UnavailableError("the store cannot be read")
CAUSES = {
    "there": Cause(_WITH),
    "slow": Cause(_WITH, is_slow=True),
    "slow, none before it": Cause(_WITHOUT, is_slow=True),
    "crowded": Cause(_WITH, is_crowded=True),
    "crowded, none before it": Cause(_WITHOUT, is_crowded=True),
    "away": Cause(_WITH, _AWAY),
    "away, none before it": Cause(_WITHOUT, _AWAY),
    "corrupt": Cause(_WITH, CorruptVersionError("bad bytes")),
    "both away": Cause(_WITH, _AWAY, previous_load=_AWAY),
    "the one before it retired just now": Cause(_WITH, _AWAY, previous_load=WithdrawnVersionError("gone")),
    "retired just now": Cause(_WITH, WithdrawnVersionError("gone")),
    "the one before it deleted just now": Cause(_WITH, _AWAY, previous_load=DeletedVersionError("gone")),
    "deleted just now": Cause(_WITH, DeletedVersionError("gone")),
    "unknown": Cause(Refusal.NOT_FOUND),
    "role": Cause(Refusal.ROLE),
    "other base": Cause(Refusal.BASE_MISMATCH),
    "retired": Cause(Refusal.RETIRED),
    "quarantined": Cause(Refusal.QUARANTINED),
    "arm quarantined": Cause(resolution(1, state="QUARANTINED", previous=BEFORE)),
}
_LOST = (
    "slow",
    "slow, none before it",
    "crowded",
    "crowded, none before it",
    "away",
    "away, none before it",
    "corrupt",
    "both away",
)
_LOST += ("the one before it retired just now", "the one before it deleted just now")


def expected(name: str, asked: FallbackMode | None, default: FallbackMode, policy: str) -> str:
    """The table, written apart from the code under test: `itself`, `base: why`, `before`, or the name of a status."""
    by_base, by_previous = POLICIES[policy]
    mode = default if asked is None else asked
    if mode in (NOT_READY, ANY) and not by_base:
        mode = NONE
    if mode is PREVIOUS and not by_previous:
        mode = NONE
    if name == "there":
        return "itself"
    if name in ("unknown", "deleted just now"):
        return "base: not_found" if mode is ANY else "NOT_FOUND"
    if name == "role":
        return "PERMISSION_DENIED"
    if name in _LOST:
        if mode in (NOT_READY, ANY):
            return "base: not_ready"
        if mode is PREVIOUS and name in ("slow", "crowded", "away", "corrupt"):
            return "before"
        if name == "corrupt":
            return "FAILED_PRECONDITION"
        if name.startswith(("slow", "crowded")) and mode is not FAIL:
            return "waits"
        return "UNAVAILABLE"
    return "FAILED_PRECONDITION"


@pytest.fixture
def stage(stage: Stage) -> Stage:
    """A stage on which nobody is patient."""
    stage.limits = replace(stage.limits, fallback_after_s=0.01)
    stage.generator = stage.build()
    return stage


def script(stage: Stage, cause: Cause, says: Answer) -> None:
    stage.says = says
    stage.loader.missing.clear()
    stage.loader.crowded.clear()
    stage.engine.gates.clear()
    if cause.is_crowded:
        stage.loader.crowded.add(VERSION)
        stage.engine.gates[VERSION] = asyncio.Event()
    if cause.is_slow or cause.load is not None:
        stage.loader.missing[VERSION] = cause.load
        stage.engine.gates[VERSION] = asyncio.Event()
    if cause.previous_load is not None:
        stage.loader.missing[OTHER] = cause.previous_load
        stage.engine.gates[OTHER] = asyncio.Event()


async def outcome(stage: Stage, mode: FallbackMode | None, *, ends: bool = True) -> str:
    """What comes of a request; one that is not to end is given five times its patience to end all the same."""
    running = asyncio.create_task(stage.served(replace(REQUEST, fallback=mode)))
    done, _ = await asyncio.wait({running}, timeout=30 if ends else 0.05)
    if not done:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return "waits"
    try:
        served = running.result()
    except VeneerError as error:
        return error.status
    if served.version == VERSION:
        assert served == Served("mine", BASE, VERSION, "acme", "bot", 1, "stable", 1, 0)
        return "itself"
    if served.version == OTHER:
        assert served == Served("mine", BASE, OTHER, "acme", "bot", 6, "stable", 1, 0, fallback=FallbackReason.NOT_READY)
        return "before"
    assert served.fallback is not None
    assert served == Served("mine", BASE, fallback=served.fallback)
    return f"base: {served.fallback.value}"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CAUSES)
async def test_every_cause_by_every_mode_by_every_policy(stage: Stage, name: str, policy: str) -> None:
    by_base, by_previous = POLICIES[policy]
    found, wanted = {}, {}
    for asked, default in itertools.product(ASKED, FallbackMode):
        if asked is not None and default is not NONE:
            continue  # the default is not looked at then; `test_fallback` says so
        says = answer(CAUSES[name].outcome, fallback_allowed=by_base, previous_allowed=by_previous, default_fallback=default.name)
        script(stage, CAUSES[name], says)
        wanted[asked, default] = expected(name, asked, default, policy)
        found[asked, default] = await outcome(stage, asked, ends=wanted[asked, default] != "waits")
        await until(stage.holds_nothing)
    assert found == wanted


async def test_the_table_can_fail(stage: Stage) -> None:
    """A mutant that lets the base answer for a version that was retired meanwhile is seen by the table."""
    script(stage, CAUSES["retired just now"], answer(_WITH))
    stage.loader.missing[VERSION] = UnavailableError("as if it were only away")
    assert await outcome(stage, ANY) != expected("retired just now", ANY, NONE, "allowed")


async def test_a_caller_that_falls_back_lets_the_load_go_on_and_one_that_leaves_does_not(stage: Stage) -> None:
    script(stage, CAUSES["slow"], answer(_WITH))
    assert await outcome(stage, NOT_READY) == "base: not_ready"
    assert await outcome(stage, NONE, ends=False) == "waits"
    assert await outcome(stage, FAIL) == "UNAVAILABLE"
    assert stage.loader.kept == [True, False, True]


async def test_the_version_before_is_brought_while_the_present_one_is_waited_for(stage: Stage) -> None:
    script(stage, CAUSES["slow"], answer(_WITH))
    await outcome(stage, PREVIOUS)
    assert stage.loader.expected == [OTHER]
    script(stage, CAUSES["there"], answer(_WITH))
    stage.loader.expected.clear()
    await outcome(stage, PREVIOUS)
    assert stage.loader.expected == []


async def test_other_arms_of_a_split_are_expected(stage: Stage) -> None:
    stage.says = answer(resolution(1, 1, 1))
    served = await stage.served()
    assert served.version is not None
    assert sorted([served.version, *stage.loader.expected]) == sorted([VERSION, OTHER, "d" * 64])


async def test_a_version_before_that_the_prompt_does_not_invoke_leaves_it_to_the_base(stage: Stage) -> None:
    script(stage, CAUSES["away"], answer(resolution(1, previous=replace(BEFORE, invocation_tokens=(9,)))))
    assert await outcome(stage, PREVIOUS) == "base: not_invoked"


async def test_a_version_before_starts_where_the_prompt_invokes_it(stage: Stage) -> None:
    script(stage, CAUSES["away"], answer(resolution(1, previous=replace(BEFORE, invocation_tokens=(6,)))))
    assert await outcome(stage, PREVIOUS) == "before"
    assert [(submit.version, submit.active_from) for submit in stage.engine.submits] == [(VERSION, 0), (OTHER, 1)]


async def test_what_answers_instead_has_only_what_is_left_of_the_deadline(stage: Stage) -> None:
    stage.limits = replace(stage.limits, fallback_after_s=0.2)
    stage.generator = stage.build()
    script(stage, CAUSES["slow"], answer(_WITH))
    await stage.served(replace(REQUEST, fallback=NOT_READY, deadline_s=10))
    first, second = (submit.deadline_s for submit in stage.engine.submits)
    assert first is not None
    assert second is not None
    assert second <= first - 0.2


async def test_a_load_that_is_lost_after_it_was_there_is_a_version_that_cannot_be_had(stage: Stage) -> None:
    stage.says = answer(_WITH)
    stage.engine.gates[VERSION] = asyncio.Event()
    stage.engine.script = (UnavailableError("the engine gave the version up"),)
    running = asyncio.create_task(stage.served(replace(REQUEST, fallback=PREVIOUS)))
    await until(lambda: stage.engine.submits)
    for _ in range(10):  # it was there, and is waited for in the engine
        await asyncio.sleep(0)
    stage.loader.claims[0].fail(CorruptVersionError("bad bytes twice"))
    stage.engine.gates[VERSION].set()
    await until(lambda: len(stage.engine.submits) == 2 or running.done())
    assert [submit.version for submit in stage.engine.submits] == [VERSION, OTHER]
    await asyncio.gather(running, return_exceptions=True)


async def test_first_tokens_are_timed_by_where_the_version_was(stage: Stage) -> None:
    await stage.run()
    script(stage, CAUSES["away"], answer(_WITH))
    await outcome(stage, NOT_READY)
    counts = [stage.counter("veneer_adapter_first_token_seconds_count", level=level) for level in ("device", "host", "store")]
    assert counts == [None, 1, None]
