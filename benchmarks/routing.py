"""Requests of many adapters over many replicas: who routes them where, and how often the adapter is there already.

A replica holds so many adapters and lets go the one used longest ago. Of a planned replica the planned adapters stay, and what
comes unasked has the places that the plan leaves.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controlplane.placement import Plan
from controlplane.rendezvous import favourites, hashes

Integers = NDArray[np.int64]
IN_FLIGHT = 8
"""Requests that a replica works on at a time, on average."""
VIRTUAL_NODES = 100


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a routed stream.

    Attributes:
        hit_rate: Part of the requests whose adapter was on the device where they came.
        balance: Requests of the replica that got most, over the mean.
    """

    hit_rate: float
    balance: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests by adapter, most popular adapter first.

    Attributes:
        popularity: Chance of each adapter, [A].
        settling: Adapters of the requests before anything is counted.
        counted: Adapters of those that count.
    """

    popularity: NDArray[np.float64]
    settling: Integers
    counted: Integers

    @classmethod
    def zipf(cls, exponent: float, *, adapters: int, settling: int, counted: int, seed: int) -> Traffic:
        """Draws requests of adapters whose popularity falls with their rank to this power."""
        popularity = (1.0 / np.arange(1, adapters + 1) ** exponent).astype(np.float64)
        popularity /= popularity.sum()
        edges = np.cumsum(popularity)
        random = np.random.default_rng(seed)
        drawn = np.searchsorted(edges, random.random(settling + counted) * edges[-1])
        return cls(popularity, drawn[:settling], drawn[settling:])

    def part(self, settling: int, counted: int) -> Traffic:
        """Returns fewer of these requests."""
        return Traffic(self.popularity, self.settling[-settling:], self.counted[:counted])


def routed(
    traffic: Traffic, replicas: Integers, *, num_replicas: int, slots: int, planned: Sequence[frozenset[int]] | None = None
) -> Outcome:
    """Plays requests whose replica does not depend on what went before.

    Args:
        traffic: The requests.
        replicas: Replica of each, [settling + counted].
        num_replicas: Replicas in all.
        slots: Adapters that each holds.
        planned: Those that stay on each.
    """
    adapters = np.concatenate([traffic.settling, traffic.counted])
    first = len(traffic.settling)
    order = np.argsort(replicas, kind="stable")
    ends = np.searchsorted(replicas[order], np.arange(num_replicas + 1)).tolist()
    hits = 0
    for index in range(num_replicas):
        turns = order[ends[index] : ends[index + 1]]
        stay = planned[index] if planned is not None else frozenset[int]()
        cache = _Cache(slots - len(stay))
        for adapter, counts in zip(adapters[turns].tolist(), (turns >= first).tolist(), strict=True):
            hits += (adapter in stay or cache.use(adapter) is None) and counts
    counted = np.bincount(replicas[first:], minlength=num_replicas)
    return Outcome(hits / len(traffic.counted), float(counted.max() / counted.mean()))


def at_random(traffic: Traffic, *, num_replicas: int, slots: int) -> Outcome:
    """Any replica."""
    replicas = np.random.default_rng(1).integers(0, num_replicas, len(traffic.settling) + len(traffic.counted))
    return routed(traffic, replicas, num_replicas=num_replicas, slots=slots)


def on_a_ring(traffic: Traffic, names: Sequence[str], *, num_replicas: int, slots: int) -> Outcome:
    """Plain consistent hashing: each adapter belongs to the next of the replicas' many points on a ring."""
    points = hashes(f"{index}#{copy}" for index in range(num_replicas) for copy in range(VIRTUAL_NODES))
    order = np.argsort(points)
    owners = order // VIRTUAL_NODES
    home = owners[np.searchsorted(points[order], hashes(names)) % len(points)]
    replicas = home[np.concatenate([traffic.settling, traffic.counted])]
    return routed(traffic, replicas, num_replicas=num_replicas, slots=slots)


