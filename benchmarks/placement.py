"""Placement at scale, simulated: how often adapters are where they are asked for, how even the load is, what a change moves.

1,000 replicas of 40 adapters, 100,000 adapters. The plan is made from what a first part of the requests showed; requests that
come later are counted. Beside it requests of the same kind at random, to the least loaded replica, by plain consistent hashing,
and by llm-d's affinity scores.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.report import Row, parser, publish
from benchmarks.routing import (
    Outcome,
    Replicas,
    Traffic,
    adapter_names,
    affinity_scores,
    as_planned,
    at_random,
    best_static,
    least_loaded,
    on_a_ring,
)
from controlplane.placement import Demand, Demands, Fleet, Plan, Replica
from controlplane.planning import revise

_SIZE_BYTES = 20e6
_SEED = 20


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is simulated.

    Attributes:
        replicas: Replicas.
        slots: Adapters that each holds.
        adapters: Adapters.
        requests: Requests that are seen before, and as many that are counted.
        others: Of both, how many the contenders play.
        looked_at: How many those of them that look at each.
        losses: Replicas that are lost and come back, one at a time.
    """

    replicas: int = 1_000
    slots: int = 40
    adapters: int = 100_000
    requests: int = 4_000_000
    others: int = 1_000_000
    looked_at: int = 400_000
    losses: int = 8


@dataclass(frozen=True, slots=True)
class Change:
    """What losing one replica did, or its return.

    Attributes:
        seconds: Time of the new plan.
        moved: Adapters that got a home which they did not have, times replicas, over adapters; 1 is what must move.
    """

    seconds: float
    moved: float


def main() -> int:
    """Runs all and returns the exit status."""
    path = parser(__doc__ or "").parse_args().json
    rows = [Row("calibration_s", calibrate(), "s"), *measure(Scale())]
    return 0 if publish(rows, path=path, title="Placement") else 1


def measure(scale: Scale, *, exponents: Sequence[float] = (1.0, 0.8, 1.2)) -> list[Row]:
    """Returns the figures; those of the exponent 1.0 have bounds."""
    rows: list[Row] = []
    for exponent in exponents:
        traffic = Traffic.zipf(exponent, adapters=scale.adapters, settling=scale.requests, counted=scale.requests, seed=_SEED)
        names = adapter_names(scale.adapters)
        replicas, demands = seen(traffic, names, scale)
        begun_s = time.perf_counter()
        plan = revise(Plan(), Fleet.of(replicas), Demands.of(demands))
        plan_s = time.perf_counter() - begun_s
        best = best_static(traffic, scale.replicas * scale.slots)
        ours = as_planned(traffic, plan, names, slots=scale.slots)
        others = contenders(traffic, names, scale)
        bounds = exponent == 1.0
        at = "" if bounds else f"_zipf{exponent:g}"
        rows += [
            Row(f"place_hit{at}", ours.hit_rate / best, target=">= 0.90" if bounds else ""),
            Row(f"place_balance{at}", ours.balance, target="<= 1.25" if bounds else ""),
        ]
        for name, outcome in others.items():
            rows += [Row(f"place_hit_{name}{at}", outcome.hit_rate / best), Row(f"place_balance_{name}{at}", outcome.balance)]
        if bounds:
            losses, returns = changes(plan, replicas, Demands.of(demands), count=scale.losses)
            rows += [
                Row("place_s", plan_s, "s", "<= 8"),
                Row("place_change_s", statistics.median(one.seconds for one in (*losses, *returns)), "s", "<= 0.5"),
                Row("place_moved", max(one.moved for one in losses), target="<= 1.5"),
                Row("place_moved_join", max(one.moved for one in returns)),
                Row("place_hit_best_static", best, "part of requests"),
            ]
    return rows


def seen(traffic: Traffic, names: Sequence[str], scale: Scale) -> tuple[list[Replica], list[Demand]]:
    """Returns replicas, and adapters with the traffic that the first part of the requests showed."""
    size_bytes = scale.slots * _SIZE_BYTES
    replicas = [Replica(id=f"replica-{index}", slots=scale.slots, size_bytes=size_bytes) for index in range(scale.replicas)]
    counts = np.bincount(traffic.settling, minlength=scale.adapters).tolist()
    demands = [
        Demand(key=name, rate=float(count), size_bytes=_SIZE_BYTES, rank_rows=16)
        for name, count in zip(names, counts, strict=True)
        if count
    ]
    return replicas, demands


def contenders(traffic: Traffic, names: Sequence[str], scale: Scale) -> dict[str, Outcome]:
    """Returns what others make of the same requests, or of a part of them."""
    room = {"num_replicas": scale.replicas, "slots": scale.slots}
    part, fewer = traffic.part(scale.others, scale.others), traffic.part(scale.looked_at, scale.looked_at)
    return {
        "random": at_random(part, **room),
        "hashing": on_a_ring(part, names, **room),
        "least_loaded": Replicas(scale.replicas, slots=scale.slots).play(fewer, least_loaded),
        "llm_d": Replicas(scale.replicas, slots=scale.slots).play(fewer, affinity_scores),
    }


def changes(plan: Plan, replicas: Sequence[Replica], demands: Demands, *, count: int) -> tuple[list[Change], list[Change]]:
    """Loses replicas and gets them back, one at a time; returns what each loss and each return did."""
    losses, returns = [], []
    whole = Fleet.of(replicas)
    for lost in np.random.default_rng(_SEED).choice(len(replicas), count, replace=False).tolist():
        rest = Fleet.of([one for index, one in enumerate(replicas) if index != lost])
        without, loss = _change(plan, rest, demands)
        _, back = _change(without, whole, demands)
        losses.append(loss)
        returns.append(back)
    return losses, returns


def _change(before: Plan, fleet: Fleet, demands: Demands) -> tuple[Plan, Change]:
    begun_s = time.perf_counter()
    after = revise(before, fleet, demands)
    seconds = time.perf_counter() - begun_s
    moved = {key for key, _ in set(after.pairs()) - set(before.pairs())}
    return after, Change(seconds, len(moved) * len(fleet.ids) / len(demands.keys))


def calibrate() -> float:
    """Returns the seconds that a fixed loop takes here, half of it Python's and half of it numpy's: on an idle core about one."""
    begun_s = time.perf_counter()
    total = 0
    for number in range(8_000_000):
        total += number & 7
    np.sort(np.random.default_rng(total).random(5_000_000))
    return time.perf_counter() - begun_s


if __name__ == "__main__":
    sys.exit(main())
