"""Page tokens."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from uuid import UUID

import pytest

from controlplane.paging import Part, page_limit, page_start, page_token
from veneer.errors import InvalidArgumentError


def test_a_token_gives_back_its_sort_key_to_its_own_listing() -> None:
    token = page_token("keys", ["2026-01-01", "id"])
    assert page_start("keys", token, kinds=[str, str]) == ["2026-01-01", "id"]
    assert page_start("keys", "", kinds=[str, str]) is None


def test_a_sort_key_of_times_and_identifiers_comes_back_as_such() -> None:
    last: list[Part] = [datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC), UUID(int=7), 8]
    assert page_start("keys", page_token("keys", last), kinds=[datetime, UUID, int]) == last


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ("\ud800", str),
        ("a\0", str),
        ("yesterday", datetime),
        (7, datetime),
        ("no identifier", UUID),
        (True, int),
        (1.5, int),
        (1 << 63, int),
    ],
)
def test_a_forged_token_is_refused(part: object, kind: type) -> None:
    token = base64.urlsafe_b64encode(json.dumps(["keys", part]).encode()).decode()
    with pytest.raises(InvalidArgumentError, match="page_token"):
        page_start("keys", token, kinds=[kind])


@pytest.mark.parametrize(
    ("listing", "kinds"), [("tenants", [str, str]), ("keys", [str]), ("keys", [str, int]), ("keys", [str, str, str])]
)
def test_a_token_of_another_listing_or_shape_is_refused(listing: str, kinds: list[type]) -> None:
    with pytest.raises(InvalidArgumentError, match="page_token"):
        page_start(listing, page_token("keys", ["a", "b"]), kinds=kinds)


@pytest.mark.parametrize("token", ["x", "====", "bnVsbA==", "MQ==", "W10=", "W3RydWVd", "\udce4", "é"])
def test_noise_is_refused(token: str) -> None:
    with pytest.raises(InvalidArgumentError, match="page_token"):
        page_start("keys", token, kinds=[str])


def test_a_page_has_a_hundred_rows_unless_asked_and_never_more_than_a_thousand() -> None:
    assert [page_limit(size) for size in (0, 1, 1000, 1001)] == [100, 1, 1000, 1000]
