"""Looks for an order of operations that fits a sequential model: is a history linearizable?

A depth-first walk over the operations that may come next (those called before any other outstanding one returned), which
never enters the same pair of what is done and the state after it twice. Three cuts keep it small: what changes nothing is not
tried later as well; a point is left when it spent more of the calls whose outcome is not known than an equal one before it,
or when its state has grown past what is still to come.

Source: Wing, Gong: Testing and verifying concurrent objects (1993); Lowe: Testing for linearizability (2017), for the memo.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.histories.feed import moved_between
from benchmarks.histories.history import Entry
from benchmarks.histories.model import ceilings, levels, step
from benchmarks.histories.records import Lost, Operation, Refused, is_read
from benchmarks.histories.state import KeyState, State

_MAX_CONFIGURATIONS = 400_000


@dataclass(frozen=True, slots=True)
class Linearization:
    """What the search found.

    Attributes:
        order: Operations in an order that fits, as far as one does; operations without effect or known outcome are left out.
        state: State after them.
        stuck: Operations of which none could come next; empty when all fit.
        is_decided: False when the search gave up.
    """

    order: tuple[Operation, ...]
    state: State
    stuck: tuple[Operation, ...] = ()
    is_decided: bool = True

    @property
    def fits(self) -> bool:
        """Whether the whole history does."""
        return self.is_decided and not self.stuck


@dataclass(frozen=True, slots=True)
class _Node:
    """A point of the walk: which known operations are done, which unknown ones took effect, and the state after both."""

    known: int
    unknown: int
    state: State


class _Walk:
    def __init__(self, operations: Sequence[Operation], journal: Sequence[Entry]) -> None:
        self._told = {(one.moved.alias, one.moved.generation): one for one in journal}
        by_call = sorted(operations, key=lambda one: one.call)
        self.num_entered = 0
        self.known = [one for one in by_call if one.outcome is not None and not isinstance(one.outcome, Lost)]
        self.unknown = [one for one in by_call if one.outcome is None]
        self.everything = (1 << len(self.known)) - 1
        self._spent: dict[tuple[int, State], list[int]] = {}
        self._ceilings: dict[str, tuple[list[int], list[int]]] = {}
        for at, one in enumerate(self.known):
            for name, ceiling in ceilings(one).items():
                heights, bits = self._ceilings.setdefault(name, ([], []))
                place = bisect_left(heights, ceiling)
                heights.insert(place, ceiling)
                bits.insert(place, 1 << at)
        for _, bits in self._ceilings.values():
            for at in range(1, len(bits)):
                bits[at] |= bits[at - 1]

    def is_new(self, node: _Node) -> bool:
        """Whether a point is worth entering, which is noted: it can lead somewhere, and no equal one before had as much left."""
        rest = self.everything & ~node.known
        for name, level in levels(node.state).items():
            heights, bits = self._ceilings.get(name, ([], []))
            below = bisect_left(heights, level)
            if below and bits[below - 1] & rest:
                return False
        spent = self._spent.setdefault((node.known, node.state), [])
        if any(before & ~node.unknown == 0 for before in spent):
            return False
        spent.append(node.unknown)
        self.num_entered += 1
        return True

    def outstanding(self, node: _Node) -> list[tuple[int, Operation]]:
        """Known operations of which one must come next: what was called before the first of the outstanding returned."""
        first_end: int | None = None
        found: list[tuple[int, Operation]] = []
        rest = self.everything & ~node.known
        while rest:
            at = (rest & -rest).bit_length() - 1
            one = self.known[at]
            if first_end is not None and one.call > first_end:
                break
            first_end = one.end if first_end is None else min(first_end, one.end)
            found.append((at, one))
            rest &= rest - 1
        found = [(at, one) for at, one in found if first_end is None or one.call <= first_end]
        return sorted(found, key=lambda pair: pair[1].end)

    def after(self, node: _Node) -> Iterator[tuple[Operation, _Node]]:
        """Every operation that may come next, with the point after it; unknown ones last.

        One that fits here and whose outcome says that it changed nothing comes next, alone: no order needs it later.
        """
        outstanding = self.outstanding(node)
        writes: list[tuple[Operation, _Node]] = []
        for at, one in outstanding:
            outcome, state = step(node.state, one)
            if outcome == one.outcome:
                child = _Node(node.known | 1 << at, node.unknown, state)
                if is_read(one.what) or isinstance(outcome, Refused):
                    yield one, child
                    return
                writes.append((one, child))
        yield from writes
        latest = max((one.end for _, one in outstanding[:1]), default=None)
        for at, one in enumerate(self.unknown):
            if node.unknown >> at & 1 or latest is None or one.call > latest:
                continue
            _, state = step(node.state, one)
            if state != node.state and self._may_be(node.state, state):  # what changes nothing need not have happened
                yield one, _Node(node.known, node.unknown | 1 << at, state)

    def _may_be(self, before: State, after: State) -> bool:
        """Whether the log has no other move in this one's place: of several that would explain what was seen it says which."""
        if isinstance(before, KeyState) or isinstance(after, KeyState):
            return True
        for moved in moved_between(before, after):
            told = self._told.get((moved.alias, moved.generation))
            if told is not None and (told.is_service or told.moved != moved):
                return False
        return True


def linearize(
    operations: Sequence[Operation], start: State, *, journal: Sequence[Entry] = (), max_configurations: int = _MAX_CONFIGURATIONS
) -> Linearization:
    """Looks for an order of the operations of one subject that fits the model.

    Args:
        operations: All about one adapter or key.
        start: State before them.
        journal: Moves of the subject in the audit log, as far as they are known.
        max_configurations: Points after which the search gives up.

    Returns:
        The first order that fits; if none does, the longest part of one, and what could not follow it.
    """
    walk = _Walk(operations, journal)
    root = _Node(0, 0, start)
    path: list[tuple[Operation | None, _Node, Iterator[tuple[Operation, _Node]]]] = [(None, root, walk.after(root))]
    best: list[Operation] = []
    best_node = root
    while path:
        _, node, following = path[-1]
        if node.known == walk.everything:
            return Linearization(tuple(one for one, _, _ in path if one is not None), node.state)
        if node.known.bit_count() > best_node.known.bit_count():
            best, best_node = [one for one, _, _ in path if one is not None], node
        for one, child in following:
            if walk.is_new(child):
                path.append((one, child, walk.after(child)))
                break
        else:
            path.pop()
        if walk.num_entered > max_configurations:
            return Linearization(tuple(best), best_node.state, is_decided=False)
    stuck = tuple(one for _, one in walk.outstanding(best_node))
    return Linearization(tuple(best), best_node.state, stuck)
