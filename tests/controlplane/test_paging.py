"""Page tokens."""

from __future__ import annotations

import pytest

from controlplane.paging import page_limit, page_start, page_token
from veneer.errors import InvalidArgumentError


def test_a_token_gives_back_its_sort_key_to_its_own_listing() -> None:
    token = page_token("keys", ["2026-01-01", "id"])
    assert page_start("keys", token, kinds=[str, str]) == ["2026-01-01", "id"]
    assert page_start("keys", "", kinds=[str, str]) is None


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
