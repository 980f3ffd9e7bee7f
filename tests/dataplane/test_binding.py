"""What answers a request, and from where on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dataplane.binding import Binding, Served, activate, bind
from dataplane.fallback import FallbackMode, FallbackReason
from dataplane.resolution import Answer, Refusal
from tests.dataplane.doubles import BASE, OTHER, VERSION, answer, resolution
from veneer.errors import FailedPreconditionError, NotFoundError


def bound(said: Answer, *, unit: str = "", mode: FallbackMode = FallbackMode.NONE) -> Served:
    return bind(said, request_id="mine", base_digest=BASE, split_unit=unit, mode=mode, priority=7)


def test_a_version_is_named_with_everything_that_led_to_it() -> None:
    assert bound(answer(resolution(1, generation=4))) == Served(
        "mine", BASE, VERSION, "acme", "bot", 1, "stable", 4, 0, sticky=False, fallback=None, priority=7
    )


def test_a_unit_is_bound_to_its_own_arm() -> None:
    split = answer(resolution(1, 1))
    served = {unit: bound(split, unit=unit) for unit in map(str, range(20))}
    assert {one.version for one in served.values()} == {VERSION, OTHER}
    assert all(one == bound(split, unit=unit) and one.sticky for unit, one in served.items())


def test_the_base_is_bound_to_nothing() -> None:
    assert bound(answer(resolution())) == Served("mine", BASE, priority=7)


def test_a_refusal_is_the_answer_unless_the_base_may_take_over() -> None:
    with pytest.raises(NotFoundError):
        bound(answer(Refusal.NOT_FOUND))
    taken = bound(answer(Refusal.NOT_FOUND), mode=FallbackMode.ANY)
    assert taken == Served("mine", BASE, fallback=FallbackReason.NOT_FOUND, priority=7)


def test_an_arm_that_is_not_ready_is_refused() -> None:
    with pytest.raises(FailedPreconditionError):
        bound(answer(resolution(1, state="RETIRED")), mode=FallbackMode.ANY)


@pytest.mark.parametrize(
    ("invocation", "active_from"), [((), 0), ((1,), 0), ((2, 3), 4), ((3,), 5)], ids=["always", "first", "last time", "last"]
)
def test_a_version_starts_where_it_is_last_invoked(invocation: tuple[int, ...], active_from: int) -> None:
    said = answer(resolution(1, invocation=invocation))
    served = bound(said)
    assert activate(served, said, (1, 2, 3, 4, 2, 3)) == Binding(served, active_from, rank=8)


def test_each_arm_is_invoked_by_its_own_tokens() -> None:
    plain, called = resolution(1, 1), resolution(1, 1, invocation=(9,))
    said = answer(replace(plain, arms=(plain.arms[0], called.arms[1])))
    starts = {one.version: activate(one, said, (1, 9)).active_from for one in (bound(said, unit=str(unit)) for unit in range(20))}
    assert starts == {VERSION: 0, OTHER: 1}


def test_a_version_that_is_not_invoked_leaves_the_prompt_to_the_base() -> None:
    said = answer(resolution(1, invocation=(9,)))
    base = Served("mine", BASE, fallback=FallbackReason.NOT_INVOKED, priority=7)
    assert activate(bound(said), said, (1, 2, 3)) == Binding(base)


def test_the_base_starts_with_the_prompt() -> None:
    for said, mode in ((answer(resolution()), FallbackMode.NONE), (answer(Refusal.NOT_FOUND), FallbackMode.ANY)):
        served = bound(said, mode=mode)
        assert activate(served, said, (1, 2)) == Binding(served)
