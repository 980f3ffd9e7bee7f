"""What a placement is made of: replicas, adapters that are asked for, and the plan that brings them together.

Every adapter has *homes*, replicas that its requests go to: one, or more where its traffic needs more. A home is *warm* where the
adapter's bytes should be on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from controlplane.rendezvous import Hashes, hashes

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

RESOURCES: Final = ("slots", "bytes", "rank rows")
"""Columns of a replica's room and an adapter's need."""

EPSILON: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A data plane as the plan sees it.

    Attributes:
        id: Its identifier.
        slots: Adapters that its device holds at most.
        size_bytes: Memory for them.
        rank_rows: Rank rows that it may hold; infinite where nothing bounds them.
        weight: Its share of traffic relative to others.
    """

    id: str
    slots: float
    size_bytes: float
    rank_rows: float = float("inf")
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """An adapter that is asked for.

    Attributes:
        key: `owner/adapter`.
        rate: Its traffic, in any unit that is the same for all.
        size_bytes: Memory that it takes where it is warm.
        rank_rows: Rank rows of it.
        slots: Places that it takes, one for each of its versions in use.
    """

    key: str
    rate: float
    size_bytes: float = 0.0
    rank_rows: float = 0.0
    slots: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a plan is made.

    Attributes:
        bound: Traffic that a replica is given at most, over its fair share.
        tolerance: Traffic that it may come to have, over its fair share, before something moves.
        grain: Part of a replica's fair share that one home brings at most; above it an adapter gets more homes.
        fill: Part of a replica's memory that the plan takes; the rest is for what comes unasked.
        inertia: How much more useful something must be to take the place of what is there.
    """

    bound: float = 1.1
    tolerance: float = 1.2
    grain: float = 0.2
    fill: float = 0.95
    inertia: float = 1.25


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas in columns, by identifier. N replicas.

    Attributes:
        ids: Their identifiers, ascending.
        hashes: Hashes of these.
        rooms: What each has, [N, resources].
        weights: Shares of traffic relative to others, [N].
    """

    ids: tuple[str, ...]
    hashes: Hashes
    rooms: Floats
    weights: NDArray[np.float32]

    @classmethod
    def of(cls, replicas: Sequence[Replica]) -> Fleet:
        """Returns the columns; of two with one identifier the last counts."""
        known = sorted({one.id: one for one in replicas}.values(), key=lambda one: one.id)
        rooms = [(one.slots, one.size_bytes, one.rank_rows) for one in known]
        return cls(
            tuple(one.id for one in known),
            hashes(one.id for one in known),
            np.array(rooms, np.float64).reshape(-1, len(RESOURCES)),
            np.array([one.weight for one in known], np.float32),
        )

    def shares(self) -> Floats:
        """Returns each one's part of all traffic, [N]."""
        weights: Floats = self.weights.astype(np.float64)
        weights /= weights.sum()
        return weights


@dataclass(frozen=True, slots=True)
class Demands:
    """Adapters in columns, by key. A adapters.

    Attributes:
        keys: Their keys, ascending.
        hashes: Hashes of these.
        needs: What each takes where it is warm, [A, resources].
        rates: Their traffic, [A].
    """

    keys: tuple[str, ...]
    hashes: Hashes
    needs: Floats
    rates: Floats

    @classmethod
    def of(cls, demands: Sequence[Demand]) -> Demands:
        """Returns the columns; of two with one key the last counts."""
        known = sorted({one.key: one for one in demands}.values(), key=lambda one: one.key)
        needs = [(one.slots, one.size_bytes, one.rank_rows) for one in known]
        return cls(
            tuple(one.key for one in known),
            hashes(one.key for one in known),
            np.array(needs, np.float64).reshape(-1, len(RESOURCES)),
            np.array([one.rate for one in known], np.float64),
        )


@dataclass(frozen=True, slots=True)
class Rows:
    """Pairs of adapter and replica in columns.

    Attributes:
        adapter: Which adapter.
        replica: A home of it.
        warm: Whether the adapter should be on that one's device.
    """

    adapter: Integers = field(default_factory=lambda: np.empty(0, np.int64))
    replica: Integers = field(default_factory=lambda: np.empty(0, np.int64))
    warm: Flags = field(default_factory=lambda: np.empty(0, np.bool_))

    def __len__(self) -> int:
        return len(self.adapter)

    def __getitem__(self, chosen: Integers | Flags) -> Rows:
        return Rows(self.adapter[chosen], self.replica[chosen], self.warm[chosen])


@dataclass(frozen=True, slots=True)
class Plan:
    """Homes of adapters.

    Attributes:
        replicas: Identifiers that the rows' replicas index.
        keys: Keys that the rows' adapters index.
        rows: Pairs, by adapter and then replica.
        load: Traffic that each pair brings to its replica.
    """

    replicas: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    rows: Rows = field(default_factory=Rows)
    load: Floats = field(default_factory=lambda: np.empty(0, np.float64))

    @classmethod
    def of_pairs(cls, pairs: Sequence[tuple[str, str]]) -> Plan:
        """Returns a plan of which only each adapter's homes are known; it serves as the one before."""
        keys, replicas = sorted({key for key, _ in pairs}), sorted({replica for _, replica in pairs})
        places, indexes = {key: at for at, key in enumerate(keys)}, {replica: at for at, replica in enumerate(replicas)}
        known = sorted({(places[key], indexes[replica]) for key, replica in pairs})
        columns = np.array(known, np.int64).reshape(-1, 2)
        rows = Rows(columns[:, 0].copy(), columns[:, 1].copy(), np.ones(len(known), np.bool_))
        return cls(tuple(replicas), tuple(keys), rows, np.zeros(len(known)))

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yields each adapter's key with each of its homes."""
        for adapter, replica in zip(self.rows.adapter.tolist(), self.rows.replica.tolist(), strict=True):
            yield self.keys[adapter], self.replicas[replica]

    def homes(self) -> dict[str, tuple[str, ...]]:
        """Returns each adapter's homes."""
        found = dict[str, tuple[str, ...]]()
        for key, replica in self.pairs():
            found[key] = (*found.get(key, ()), replica)
        return found

    def warm(self) -> dict[str, tuple[str, ...]]:
        """Returns what should be on each replica's device, what brings most traffic first: the order in which to stage it."""
        found: dict[str, list[str]] = {one: [] for one in self.replicas}
        chosen = np.flatnonzero(self.rows.warm)
        for row in chosen[np.argsort(-self.load[chosen], kind="stable")].tolist():
            found[self.replicas[self.rows.replica[row]]].append(self.keys[self.rows.adapter[row]])
        return {one: tuple(keys) for one, keys in found.items()}

    def loads(self) -> Floats:
        """Returns the traffic that each replica is given, [N]."""
        return sums(self.rows.replica, self.load, len(self.replicas))


def sums(groups: Integers, values: Floats, num_groups: int) -> Floats:
    """Returns each group's sum; unlike `bincount` as numbers with a fraction even of no rows."""
    return np.bincount(groups, values, num_groups).astype(np.float64)
