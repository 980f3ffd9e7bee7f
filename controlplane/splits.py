"""Which part of the units each arm of a traffic split serves: the assignment that moves the fewest. Pure functions.

A unit's point is one of `NUM_POINTS`, drawn by the data plane from the split's secret. An assignment divides the points among the
versions of the split, as spans of points.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

NUM_POINTS: Final = 1 << 24
_MAX_SPANS: Final = 128
"""Of one split: they go out with every answer of Resolve. An assignment that would need more is drawn afresh."""

Points = tuple[int, ...]
"""Spans of an arm in ascending order: start, end, start, end and so on; an end is not part of its span."""
Assignment = Mapping[str, Points]
"""The points of each version."""


class _Span(NamedTuple):
    start: int
    end: int
    version: str

    @property
    def size(self) -> int:
        return self.end - self.start


def assign(weights: Mapping[str, int], earlier: Iterable[tuple[Mapping[str, int], Assignment]]) -> Assignment:
    """Divides the points among the versions of a split by their weights.

    The order in which the versions are written has no part in it. The first of these that there is:

    1. The assignment that the versions had before with weights of these proportions, the latest such one.
    2. The latest earlier one, in which only the points change hands that must: an arm that loses weight gives up points, an arm
       that gains weight gets them, and no arm does both. So x % of the units move when x % of the weight moves.
    3. Consecutive spans in the order of the digests.

    Args:
        weights: Weight of each version, at least 1.
        earlier: Weights and assignments of earlier splits between the same versions, the latest first.
    """
    sizes = _sizes(weights)
    latest: Assignment | None = None
    for before, assignment in earlier:
        if _sizes(before) == sizes:
            return assignment
        latest = assignment if latest is None else latest
    in_order = consecutive([(version, weights[version]) for version in sorted(weights)])
    if latest is None:
        return in_order
    by_start = sorted(latest, key=lambda version: latest[version])
    for tidy in (in_order, consecutive([(version, weights[version]) for version in by_start])):
        if num_moved(latest, tidy) == _num_moved_at_least(latest, sizes):
            return tidy
    moved = _moved(latest, sizes)
    return moved if sum(map(len, moved.values())) <= 2 * _MAX_SPANS else in_order


def consecutive(arms: Sequence[tuple[str, int]]) -> Assignment:
    """One span for each version, in the order given, as wide as its weight. Releases before this file assigned points so."""
    sizes = _sizes(dict(arms))
    ends = list(accumulate(sizes[version] for version, _ in arms))
    return {version: (end - sizes[version], end) for (version, _), end in zip(arms, ends, strict=True)}


def num_moved(before: Assignment, after: Assignment) -> int:
    """How many points have another version than before."""
    kept, others = 0, iter(_spans(after))
    other = next(others, None)
    for one in _spans(before):
        while other is not None and other.start < one.end:
            if one.version == other.version:
                kept += max(min(one.end, other.end) - max(one.start, other.start), 0)
            if other.end > one.end:
                break
            other = next(others, None)
    return NUM_POINTS - kept


def _num_moved_at_least(before: Assignment, sizes: Mapping[str, int]) -> int:
    return sum(max(_size(points) - sizes[version], 0) for version, points in before.items())


def _sizes(weights: Mapping[str, int]) -> dict[str, int]:
    """Points of each version in proportion to its weight; what the division leaves goes to the largest remainders."""
    total = sum(weights.values())
    sizes = {version: NUM_POINTS * weight // total for version, weight in weights.items()}
    by_remainder = sorted(weights, key=lambda version: (-(NUM_POINTS * weights[version] % total), version))
    for version in by_remainder[: NUM_POINTS - sum(sizes.values())]:
        sizes[version] += 1
    return sizes


def _size(points: Points) -> int:
    return sum(points[1::2]) - sum(points[::2])


def _spans(assignment: Assignment) -> list[_Span]:
    spans = (
        _Span(start, end, version)
        for version, points in assignment.items()
        for start, end in zip(points[::2], points[1::2], strict=True)
    )
    return sorted(spans)


def _moved(before: Assignment, sizes: Mapping[str, int]) -> Assignment:
    """The assignment after which every version has its number of points, and no version has both lost and gained any."""
    spans = _spans(before)
    missing = {version: size - _size(before[version]) for version, size in sizes.items()}
    kept: list[_Span] = []
    freed: list[tuple[int, int]] = []
    for index in sorted(range(len(spans)), key=lambda index: spans[index].size):  # the smallest go whole: few spans are left
        span = spans[index]
        excess = min(max(-missing[span.version], 0), span.size)
        missing[span.version] += excess
        if index and missing[spans[index - 1].version] > 0:  # the span before grows, rather than that a new one begins
            freed.append((span.start, span.start + excess))
            kept.append(_Span(span.start + excess, span.end, span.version))
        else:
            freed.append((span.end - excess, span.end))
            kept.append(_Span(span.start, span.end - excess, span.version))
    edges = [span for span in kept if span.size]
    neighbours = {span.end: span.version for span in edges} | {span.start: span.version for span in edges}
    for start, end in sorted(freed):
        kept.extend(_handed_out(start, end, missing, first=(neighbours.get(start), neighbours.get(end))))
    return _joined(kept)


def _handed_out(start: int, end: int, missing: dict[str, int], *, first: Sequence[str | None]) -> Iterator[_Span]:
    """Hands points to versions that miss some, first to those on either side."""
    for version in dict.fromkeys([*first, *sorted(missing)]):
        if start == end:
            return
        size = min(missing[version], end - start) if version is not None else 0
        if version is None or size <= 0:
            continue
        missing[version] -= size
        is_after = version == first[1] and version != first[0]
        yield _Span(end - size, end, version) if is_after else _Span(start, start + size, version)
        start, end = (start, end - size) if is_after else (start + size, end)
    assert start == end, "gained points are as many as lost ones"


def _joined(spans: Iterable[_Span]) -> Assignment:
    points: dict[str, list[int]] = {}
    for span in sorted(span for span in spans if span.size):
        mine = points.setdefault(span.version, [])
        if mine and mine[-1] == span.start:
            mine[-1] = span.end
        else:
            mine.extend((span.start, span.end))
    return {version: tuple(mine) for version, mine in points.items()}
