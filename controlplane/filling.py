"""Fills replicas with adapters that lack a home, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from controlplane.placement import EPSILON, RESOURCES, Demands, Flags, Fleet, Floats, Integers, Plan, Policy, Rows, sums
from controlplane.rendezvous import favourites, scores

_FAVOURITES = 8
_REFUSALS = 100  # after so many adapters in a row found no memory, those that come after, less useful, do not look for it


class Filling:
    """Pairs of adapter and replica while they grow, and what each replica has left. Owned by one call of `planning.revise`.

    Args:
        fleet: Replicas.
        demands: Adapters.
        policy: Bounds.
        pieces: Traffic that one home of each adapter brings, [A].
        density: How useful each adapter is for the memory that it takes, [A].
        rows: Pairs that stand.
        stranded: Pairs of which the adapter looks for memory elsewhere, and stays where there is none.
    """

    def __init__(
        self,
        fleet: Fleet,
        demands: Demands,
        policy: Policy,
        *,
        pieces: Floats,
        density: Floats,
        rows: Rows,
        stranded: Rows,
    ) -> None:
        self._fleet, self._demands, self._policy = fleet, demands, policy
        self._pieces, self._density = pieces, density
        self._adapter, self._replica, self._warm = rows.adapter.tolist(), rows.replica.tolist(), rows.warm.tolist()
        num_replicas = len(fleet.ids)
        self._total = max(float(demands.rates.sum()), EPSILON)
        self._fair = fleet.shares() * self._total
        self._load = sums(rows.replica, pieces[rows.adapter], num_replicas)
        self._placed = float(self._load.sum())
        needs = demands.needs[rows.adapter] * rows.warm[:, None]
        used = [sums(rows.replica, needs[:, resource], num_replicas) for resource in range(len(RESOURCES))]
        self._free = fleet.rooms * policy.fill + EPSILON - np.stack(used, axis=1)
        self._least = np.full(num_replicas, np.inf)
        self._yields = self._free.copy()
        self._heaps: list[list[tuple[float, int]]] = [[] for _ in range(num_replicas)]
        for row in np.flatnonzero(rows.warm).tolist():
            worth = float(density[self._adapter[row]]) * policy.inertia
            self._heaps[self._replica[row]].append((worth, row))
        for index, heap in enumerate(self._heaps):
            heapify(heap)
            self._note_least(index)
        self._num_refused = 0
        self._came_from: dict[int, list[int]] = {}
        for one, index in zip(stranded.adapter.tolist(), stranded.replica.tolist(), strict=True):
            self._came_from.setdefault(one, []).append(index)
        # The same memory, read one by one: many times faster than an array's elements.
        self._load_at, self._fair_at, self._least_at = self._load.data, self._fair.data, self._least.data
        self._free_at, self._yields_at = self._free.data, self._yields.data

    def place(self, missing: Integers) -> None:
        """Finds so many homes more for each adapter, [A]: first for what goes everywhere, then the most useful first."""
        lacking = np.flatnonzero(missing > 0)
        has_choice = missing[lacking] < len(self._fair)
        lacking = lacking[np.lexsort((self._demands.hashes[lacking], -self._density[lacking], has_choice))]
        homes = dict[int, set[int]]()
        for row in np.flatnonzero(missing[np.array(self._adapter, np.int64)] > 0).tolist():
            homes.setdefault(self._adapter[row], set()).add(self._replica[row])
        fleet = self._fleet
        liked = favourites(self._demands.hashes[lacking], fleet.hashes, fleet.weights, count=_FAVOURITES).tolist()
        for one, likes in zip(lacking.tolist(), liked, strict=True):
            taken = homes.get(one, set())
            for _ in range(int(missing[one])):
                taken.add(self._place(one, likes, taken))

    def plan(self) -> Plan:
        """Returns what stands now."""
        adapter, replica = np.array(self._adapter, np.int64), np.array(self._replica, np.int64)
        order = np.lexsort((replica, adapter))
        rows = Rows(adapter[order], replica[order], np.array(self._warm, np.bool_)[order])
        return Plan(self._fleet.ids, self._demands.keys, rows, self._pieces[rows.adapter])

    def _place(self, one: int, likes: Sequence[int], taken: set[int]) -> int:
        """Gives an adapter one more home: where its traffic and its bytes have room, else its traffic, else the most of that.

        What a replica may be given rises with what all have: else the first few adapters would fill some with traffic and leave
        their memory empty.
        """
        piece, need, worth = float(self._pieces[one]), self._demands.needs[one], float(self._density[one])
        bound = self._policy.bound
        level = bound * min(1.0, self._placed / self._total)
        can = [
            index
            for index in likes
            if self._load_at[index] <= level * (fair := self._fair_at[index])
            and self._load_at[index] + piece <= bound * fair
            and index not in taken
        ]
        if self._num_refused < _REFUSALS:
            for index in can:
                if self._has_memory(index, need, worth):
                    return self._settle(one, index, warm=True)
            fits = (need <= np.where((self._least < worth)[:, None], self._yields, self._free)).all(axis=1)
            fits &= self._load + piece <= bound * self._fair
            if (best := self._liked_best(one, fits, taken)) is not None:
                return self._settle(one, best, warm=True)
            self._num_refused += 1
        if came_from := self._came_from.get(one):
            index = came_from.pop()
            if index not in taken and self._load[index] + piece <= self._policy.tolerance * self._fair[index]:
                return self._settle(one, index, warm=False)
        if can:
            return self._settle(one, can[0], warm=False)
        if (best := self._liked_best(one, self._load + piece <= bound * self._fair, taken)) is not None:
            return self._settle(one, best, warm=False)
        spare = self._fair - self._load
        spare[list(taken)] = -np.inf
        index = int(np.argmax(spare))
        return self._settle(one, index, warm=self._has_memory(index, need, worth))

    def _has_memory(self, index: int, need: Floats, worth: float) -> bool:
        room = self._yields_at if self._least_at[index] < worth else self._free_at
        return all(part <= room[index, resource] for resource, part in enumerate(need.tolist()))

    def _liked_best(self, one: int, among: Flags, taken: set[int]) -> int | None:
        """The favourite of these that is no home of it yet."""
        among[list(taken)] = False
        choices = np.flatnonzero(among)
        if not len(choices):
            return None
        fleet = self._fleet
        liked = scores(self._demands.hashes[one], fleet.hashes[choices], fleet.weights[choices])
        return int(choices[np.argmax(liked)])

    def _settle(self, one: int, index: int, *, warm: bool) -> int:
        row = len(self._adapter)
        self._adapter.append(one)
        self._replica.append(index)
        self._warm.append(warm)
        self._load[index] += self._pieces[one]
        self._placed += float(self._pieces[one])
        if warm:
            self._num_refused = 0
            heap, need = self._heaps[index], self._demands.needs[one]
            if (need > self._free[index]).any():
                _, cooled = heappop(heap)
                self._warm[cooled] = False
                self._free[index] += self._demands.needs[self._adapter[cooled]]
            self._free[index] -= need
            heappush(heap, (float(self._density[one]), row))
            self._note_least(index)
        return index

    def _note_least(self, index: int) -> None:
        """Notes what a replica's least useful warm adapter is worth, and the memory that is free without it."""
        heap = self._heaps[index]
        if heap:
            self._least[index] = heap[0][0]
            self._yields[index] = self._free[index] + self._demands.needs[self._adapter[heap[0][1]]]
