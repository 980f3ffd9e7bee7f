from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from benchmarks import traces
from benchmarks.random_adapters import kind_of
from benchmarks.replay import Census, Clairvoyant, hit_rate, measure_replay, measure_waste, rates
from dataplane.lora.eviction import Recency
from veneer.artifact import BaseDescription


def least_recently_used(trace: list[str], room: int) -> float:
    """The plain form: hits after the first fifth."""
    held: dict[str, None] = {}
    hits = 0
    for turn, version in enumerate(trace):
        hits += version in held and turn >= len(trace) // 5
        held.pop(version, None)
        held[version] = None
        if len(held) > room:
            del held[next(iter(held))]
    return hits / (len(trace) - len(trace) // 5)


def best(trace: list[str], room: int) -> float:
    """Belady's optimum, the plain form."""
    held: set[str] = set()
    hits = 0
    for turn, version in enumerate(trace):
        hits += version in held and turn >= len(trace) // 5
        if version not in held and len(held) == room:
            rest = trace[turn:]
            held.remove(max(held, key=lambda other: rest.index(other) if other in rest else len(trace)))
        held.add(version)
    return hits / (len(trace) - len(trace) // 5)


TRACE = [str(number) for number in traces.zipf(30, 500, exponent=0.8)]


def test_replayed_policies_agree_with_their_plain_forms() -> None:
    assert hit_rate(TRACE, room=5, policy=Recency()) == least_recently_used(TRACE, 5)
    assert hit_rate(TRACE, room=5, policy=Clairvoyant(TRACE)) == best(TRACE, 5)


def test_usage_beats_recency_and_a_look_at_the_queue_beats_both() -> None:
    found = rates(traces.zipf(300, 4000, exponent=1.0), room=10)
    assert found.belady > found.ours > found.blind > 1.2 * found.lru
    assert found.census > 0.95 * found.blind


def test_whoever_knows_all_counts_keeps_the_top() -> None:
    trace = ["a", "b"] * 50
    assert hit_rate([*trace, "c", *trace], room=3, policy=Census(trace)) == pytest.approx(160 / 161)


def test_popular_adapters_are_scattered_over_the_catalogue_and_as_popular_as_zipf_says() -> None:
    trace = traces.zipf(1000, 20_000, exponent=1.0)
    (top, most), (_, second) = Counter(trace.tolist()).most_common(2)
    assert most / len(trace) == pytest.approx(1 / np.sum(1 / np.arange(1, 1001)), rel=0.1)
    assert most / second == pytest.approx(2, rel=0.15)
    assert top != 0


def test_a_scan_takes_every_adapter_in_turn() -> None:
    plain = traces.uniform(20, 90)
    scanned = traces.with_scan(plain, 20, every=3)
    assert len(scanned) == 90 + 29
    assert scanned[3::4].tolist() == [number % 20 for number in range(29)]
    assert np.delete(scanned, np.arange(3, len(scanned), 4)).tolist() == plain.tolist()


def test_a_ranking_that_moves_has_new_adapters_on_top() -> None:
    trace = traces.moving(1000, 30_000, every=10_000, by=5)
    tops = [Counter(part.tolist()).most_common(1)[0][0] for part in np.split(trace, 3)]
    assert all(one != other for one, other in pairwise(tops))


def test_in_small_units_an_arena_holds_little_but_adapters(tiny_base: BaseDescription) -> None:
    rows = {row.id: row.value for row in measure_waste(tiny_base, catalogue=50, room=10, count=400, unit_bytes=256)}
    assert 1 <= rows["arena_waste"] < 1.2
    assert 0 <= rows["arena_largest_free"] <= 1


def test_three_adapters_in_ten_are_on_all_modules_and_ranks_are_those_of_the_catalogue() -> None:
    kinds = [kind_of(number) for number in range(1000)]
    assert sum(kind.modules == "all" for kind in kinds) == 300
    assert {kind.rank for kind in kinds if kind.modules == "all"} == set(range(8, 17))
    assert {kind.rank for kind in kinds if kind.modules == "qv"} == set(range(4, 17))
    assert len({kind.name for kind in kinds}) == 1000


@pytest.mark.slow
def test_the_bounds_hold_on_a_small_catalogue() -> None:
    rows = {row.id: row for row in measure_replay(catalogue=300, room=10, count=4000)}
    assert rows["hit_vs_lru"].meets
    assert rows["hit_vs_belady"].meets