def as_planned(traffic: Traffic, plan: Plan, names: Sequence[str], *, slots: int) -> Outcome:
    """One of the adapter's homes at random, or of an adapter that the plan does not know its favourite replica."""
    num_replicas = len(plan.replicas)
    number = {name: index for index, name in enumerate(names)}
    known = np.array([number[key] for key in plan.keys], np.int64)
    home = favourites(hashes(names), hashes(plan.replicas), np.ones(num_replicas, np.float32), count=1)[:, 0].astype(np.int64)
    starts, counts = np.zeros(len(names), np.int64), np.zeros(len(names), np.int64)
    starts[known] = np.searchsorted(plan.rows.adapter, np.arange(len(known)))
    counts[known] = np.bincount(plan.rows.adapter, minlength=len(known))
    adapters = np.concatenate([traffic.settling, traffic.counted])
    draw = (np.random.default_rng(2).random(len(adapters)) * counts[adapters]).astype(np.int64)
    rows = np.minimum(starts[adapters] + draw, len(plan.rows) - 1)
    replicas = np.where(counts[adapters] > 0, plan.rows.replica[rows], home[adapters])
    place: Mapping[str, int] = {name: index for index, name in enumerate(plan.replicas)}
    planned: list[frozenset[int]] = [frozenset()] * num_replicas
    for replica, keys in plan.warm().items():
        planned[place[replica]] = frozenset(number[key] for key in keys)
    return routed(traffic, replicas, num_replicas=num_replicas, slots=slots, planned=planned)


Choose = Callable[["Replicas", int], int]


class Replicas:
    """Replicas as a router sees them that looks at each request: what they hold, and how many requests they work on.

    Attributes:
        load: Requests in flight, [N].
        holders: Replicas that hold each adapter.
        num_full: Replicas without a free slot.
    """

    def __init__(self, num_replicas: int, *, slots: int) -> None:
        self.load = np.zeros(num_replicas, np.int64)
        self.holders: dict[int, set[int]] = {}
        self.caches = [_Cache(slots) for _ in range(num_replicas)]
        self.slots = slots
        self._random = np.random.default_rng(3)
        self._flying: deque[int] = deque()

    def play(self, traffic: Traffic, choose: Choose) -> Outcome:
        """Routes all requests, each ends after as many others as are in flight."""
        hits, got = 0, np.zeros(len(self.load), np.int64)
        most = IN_FLIGHT * len(self.load)
        for adapters, counts in ((traffic.settling, False), (traffic.counted, True)):
            for adapter in adapters.tolist():
                index = choose(self, adapter)
                lost = self.caches[index].use(adapter)
                if lost is None:
                    hits += counts
                else:
                    self.holders.setdefault(adapter, set()).add(index)
                    if lost >= 0:
                        self.holders[lost].discard(index)
                got[index] += counts
                self.load[index] += 1
                self._flying.append(index)
                if len(self._flying) > most:
                    self.load[self._flying.popleft()] -= 1
        return Outcome(hits / len(traffic.counted), float(got.max() / got.mean()))

    def least_loaded(self) -> int:
        """One of those with the fewest requests in flight."""
        start = int(self._random.integers(len(self.load)))
        return (int(np.argmin(np.roll(self.load, -start))) + start) % len(self.load)


def least_loaded(replicas: Replicas, _: int) -> int:
    """The replica that works on the fewest requests."""
    return replicas.least_loaded()


def affinity_scores(replicas: Replicas, adapter: int) -> int:
    """llm-d's `lora-affinity-scorer`, 1 where the adapter is, 0.8 where a slot is free, else 0; beside its queue scorer, 3 to 1.

    It is told what replicas hold, which in llm-d is what they work on.
    """
    idle = replicas.least_loaded()
    held = replicas.holders.get(adapter)
    span = max(1, int(replicas.load.max()) - int(replicas.load[idle]))

    def score(index: int, affinity: float) -> float:
        return 3 * affinity - float(replicas.load[index] - replicas.load[idle]) / span

    free = len(replicas.caches[idle]) < replicas.slots
    best, best_score = idle, score(idle, 0.8 if free else 0.0)
    for index in held or ():
        if (value := score(index, 1.0)) > best_score:
            best, best_score = index, value
    return best


class _Cache(OrderedDict[int, None]):
    """Adapters on one replica; the one used longest ago makes room."""

    def __init__(self, slots: int) -> None:
        super().__init__()
        self._slots = slots

    def use(self, adapter: int) -> int | None:
        """Returns None where it is there; else brings it, and returns what was let go, -1 for nothing."""
        if adapter in self:
            self.move_to_end(adapter)
            return None
        self[adapter] = None
        return self.popitem(last=False)[0] if len(self) > self._slots else -1


def best_static(traffic: Traffic, places: int) -> float:
    """Returns the hit rate of the best assignment that stands still: the most popular adapters, one in each place.

    An upper bound: it asks nothing of the balance, for which popular adapters need more than one place.
    """
    return float(np.sort(traffic.popularity)[::-1][:places].sum())


def adapter_names(count: int) -> list[str]:
    """Returns keys of adapters, a few of each tenant."""
    return [f"tenant-{index % (count // 10)}/adapter-{index}" for index in range(count)]
