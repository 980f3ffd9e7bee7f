"""Who runs when, and what counts."""

from __future__ import annotations

import pytest

from benchmarks.rounds import Turn, middle, ratio, take_turns, tokens_per_s
from benchmarks.workload import Run, Workload

WORKLOAD = Workload(1, 4, 8, 100)


class Scripted:
    """Takes the given seconds, run after run, and keeps a diary."""

    def __init__(self, name: str, diary: list[tuple[str, int]], seconds: list[float]) -> None:
        self._name, self._diary, self._seconds = name, diary, iter(seconds)

    def run(self, workload: Workload) -> Run:
        self._diary.append((self._name, workload.output_tokens))
        return Run(next(self._seconds), [[0] * workload.output_tokens], [0.25], [0.5])


def test_contenders_warm_up_with_few_tokens_and_then_take_turns() -> None:
    diary: list[tuple[str, int]] = []
    turns = {name: Turn(Scripted(name, diary, [1.0] * 3), WORKLOAD) for name in "ab"}
    taken = take_turns(turns, rounds=2)
    assert diary == [("a", 4), ("b", 4), ("a", 8), ("b", 8), ("a", 8), ("b", 8)]
    assert {label: len(runs) for label, runs in taken.items()} == {"a": 2, "b": 2}


def test_the_first_run_does_not_count() -> None:
    taken = take_turns({"a": Turn(Scripted("a", [], [100.0, 2.0]), WORKLOAD)}, rounds=1)
    assert middle(taken, "a", tokens_per_s) == 4.0


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    """The machine is three times as slow in the last round, for both."""
    turns = {
        "fast": Turn(Scripted("fast", [], [1.0, 1.0, 1.0, 3.0]), WORKLOAD),
        "slow": Turn(Scripted("slow", [], [1.0, 2.0, 2.5, 6.0]), WORKLOAD),
    }
    assert ratio(take_turns(turns, rounds=3), "fast", "slow", tokens_per_s) == pytest.approx(2.0)


def test_what_each_took_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    take_turns({"engine base": Turn(Scripted("a", [], [1.0, 2.0]), WORKLOAD)}, rounds=1)
    line = capsys.readouterr().out
    assert "engine base" in line
    assert "4.0 tokens/s" in line
    assert "prefill     250 ms" in line
    assert "step p50  500.0" in line
