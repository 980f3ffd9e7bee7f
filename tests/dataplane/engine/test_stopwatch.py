"""Sums of seconds."""

from __future__ import annotations

import pytest

from dataplane.engine.stopwatch import Stopwatch


def test_each_lap_counts_for_its_part_and_time_before_a_start_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([0.0, 1.0, 1.5, 3.5, 10.0, 10.25])
    monkeypatch.setattr("time.perf_counter", lambda: next(readings))
    watch = Stopwatch()
    watch.start()
    watch.lap("fill")
    watch.lap("forward")
    watch.start()
    watch.lap("fill")
    assert watch.seconds == {"fill": 0.75, "forward": 2.0}
