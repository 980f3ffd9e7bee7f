"""Contenders take turns, the order is repeated, and the middle counts, so that a machine that slows down slows down all."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from benchmarks.workload import Run, Workload, percentile

_WARM_UP_TOKENS = 4


class Runs(Protocol):
    """What runs workloads: a `contenders.process.Process`."""

    def run(self, workload: Workload) -> Run:
        """Generates all tokens once."""


class Turn(NamedTuple):
    """One entry of a round."""

    contender: Runs
    workload: Workload


Taken = Mapping[str, list[Run]]
"""The runs of each entry, one a round."""


def take_turns(turns: Mapping[str, Turn], *, rounds: int) -> Taken:
    """Runs every entry once for warming up, with few tokens, and then in turns; prints what each took."""
    for turn in turns.values():
        few = min(_WARM_UP_TOKENS, turn.workload.output_tokens)
        turn.contender.run(dataclasses.replace(turn.workload, output_tokens=few))
    taken: dict[str, list[Run]] = {label: [] for label in turns}
    for _ in range(rounds):
        for label, turn in turns.items():
            taken[label].append(turn.contender.run(turn.workload))
    for label, runs in taken.items():
        print(_line(label, runs), flush=True)
    return taken


def ratio(taken: Taken, one: str, other: str, measure: Callable[[Run], float]) -> float:
    """Returns the median, over rounds, of one entry's figure over another's in the same round."""
    return statistics.median(measure(left) / measure(right) for left, right in zip(taken[one], taken[other], strict=True))


def middle(taken: Taken, label: str, measure: Callable[[Run], float]) -> float:
    """Returns the median, over rounds, of an entry's figure."""
    return statistics.median(map(measure, taken[label]))


def tokens_per_s(run: Run) -> float:
    """A measure: generated tokens a second."""
    return run.tokens_per_s


def prefill_s(run: Run) -> float:
    """A measure: seconds until every stream has its first token."""
    return run.prefill_s


def step_s(run: Run) -> float:
    """A measure: median seconds of a decode step."""
    return run.step_s


def _line(label: str, runs: list[Run]) -> str:
    taken = {label: runs}
    line = f"{label:28} {middle(taken, label, tokens_per_s):8.1f} tokens/s"
    if runs[0].firsts_s:
        line += f"   prefill {middle(taken, label, prefill_s) * 1e3:7.0f} ms"
    if runs[0].gaps_s:
        p99 = middle(taken, label, lambda run: percentile(run.gaps_s, 99))
        line += f"   step p50 {middle(taken, label, step_s) * 1e3:6.1f} p99 {p99 * 1e3:6.1f} ms"
    return f"{line}   (median of {len(runs)})"
