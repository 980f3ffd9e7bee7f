from __future__ import annotations

import numpy as np

from controlplane.rendezvous import favourites, hashes, scores

NAMES = [f"owner/{number}" for number in range(4000)]
REPLICAS = [f"replica-{number}" for number in range(20)]


def liked(replicas: list[str], weights: list[float] | None = None) -> list[str]:
    chosen = favourites(hashes(NAMES), hashes(replicas), np.array(weights or [1.0] * len(replicas), np.float32), count=1)
    return [replicas[index] for index in chosen[:, 0].tolist()]


def test_hashes_are_the_same_in_every_process() -> None:
    assert hashes(["acme/tone", ""]).tolist() == [1606413252, 634351890]


def test_favourites_are_those_with_the_greatest_scores_in_order() -> None:
    adapters, replicas = hashes(NAMES), hashes(REPLICAS)
    weights = np.linspace(0.5, 2.0, len(REPLICAS), dtype=np.float32)
    every = scores(adapters[:, None], replicas[None], weights[None])
    assert np.isfinite(every).all()
    best = np.argsort(-every, axis=1, kind="stable")[:, :4]
    assert (favourites(adapters, replicas, weights, count=4) == best).all()
    assert favourites(adapters, replicas, weights, count=99).shape == (len(NAMES), len(REPLICAS))


def test_every_replica_is_liked_by_its_share() -> None:
    weights = [1.0, 3.0] * 10
    counts = np.bincount([REPLICAS.index(one) for one in liked(REPLICAS, weights)], minlength=20) / len(NAMES)
    assert (np.abs(counts - np.array(weights) / 40) < 4 * np.sqrt(0.075 / len(NAMES))).all()


def test_a_replica_that_leaves_changes_the_favourite_of_nobody_else() -> None:
    before, after = liked(REPLICAS), liked(REPLICAS[:7] + REPLICAS[8:])
    changed = [one for one, other in zip(before, after, strict=True) if one != other]
    assert set(changed) == {REPLICAS[7]}
    assert len(changed) == before.count(REPLICAS[7])


def test_without_adapters_there_is_nothing_to_like() -> None:
    assert favourites(hashes([]), hashes(REPLICAS), np.ones(20, np.float32), count=3).shape == (0, 3)
