"""From demand, replicas and the plan before to the next plan; pure functions.

Rendezvous hashing with bounded load: an adapter's home is its favourite that has room for its traffic, and memory that nothing
more useful takes. What has a place keeps it while that is within bounds; so a replica that leaves moves its own adapters, and one
that joins draws its share of those that like it better.

Source: Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded loads", 2018.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from controlplane.filling import Filling
from controlplane.placement import EPSILON, RESOURCES, Demands, Flags, Fleet, Floats, Integers, Plan, Policy, Rows, sums
from controlplane.rendezvous import scores

_MARGIN = 0.02  # part of what is warm that counts as the least useful of it


def revise(before: Plan, fleet: Fleet, demands: Demands, *, policy: Policy | None = None) -> Plan:
    """Returns the plan for demand and replicas as they are now, moving as little as it can of the plan before.

    From an empty plan it is a plan from nothing. Equal arguments give equal plans. Without replicas nothing has a home.

    A replica is given more than `bound` times its fair share only where none has room under it, and then the one that has most.
    What should be warm on a replica never takes more than `fill` of its memory.
    """
    if not fleet.ids or not demands.keys:
        return Plan(fleet.ids, demands.keys)
    return _Revision(before, fleet, demands, policy or Policy()).run()


class _Revision:
    """One run of `revise`: each step takes rows and returns those that stand."""

    def __init__(self, before: Plan, fleet: Fleet, demands: Demands, policy: Policy) -> None:
        self._before, self._fleet, self._demands, self._policy = before, fleet, demands, policy
        self._fair = fleet.shares() * demands.rates.sum()
        largest = fleet.rooms.max(axis=0)
        parts = demands.needs / np.where(largest > 0, largest, 1.0)
        self._density = demands.rates / np.maximum(parts.max(axis=1), EPSILON)

    def run(self) -> Plan:
        rows = self._surviving()
        counts = self._counts(np.bincount(rows.adapter, minlength=len(self._demands.keys)))
        self._pieces = self._demands.rates / counts
        rows = self._warmed(self._relieved(self._drawn(self._without_surplus(rows, counts))))
        stranded = self._stranded(rows)
        filling = Filling(
            self._fleet,
            self._demands,
            self._policy,
            pieces=self._pieces,
            density=self._density,
            rows=rows[~stranded],
            stranded=rows[stranded],
        )
        rows = rows[~stranded]
        filling.place(counts - np.bincount(rows.adapter, minlength=len(counts)))
        return filling.plan()

    def _surviving(self) -> Rows:
        """Rows of the plan before whose adapter and replica are still there."""
        before = self._before
        adapter = _translate(before.keys, self._demands.keys)[before.rows.adapter]
        replica = _translate(before.replicas, self._fleet.ids)[before.rows.replica]
        return Rows(adapter, replica, before.rows.warm)[(adapter >= 0) & (replica >= 0)]

    def _counts(self, now: Integers) -> Integers:
        """How many homes each adapter should have, [A]: as many as it has while that is about right."""
        wanted = self._demands.rates / (self._policy.grain * max(float(self._fair.mean()), EPSILON))
        slack = self._policy.inertia
        right = (now > 0) & (now >= np.ceil(wanted / slack)) & (now <= np.ceil(wanted * slack))
        fresh = np.clip(np.ceil(wanted), 1, len(self._fleet.ids))
        return np.where(right, now, fresh).astype(np.int64)

    def _without_surplus(self, rows: Rows, counts: Integers) -> Rows:
        """Without the homes that an adapter likes least, where it has too many. Orders rows by adapter and liking."""
        rows = rows[np.lexsort((-self._scores(rows.adapter, rows.replica), rows.adapter))]
        place = np.arange(len(rows)) - np.searchsorted(rows.adapter, rows.adapter)
        return rows[place < counts[rows.adapter]]

    def _drawn(self, rows: Rows) -> Rows:
        """Draws to each new replica, up to its share, what likes it better than the least liked home that it has."""
        known = set(self._before.replicas)
        joined = [index for index, one in enumerate(self._fleet.ids) if one not in known]
        if not joined or not len(rows):
            return rows
        replica, warm = rows.replica.copy(), rows.warm.copy()
        last = np.flatnonzero(np.diff(rows.adapter, append=-1))  # each adapter's least liked home
        adapter = rows.adapter[last]
        floor = self._scores(adapter, rows.replica[last])
        most = int(np.ceil(len(rows) / len(self._fleet.ids)))
        for index in joined:
            liking = self._scores(adapter, np.full(len(last), index, np.int64))
            movers = np.flatnonzero(liking > floor)
            movers = movers[np.argsort(-liking[movers], kind="stable")][:most]
            movers = movers[np.cumsum(self._pieces[adapter[movers]]) <= self._fair[index]]
            replica[last[movers]], warm[last[movers]] = index, False
            floor[movers] = np.inf  # an adapter moves once
        return Rows(rows.adapter, replica, warm)

    def _relieved(self, rows: Rows) -> Rows:
        """Takes from replicas that have too much traffic what is least useful there, until they have what they may be given."""
        over = sums(rows.replica, self._pieces[rows.adapter], len(self._fair)) > self._policy.tolerance * self._fair + EPSILON
        if not over.any():
            return rows
        rows = rows[np.lexsort((-self._density[rows.adapter], rows.replica))]
        given = _running_sums(self._pieces[rows.adapter], rows.replica)
        return rows[~over[rows.replica] | (given <= self._policy.bound * self._fair[rows.replica])]

    def _warmed(self, rows: Rows) -> Rows:
        """What of each replica's adapters fits into its memory is warm, the most useful first; what is warm has an advantage."""
        worth = self._density[rows.adapter] * np.where(rows.warm, self._policy.inertia, 1.0)
        rows = rows[np.lexsort((-worth, rows.replica))]
        fits = np.ones(len(rows), np.bool_)
        for resource in range(len(RESOURCES)):
            taken = _running_sums(self._demands.needs[rows.adapter, resource], rows.replica)
            fits &= taken <= self._policy.fill * self._fleet.rooms[rows.replica, resource] + EPSILON
        return Rows(rows.adapter, rows.replica, fits)

    def _stranded(self, rows: Rows) -> Flags:
        """Which rows are cold although something much less useful is warm elsewhere: these look for another home."""
        if not rows.warm.any():
            return ~rows.warm
        least = float(np.quantile(self._density[rows.adapter[rows.warm]], _MARGIN))
        stranded: Flags = ~rows.warm & (self._density[rows.adapter] > self._policy.inertia**2 * max(least, EPSILON))
        return stranded

    def _scores(self, adapter: Integers, replica: Integers) -> NDArray[np.float32]:
        fleet = self._fleet
        return scores(self._demands.hashes[adapter], fleet.hashes[replica], fleet.weights[replica])


def _translate(before: tuple[str, ...], now: tuple[str, ...]) -> Integers:
    """Returns where each name of before is now, -1 for nowhere."""
    if before == now:
        return np.arange(len(now), dtype=np.int64)
    places = {name: index for index, name in enumerate(now)}
    return np.array([places.get(name, -1) for name in before], np.int64)


def _running_sums(values: Floats, groups: Integers) -> Floats:
    """Returns sums from the beginning of each group on; rows of a group stand together, groups ascending."""
    if not len(values):
        return values
    total = np.cumsum(values)
    first = np.searchsorted(groups, groups)
    result: Floats = total - (total - values)[first]
    return result
