"""The truth table of fallback, row by row."""

from __future__ import annotations

import pytest

from dataplane.fallback import FallbackMode, FallbackReason, on_not_ready, on_refusal
from dataplane.resolution import Refusal
from tests.dataplane.doubles import caller
from veneer.errors import VeneerError

NOT_READY, ANY = FallbackMode.NOT_READY, FallbackMode.ANY


@pytest.mark.parametrize("allowed", [True, False])
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
def test_a_refusal_is_final_but_for_unknown_adapters_under_any(
    refusal: Refusal, status: str, mode: FallbackMode, allowed: bool
) -> None:
    if (refusal, mode, allowed) == (Refusal.NOT_FOUND, ANY, True):
        assert on_refusal(refusal, mode, caller()) is FallbackReason.NOT_FOUND
        return
    with pytest.raises(VeneerError) as caught:
        on_refusal(refusal, mode, caller(fallback_allowed=allowed))
    assert caught.value.status == status


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("mode", list(FallbackMode))
def test_a_version_that_cannot_be_loaded_is_replaced_where_mode_and_tenant_allow(mode: FallbackMode, allowed: bool) -> None:
    reason = on_not_ready(mode, caller(fallback_allowed=allowed))
    assert reason is (FallbackReason.NOT_READY if allowed and mode in (NOT_READY, ANY) else None)


def test_every_refusal_has_a_row() -> None:
    assert {refusal.name for refusal in Refusal} == {"NOT_FOUND", "ROLE", "BASE_MISMATCH", "RETIRED", "QUARANTINED"}
