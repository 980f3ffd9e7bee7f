"""What the demonstration calls back at the start."""

from __future__ import annotations

from dataclasses import replace

import pytest

from demo.conservation import Holdings

START = Holdings(requests=0, kv_pages=0, leases=0, arena_bytes=6 << 20, tasks=27)


def test_the_same_holdings_leak_nothing() -> None:
    assert START.leaks_since(START) == []


@pytest.mark.parametrize("field", ["requests", "kv_pages", "leases", "arena_bytes", "tasks"])
def test_one_more_of_anything_is_a_leak(field: str) -> None:
    more = replace(START, **{field: getattr(START, field) + 1})
    assert len(more.leaks_since(START)) == 1


def test_arena_bytes_that_went_missing_are_named_too() -> None:
    assert replace(START, arena_bytes=4 << 20).leaks_since(START) == ["arena bytes: 4194304 now, 6291456 at the start"]


def test_a_task_that_ended_is_no_leak() -> None:
    assert replace(START, tasks=26).leaks_since(START) == []
