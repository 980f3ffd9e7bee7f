"""What was asked for just now, lately, or long ago."""

from __future__ import annotations

import pytest

from dataplane import recent
from dataplane.recent import Recent
from tests.dataplane.test_throttle import Clock


def test_a_version_was_asked_for_just_now_then_lately_then_long_ago() -> None:
    clock = Clock()
    asked = Recent(clock)
    assert not asked.was_asked_just_now("a")
    assert not asked.note("a")
    assert asked.was_asked_just_now("a")
    clock.now_s += 31
    assert not asked.was_asked_just_now("a")
    assert asked.note("a")
    clock.now_s += 601
    assert not asked.note("a")


def test_what_was_asked_for_lately_comes_the_last_first_and_nothing_older() -> None:
    clock = Clock()
    asked = Recent(clock)
    asked.note("old")
    clock.now_s += 601
    for version in ("a", "b", "a"):
        asked.note(version)
    assert list(asked.lately()) == ["a", "b"]


def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "_MAX_REMEMBERED", 2)
    asked = Recent(Clock())
    for version in "abc":
        asked.note(version)
    assert list(asked.lately()) == ["c", "b"]
