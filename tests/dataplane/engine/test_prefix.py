"""Keys of KV pages."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.engine.prefix import PageKeys

TOKENS = tuple(range(1, 20))


def keys_of(tokens: tuple[int, ...] = TOKENS, **fields: Any) -> list[bytes]:
    values: dict[str, Any] = {"salt": "s", "base_digest": "m", "version": "v", "page_size": 4}
    keys: list[bytes] = []
    PageKeys(**(values | fields)).extend(keys, tokens)
    return keys


def test_only_full_pages_have_keys_and_they_may_be_computed_in_parts() -> None:
    assert len(keys_of()) == 4
    chain = PageKeys(salt="s", base_digest="m", version="v", page_size=4)
    keys: list[bytes] = []
    for end in range(len(TOKENS) + 1):
        chain.extend(keys, TOKENS[:end])
    assert keys == keys_of()
    assert len(set(keys)) == 4


@pytest.mark.parametrize("field", ["salt", "base_digest", "version"])
def test_each_field_parts_every_page(field: str) -> None:
    assert not set(keys_of()) & set(keys_of(**{field: "other"}))


def test_a_base_page_is_not_the_page_of_a_version_called_base() -> None:
    assert not set(keys_of(version=None)) & set(keys_of(version="base"))


def test_no_value_of_one_field_stands_for_another() -> None:
    names = ("", "a", "aa", "s", "v", "\0", "a\0")
    seen = {}
    for salt, base, version in itertools.product(names[1:], names, (None, *names)):
        key = keys_of(salt=salt, base_digest=base, version=version)[0]
        assert seen.setdefault(key, (salt, base, version)) == (salt, base, version)


def test_an_early_difference_changes_every_later_key() -> None:
    other = keys_of((9, *TOKENS[1:]))
    assert not set(other) & set(keys_of())
    assert keys_of((*TOKENS[:7], 99, *TOKENS[8:]))[:1] == keys_of()[:1]
    assert keys_of((*TOKENS[:7], 99, *TOKENS[8:]))[1:] != keys_of()[1:]


def test_pages_before_the_adapter_starts_are_the_bases() -> None:
    base, late = keys_of(version=None), keys_of(active_from=10)
    assert late[:2] == base[:2]
    assert late[2] != base[2]
    assert keys_of(active_from=9)[2] != late[2], "where in the page it starts is part of the key"
    assert keys_of(active_from=100) == base


def test_a_token_that_is_no_id_has_no_key() -> None:
    with pytest.raises(ValueError, match="token ids"):
        keys_of((-1, 2, 3, 4))
    with pytest.raises(AssertionError):
        keys_of(salt="")


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_equal_keys_mean_equal_beginnings(one: list[int], two: list[int]) -> None:
    first, second = keys_of(tuple(one), page_size=3), keys_of(tuple(two), page_size=3)
    for index, (left, right) in enumerate(zip(first, second, strict=False)):
        assert (left == right) == (one[: 3 * index + 3] == two[: 3 * index + 3])
