"""The page pool, against a simple model of it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.engine.kv_cache import PagePool

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["take", "give", "name", "share", "forget"]),
        st.integers(0, 7),
        st.sampled_from(["x", "y", "z"]),
        st.sampled_from([None, "v"]),
    ),
    max_size=80,
)


@settings(max_examples=7 * settings.default.max_examples)
@given(STEPS)
def test_every_page_is_free_held_or_kept_and_none_is_lost(steps: list[tuple[str, int, str, str | None]]) -> None:
    pool = PagePool(12, page_size=4)
    held: list[tuple[str, list[int]]] = []
    named: dict[int, tuple[bytes, str | None]] = {}
    owners: dict[int, str] = {}
    serial = 0
    for verb, number, tenant, version in steps:
        holders = Counter(page for _, pages in held for page in pages)
        if verb == "take" and number <= pool.num_free:
            fresh = pool.take(number, tenant)
            assert len(set(fresh)) == number
            assert not set(fresh) & set(holders), "a held page is handed to nobody else"
            for page in fresh:
                named.pop(page, None)
            held.append((tenant, fresh))
        elif verb == "give" and held:
            owner, pages = held.pop(number % len(held))
            pool.give_back(pages, owner)
        elif verb == "name" and held:
            owner, pages = held[number % len(held)]
            for page in pages:
                if page not in named:
                    serial += 1
                    named[page] = (serial.to_bytes(4), version)
                    pool.name([page], [named[page][0]], version=version, tenant=owner)
                    owners[page] = owner
        elif verb == "share" and named:
            page, (key, _) = sorted(named.items())[number % len(named)]
            found = pool.find([key])
            if found:
                assert found == [page], "a key finds its own page only"
                assert pool.num_kept_of(found, owners[page]) == (page not in holders)
                pool.share(found, owners[page])
                held.append((owners[page], found))
        elif verb == "forget":
            pool.forget(version)
            named = {page: name for page, name in named.items() if name[1] != version}
        holders = Counter(page for _, pages in held for page in pages)
        named = {page: name for page, name in named.items() if pool._keys[page] is not None}
        assert set(holders) <= set(range(1, 13)), "page 0 is nobody's"
        assert pool.num_free + len(holders) == 12
        kept = {page for page in named if page not in holders}
        assert pool.num_kept == len(kept)
        assert pool._index == {name[0]: page for page, name in named.items()}
        assert {page: key for page, key in enumerate(pool._keys) if key} == {page: name[0] for page, name in named.items()}
        for name in ("x", "y", "z"):
            assert pool.held_by(name) == len({page for owner, pages in held if owner == name for page in pages})
        assert pool._shared == {page: count - 1 for page, count in holders.items() if count > 1}
    for owner, pages in held:
        pool.give_back(pages, owner)
    assert pool.num_free == 12
    assert len(pool.take(12, "x")) == 12
    assert pool.num_kept == 0
    assert set(pool._accounts) == {"x"}


def named(pool: PagePool, count: int, tenant: str, mark: str, *, version: str | None = None) -> list[bytes]:
    """Takes, names and gives back a chain of pages; returns its keys."""
    pages = pool.take(count, tenant)
    keys = [f"{mark}{index}".encode() for index in range(count)]
    pool.name(pages, keys, version=version, tenant=tenant)
    pool.give_back(pages, tenant)
    return keys


def test_the_longest_known_beginning_is_found() -> None:
    pool = PagePool(8, page_size=4)
    keys = named(pool, 3, "x", "a")
    assert len(pool.find(keys)) == 3
    assert len(pool.find([*keys[:2], b"other", keys[2]])) == 2
    assert pool.find([b"other", *keys]) == []


def test_the_tenant_above_its_share_loses_pages_first_and_of_its_own_the_oldest() -> None:
    pool = PagePool(12, page_size=4)
    small = named(pool, 2, "y", "y")
    old, new = named(pool, 5, "x", "old"), named(pool, 5, "x", "new")
    pool.take(3, "y")
    assert len(pool.find(small)) == 2, "although they are the oldest of all"
    assert len(pool.find(old)) == 2, "the end of a chain goes first"
    assert len(pool.find(new)) == 5


def test_a_weight_widens_a_share() -> None:
    pool = PagePool(12, page_size=4)
    heavy = pool.take(8, "x", weight=3)
    pool.name(heavy, [b"x%d" % index for index in range(8)], version=None, tenant="x")
    pool.give_back(heavy, "x")
    named(pool, 4, "y", "y")
    pool.take(1, "y")
    assert len(pool.find([b"x%d" % index for index in range(8)])) == 8
    assert len(pool.find([b"y%d" % index for index in range(4)])) == 3


@pytest.mark.parametrize("older", ["x", "y"])
def test_among_tenants_within_their_shares_the_oldest_page_goes(older: str) -> None:
    younger = {"x": "y", "y": "x"}[older]
    pool = PagePool(4, page_size=4)
    first, second = named(pool, 2, older, older), named(pool, 2, younger, younger)
    pool.take(1, younger)
    assert (len(pool.find(first)), len(pool.find(second))) == (1, 2)


def test_a_shared_page_is_charged_once_and_kept_until_the_last_holder_goes() -> None:
    pool = PagePool(4, page_size=4)
    keys = named(pool, 2, "x", "a")
    one, two = pool.find(keys), pool.find(keys)
    pool.share(one, "x")
    pool.share(two, "x")
    assert (pool.held_by("x"), pool.num_free, pool.num_kept) == (2, 2, 0)
    pool.give_back(one, "x")
    assert pool.num_free == 2
    pool.give_back(two, "x")
    assert (pool.num_free, pool.num_kept) == (4, 2)


def test_a_version_can_be_forgotten_for_all_or_one_tenant() -> None:
    pool = PagePool(12, page_size=4)
    bad, good = named(pool, 2, "x", "bad", version="v"), named(pool, 2, "x", "good", version="w")
    mine, theirs = named(pool, 2, "x", "mine"), named(pool, 2, "y", "theirs")
    pool.forget("v")
    pool.forget(None, "x")
    assert [len(pool.find(keys)) for keys in (bad, good, mine, theirs)] == [0, 2, 0, 2]
    assert pool.num_free == 12


def test_pages_for_rounds_up() -> None:
    pool = PagePool(4, page_size=16)
    assert [pool.pages_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_taking_more_than_there_is_or_giving_back_twice_is_a_fault_of_the_caller() -> None:
    pool = PagePool(2, page_size=16)
    with pytest.raises(AssertionError):
        pool.take(3, "x")
    pages = pool.take(1, "x")
    again = list(pages)
    pool.give_back(pages, "x")
    with pytest.raises(AssertionError):
        pool.give_back(again, "x")
