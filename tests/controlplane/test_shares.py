"""How one number is divided: never more than there is, in proportion, and with room for who comes next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controlplane.shares import share_of

WANTS = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 1000), min_size=1)


@given(WANTS, st.integers(0, 2000))
def test_shares_cut_from_the_same_wants_fit_together_and_leave_nothing_that_is_wanted(wants: dict[str, int], limit: int) -> None:
    shares = {name: share_of(name, wants, limit=limit, reserved=0) for name in wants}
    assert sum(shares.values()) <= limit
    if sum(wants.values()) <= limit:
        assert all(shares[name] >= want for name, want in wants.items())
    else:
        assert sum(shares.values()) == limit


@given(WANTS, st.integers(0, 2000), st.integers(0, 3000))
def test_what_others_may_have_used_is_never_given_away(wants: dict[str, int], limit: int, reserved: int) -> None:
    for name in wants:
        assert 0 <= share_of(name, wants, limit=limit, reserved=reserved) <= max(limit - reserved, 0)


def test_who_is_alone_and_wants_little_leaves_room_for_a_newcomer() -> None:
    assert share_of("a", {"a": 10}, limit=100, reserved=0) == 55
    assert share_of("b", {"a": 10, "b": 20}, limit=100, reserved=55) == 43


def test_what_does_not_fit_is_cut_in_proportion_to_what_is_wanted() -> None:
    wants = {"a": 300, "b": 100, "c": 0}
    assert [share_of(name, wants, limit=100, reserved=0) for name in "abc"] == [75, 25, 0]


def test_a_quota_smaller_than_the_number_of_nodes_goes_to_some_of_them() -> None:
    wants = dict.fromkeys("abc", 10)
    assert [share_of(name, wants, limit=2, reserved=0) for name in "abc"] == [1, 1, 0]
