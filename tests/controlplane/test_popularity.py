from __future__ import annotations

import pytest

from controlplane.fleet_reports import Holding, NodeState
from controlplane.popularity import Popularity


def state(epoch: int = 1, **uses: int) -> NodeState:
    holdings = {version: Holding(on_device=True, max_rank=8, size_bytes=10, uses=count) for version, count in uses.items()}
    return NodeState(
        node="n",
        base_digest="b",
        epoch=epoch,
        serving=True,
        address="",
        max_running=8,
        slots=4,
        device_bytes=100,
        holdings=holdings,
    )


def test_uses_count_once_and_halve_with_time() -> None:
    popularity = Popularity(half_life_s=10.0)
    popularity.note({"n": state(v=8)}, 0.0)
    assert popularity.counts == {"v": 8.0}
    popularity.note({"n": state(v=8)}, 10.0)
    assert popularity.counts == pytest.approx({"v": 4.0})
    popularity.note({"n": state(v=11)}, 20.0)
    assert popularity.counts == pytest.approx({"v": 5.0})
    popularity.note({}, 1000.0)
    assert popularity.counts == {}


def test_a_version_held_anew_and_an_engine_that_began_again_count_from_nothing() -> None:
    popularity = Popularity(half_life_s=1e9)
    popularity.note({"n": state(v=8)}, 0.0)
    popularity.note({"n": state(v=3)}, 1.0)
    assert popularity.counts["v"] == pytest.approx(11.0)
    popularity.note({"n": state(epoch=2, v=5)}, 2.0)
    assert popularity.counts["v"] == pytest.approx(16.0)


def test_uses_of_several_nodes_add_up() -> None:
    popularity = Popularity()
    popularity.note({"n": state(v=8), "m": state(v=1, w=2)}, 0.0)
    assert popularity.counts == {"v": 9.0, "w": 2.0}


def test_a_node_that_claims_too_much_is_believed_up_to_a_rate() -> None:
    popularity = Popularity(half_life_s=100.0, max_per_s=10.0)
    popularity.note({"n": state(v=1 << 62, w=0)}, 0.0)
    assert popularity.counts["v"] == pytest.approx(1000.0)
    popularity.note({"n": state(v=(1 << 62) + 30, w=90)}, 1.0)
    assert popularity.counts["w"] == pytest.approx(10.0 * 90 / 120)
