"""Samples of the low-rank product, taken beside running requests, are what the adapter's own numbers give."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from dataplane.engine.client import EngineClient
from dataplane.engine.config import EngineConfig
from dataplane.engine.samples import MAX_PENDING, MAX_WAIT_S, Orders, TakeSamples, sample_columns, sample_input
from dataplane.lora.image import ImagePair, build_image
from dataplane.lora.image_file import write_image
from tests.dataplane.engine.serving import Make, collect, request, until
from veneer.errors import UnavailableError

SHAPES = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 96), (64, 96), (96, 64)]
"""(in, out) of the tiny model's slices."""
PLACES = ((0, 0), (0, 2), (1, 4), (1, 6))


def pairs(*, rank: int, seed: int) -> list[ImagePair]:
    noise = np.random.default_rng(seed)
    found = []
    for layer, index in PLACES:
        wide, narrow = SHAPES[index]
        a = noise.standard_normal((rank, wide), np.float32) * np.float32(0.3)
        found.append(ImagePair(layer, index, 2.0, a, noise.standard_normal((narrow, rank), np.float32) * np.float32(0.3)))
    return found


def expected(pair: ImagePair) -> np.ndarray:
    x = sample_input(pair.a.shape[1])
    return (pair.scaling * (x @ pair.a.T) @ pair.b.T)[:, sample_columns(pair.b.shape[0])]


def stage(client: EngineClient, folder: Path, config: EngineConfig, version: str, made: list[ImagePair]) -> None:
    image = build_image(
        made, version=version, base_digest=config.base_digest, dtype=config.arena_dtype, num_layers=2, num_slices=7
    )
    write_image(folder / version, image)
    client.stage(version, folder / version)


@pytest.mark.parametrize("form", ["torch", "auto"])
@pytest.mark.parametrize("stepping", ["serial", "overlapped"])
async def test_samples_are_what_the_adapter_gives_whatever_runs_beside_it(
    form: str, stepping: str, tiny_config: Make, tmp_path: Path
) -> None:
    config = tiny_config(cpu_form=form, stepping=stepping)
    made = {version: pairs(rank=rank, seed=rank) for version, rank in (("a" * 64, 3), ("b" * 64, 8))}
    client = await EngineClient.start(config, in_process=True)
    try:
        for version, its in made.items():
            stage(client, tmp_path, config, version, its)
        runs = [
            collect(client, request(str(i), [1, 2, 3 + i], max_tokens=12, version=one)) for i, one in enumerate([None, *made])
        ]
        asked = [client.take_samples(version, PLACES) for version in made]
        *_, first, second = await asyncio.gather(*runs, *asked)
        for its, values in zip(made.values(), (first, second), strict=True):
            for pair, found in zip(its, values, strict=True):
                right = expected(pair)
                assert np.linalg.norm(np.reshape(found, right.shape) - right) <= 1e-4 * np.linalg.norm(right)
    finally:
        await client.stop()


async def test_tokens_are_the_same_with_samples_taken_in_between(tiny_config: Make, tmp_path: Path) -> None:
    config, version = tiny_config(), "a" * 64
    client = await EngineClient.start(config, in_process=True)
    try:
        stage(client, tmp_path, config, version, pairs(rank=4, seed=1))
        alone = await collect(client, request("alone", [5, 6, 7], max_tokens=16, version=version))
        run = collect(client, request("watched", [5, 6, 7], max_tokens=16, version=version))
        watched, *_ = await asyncio.gather(run, *(client.take_samples(version, PLACES) for _ in range(5)))
        assert watched == alone
    finally:
        await client.stop()


async def test_an_order_that_no_request_serves_is_given_up(tiny_config: Make) -> None:
    client = await EngineClient.start(tiny_config(), in_process=True)
    try:
        with pytest.raises(UnavailableError):
            await client.take_samples("c" * 64, PLACES, timeout_s=0.2)
        await until(client, lambda state: not state.running)
    finally:
        await client.stop()


def test_orders_beyond_what_may_wait_are_not_kept() -> None:
    orders = Orders()
    assert [orders.add(TakeSamples(token, "v", ())) for token in range(MAX_PENDING + 1)] == [True] * MAX_PENDING + [False]
    assert [due.slot for due in orders.due({"v": 3})] == [3] * MAX_PENDING
    assert not orders.versions


def test_orders_that_no_step_serves_lose_their_places_in_the_end() -> None:
    now = 0.0
    orders = Orders(lambda: now)
    assert all(orders.add(TakeSamples(token, f"{token:064x}", ())) for token in range(MAX_PENDING))
    now = MAX_WAIT_S
    assert not orders.add(TakeSamples(100, "v", ()))
    now = MAX_WAIT_S + 1
    assert orders.add(TakeSamples(101, "v", ()))
    assert orders.versions == ["v"]


async def test_who_asks_while_too_many_wait_is_refused_rather_than_given_none(tiny_config: Make) -> None:
    client = await EngineClient.start(tiny_config(), in_process=True)
    try:
        waiting = [asyncio.create_task(client.take_samples("c" * 64, PLACES)) for _ in range(MAX_PENDING)]
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="too many"):
            await client.take_samples("d" * 64, PLACES)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    finally:
        await client.stop()


def test_the_input_is_exact_in_every_dtype_and_differs_by_row() -> None:
    x = sample_input(577)
    assert np.array_equal(x * 64, np.round(x * 64))
    assert np.linalg.matrix_rank(x) == len(x)
    assert np.abs(x).max() <= 1
    assert sample_columns(3).tolist() == [0, 1, 2]
    assert len(set(sample_columns(5000).tolist())) == 64
