"""Hit rates of eviction policies: traces replayed, request by request, on the very residency that an engine has."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks import traces
from benchmarks.random_adapters import block_bytes, kind_of
from benchmarks.report import Row
from benchmarks.traces import Trace
from dataplane.lora.eviction import Policy, Recency, Usage
from dataplane.lora.holdings import Lease
from dataplane.lora.residency import Residency
from veneer.artifact import BaseDescription

QUEUE = 128
"""Requests that wait, and so are known, behind the one that is served."""
_WARM_UP = 0.2
_NEVER = 1 << 40


class Clairvoyant:
    """Belady's optimum: what is asked for last goes first. Knows the whole trace."""

    def __init__(self, trace: Sequence[str]) -> None:
        self.era = 0
        self._turns: dict[str, list[int]] = {}
        for turn in range(len(trace) - 1, -1, -1):
            self._turns.setdefault(trace[turn], []).append(turn)

    def note(self, version: str, *, uses: int = 1) -> None:
        """See `Policy.note`."""
        if uses:
            self._turns[version].pop()

    def worth(self, version: str, *, size: int, cost: int) -> int:  # noqa: ARG002 - all sizes are equal
        """See `Policy.worth`."""
        turns = self._turns[version]
        return _NEVER - (turns[-1] if turns else _NEVER)


class Census:
    """What no policy without a look at the queue can beat where requests are independent: keeps what the trace names most."""

    def __init__(self, trace: Sequence[str]) -> None:
        self.era = 0
        self._counts = Counter(trace)

    def note(self, version: str, *, uses: int = 1) -> None:
        """See `Policy.note`."""

    def worth(self, version: str, *, size: int, cost: int) -> int:  # noqa: ARG002 - all sizes are equal
        """See `Policy.worth`."""
        return self._counts[version]


@dataclass(frozen=True, slots=True)
class Rates:
    """Hit rates on one trace, by policy; `ours` is `Usage` with a look at the queue, `blind` is it without."""

    ours: float
    blind: float
    lru: float
    lfu: float
    census: float
    belady: float


def hit_rate(trace: Sequence[str], *, room: int, policy: Policy | None, queue: int = 0) -> float:
    """Replays a trace on a residency with so many slots, each request to its end before the next.

    Nothing is loaded before its turn, so that a hit is owed to what was kept.

    Args:
        trace: Versions, in the order of requests.
        room: Slots; every version takes one.
        policy: Says what goes first; None is the residency's own.
        queue: Requests that are known to wait behind the one that is served.
    """
    residency = Residency(room, num_units=room, unit_bytes=1, max_passed_over=_NEVER, quantum_tokens=0, policy=policy)
    for version in dict.fromkeys(trace):
        residency.stage(version, rank=16, blocks=(1,))
    waiting: Counter[str] = Counter()
    hits = 0
    first = int(_WARM_UP * len(trace))
    for turn, version in enumerate(trace):
        for known in trace[turn : turn + queue + 1] if turn == 0 else trace[turn + queue : turn + queue + 1]:
            waiting[known] += 1
            residency.want(known)
        lease = residency.acquire(version)
        hits += turn >= first and lease is not None
        if lease is None:
            residency.reserve(version)
            plan = residency.next_load()
            assert plan is not None, "nothing is leased, so there is room"
            assert plan.version == version, "what is reserved is loaded first"
            residency.commit(plan)
            lease = residency.acquire(version)
            assert lease is not None, "it was loaded"
        waiting[version] -= 1
        if not waiting[version]:
            residency.withdraw(version)
        residency.release(lease)
    return hits / (len(trace) - first)


def rates(trace: Trace, *, room: int) -> Rates:
    """Replays one trace under every policy."""
    names = [f"{number:064x}" for number in trace.tolist()]

    def rate(policy: Policy | None, queue: int = 0) -> float:
        return hit_rate(names, room=room, policy=policy, queue=queue)

    return Rates(
        ours=rate(None, QUEUE),
        blind=rate(None),
        lru=rate(Recency()),
        lfu=rate(Usage(half_life=_NEVER)),
        census=rate(Census(names)),
        belady=rate(Clairvoyant(names)),
    )


