"""The truth table of fallback, row by row."""

from __future__ import annotations

import itertools

import pytest

from dataplane.fallback import FallbackMode, FallbackReason, Substitute, mode_of, on_not_ready, on_refusal
from dataplane.resolution import Refusal
from tests.dataplane.doubles import caller
from veneer.errors import VeneerError

NONE, NOT_READY, ANY, PREVIOUS, FAIL = FallbackMode
POLICIES = [(True, True), (False, True), (False, False)]


@pytest.mark.parametrize("mode", list(FallbackMode))
@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (Refusal.NOT_FOUND, "NOT_FOUND"),
        (Refusal.ROLE, "PERMISSION_DENIED"),
        (Refusal.BASE_MISMATCH, "FAILED_PRECONDITION"),
        (Refusal.RETIRED, "FAILED_PRECONDITION"),
        (Refusal.QUARANTINED, "FAILED_PRECONDITION"),
    ],
)
def test_a_refusal_is_final_but_for_unknown_adapters_under_any(refusal: Refusal, status: str, mode: FallbackMode) -> None:
    if (refusal, mode) == (Refusal.NOT_FOUND, ANY):
        assert on_refusal(refusal, mode) is FallbackReason.NOT_FOUND
        return
    with pytest.raises(VeneerError) as caught:
        on_refusal(refusal, mode)
    assert caught.value.status == status


@pytest.mark.parametrize("has_previous", [True, False])
@pytest.mark.parametrize("mode", list(FallbackMode))
def test_what_takes_the_place_of_a_version_that_cannot_be_loaded(mode: FallbackMode, *, has_previous: bool) -> None:
    expected = {NOT_READY: Substitute.BASE, ANY: Substitute.BASE, PREVIOUS: Substitute.PREVIOUS if has_previous else None}
    assert on_not_ready(mode, has_previous=has_previous) is expected.get(mode)


@pytest.mark.parametrize(("by_base", "by_previous"), POLICIES)
def test_a_request_gets_what_it_asks_for_or_its_tenants_default_as_far_as_that_is_allowed(
    *, by_base: bool, by_previous: bool
) -> None:
    for asked, default in itertools.product([None, *FallbackMode], FallbackMode):
        who = caller(fallback_allowed=by_base, previous_allowed=by_previous, default_fallback=default.name)
        wanted = asked or default
        is_forbidden = (wanted in (NOT_READY, ANY) and not by_base) or (wanted is PREVIOUS and not by_previous)
        assert mode_of(asked, who) is (NONE if is_forbidden else wanted)


def test_every_refusal_has_a_row() -> None:
    assert {refusal.name for refusal in Refusal} == {"NOT_FOUND", "ROLE", "BASE_MISMATCH", "RETIRED", "QUARANTINED"}


def test_modes_have_the_names_that_tenants_give_them() -> None:
    assert [mode.value for mode in FallbackMode] == ["NONE", "NOT_READY", "ANY", "PREVIOUS", "FAIL"]
