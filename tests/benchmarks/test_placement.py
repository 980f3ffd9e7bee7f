from __future__ import annotations

import numpy as np
import pytest

from benchmarks.placement import Scale, measure
from benchmarks.routing import Outcome, Replicas, Traffic, affinity_scores, best_static, routed

SMALL = Scale(replicas=40, slots=10, adapters=1000, requests=60_000, others=20_000, looked_at=8_000, losses=2)


@pytest.fixture(scope="module")
def figures() -> dict[str, float]:
    return {row.id: row.value for row in measure(SMALL, exponents=(1.0,))}


def test_the_plan_hits_nearly_as_often_as_what_stands_still_and_is_even(figures: dict[str, float]) -> None:
    assert 0.90 <= figures["place_hit"] <= 1.01
    assert figures["place_balance"] <= 1.25
    assert figures["place_moved"] <= 1.5
    assert figures["place_moved_join"] <= 1.5


def test_the_others_fail_where_they_are_known_to(figures: dict[str, float]) -> None:
    assert figures["place_hit_random"] < 0.6
    assert figures["place_hit_least_loaded"] < 0.6
    assert figures["place_balance_hashing"] > 4
    assert figures["place_hit_llm_d"] > figures["place_hit_random"]


def test_a_replica_lets_go_what_was_used_longest_ago_but_nothing_planned() -> None:
    requests = np.array([0, 1, 2, 0, 9, 9, 1])
    traffic = Traffic(np.ones(10) / 10, requests[:1], requests[1:])
    nowhere = np.zeros(len(requests), np.int64)
    assert routed(traffic, nowhere, num_replicas=1, slots=2) == Outcome(1 / 6, 1.0)
    assert routed(traffic, nowhere, num_replicas=1, slots=2, planned=[frozenset({1})]) == Outcome(3 / 6, 1.0)


def test_affinity_scores_prefer_a_holder_then_a_free_slot() -> None:
    replicas = Replicas(3, slots=1)
    assert replicas.play(Traffic(np.ones(3) / 3, np.array([0, 1, 2]), np.array([0, 1, 2, 2])), affinity_scores).hit_rate == 1.0
    assert sorted(len(cache) for cache in replicas.caches) == [1, 1, 1]


def test_the_best_static_assignment_holds_the_most_popular() -> None:
    assert best_static(Traffic(np.array([0.1, 0.6, 0.3]), np.array([0]), np.array([0])), 2) == pytest.approx(0.9)