def kinds(catalogue: int, count: int, *, room: int) -> Mapping[str, Callable[[], Trace]]:
    """Returns the traces, by name."""

    def zipf(exponent: float) -> Trace:
        return traces.zipf(catalogue, count, exponent=exponent)

    return {
        "zipf-0.8": lambda: zipf(0.8),
        "zipf-1.0": lambda: zipf(1.0),
        "zipf-1.2": lambda: zipf(1.2),
        "uniform": lambda: traces.uniform(catalogue, count),
        "moving": lambda: traces.moving(catalogue, count, every=50 * room, by=max(1, room // 8)),
        "zipf-1.0+scan": lambda: traces.with_scan(zipf(1.0), catalogue, every=3),
    }


def measure_replay(*, catalogue: int, room: int, count: int) -> list[Row]:
    """Compares policies on every trace and prints the table; rows of it have a slash in their id."""
    found: dict[str, Rates] = {}
    print(f"hit rates, {catalogue} adapters, room for {room}, {count} requests, {QUEUE} known to wait in `ours`")
    columns = Rates.__slots__
    print(f"{'':16}" + "".join(f"{column:>9}" for column in columns))
    for name, trace in kinds(catalogue, count, room=room).items():
        found[name] = rates(trace(), room=room)
        print(f"{name:16}" + "".join(f"{getattr(found[name], column):9.3f}" for column in columns), flush=True)
    plain, scanned = found["zipf-1.0"], found["zipf-1.0+scan"]
    return [
        Row("hit_vs_lru", min(plain.ours / plain.lru, scanned.ours / scanned.lru), target=">= 1.3"),
        Row("hit_vs_belady", min(plain.ours / plain.belady, scanned.ours / scanned.belady), target=">= 0.85"),
        Row("hit_vs_lru_blind", min(plain.blind / plain.lru, scanned.blind / scanned.lru)),
        Row("hit_vs_belady_blind", min(plain.blind / plain.belady, scanned.blind / scanned.belady)),
        *(
            Row(f"hit_rate/{name}/{column}", float(np.round(getattr(rate, column), 4)))
            for name, rate in found.items()
            for column in columns
        ),
    ]


def measure_waste(base: BaseDescription, *, catalogue: int, room: int, count: int, unit_bytes: int) -> list[Row]:
    """Replays a trace by Zipf's law over adapters of all sizes, in an arena for so many of the mean size.

    As many requests as half the room hold leases at a time.
    """
    blocks = [block_bytes(base, kind_of(number)) for number in range(catalogue)]
    arena = room * sum(map(sum, blocks)) // catalogue
    residency = Residency(8 * room, num_units=arena // unit_bytes, unit_bytes=unit_bytes, quantum_tokens=0)
    leases: deque[Lease] = deque()
    extents: list[int] = []
    for number in traces.zipf(catalogue, count, exponent=1.0).tolist():
        version = str(number)
        residency.stage(version, rank=16, blocks=blocks[number])
        while (lease := residency.acquire(version)) is None:
            plan = residency.next_load()
            if plan is None:
                residency.release(leases.popleft())
            else:
                residency.commit(plan)
                extents.append(len(plan.extents))
        residency.withdraw(version)
        leases.append(lease)
        if len(leases) > room // 2:
            residency.release(leases.popleft())
    held = [holding.size_bytes for holding in residency.holdings() if holding.place == "device"]
    free = arena // unit_bytes - residency.units_used
    print(
        f"arena of {arena / 1e6:.0f} MB in units of {unit_bytes >> 10} KiB: {len(held)} adapters, {sum(held) / 1e6:.1f} MB; "
        f"free {free * unit_bytes / 1e6:.1f} MB, the largest extent {residency.largest_hole * unit_bytes / 1e6:.1f} MB; "
        f"a load takes {sum(extents) / len(extents):.2f} extents",
        flush=True,
    )
    return [
        Row("arena_waste", residency.units_used * unit_bytes / sum(held), target="<= 1.15"),
        Row("arena_largest_free", residency.largest_hole / max(1, free)),
        Row("arena_used", sum(held) / arena),
    ]
