"""Rows computed from throughputs of uniform traces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import adapters, thrash
from benchmarks.fleet import Fed, ImageFolder
from benchmarks.models import write_random_llama


@pytest.fixture
def images(tmp_path: Path) -> ImageFolder:
    (tmp_path / "model").mkdir()
    write_random_llama(tmp_path / "model", hidden=64, mlp=96, heads=4, layers=3, vocab=160)
    return ImageFolder(tmp_path / "images", tmp_path / "model")


async def test_each_catalogue_is_compared_with_the_one_before(images: ImageFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = iter([900.0, 500.0, 550.0, 300.0, 290.0, 580.0])
    traces: list[Sequence[int]] = []

    async def feed(_images: ImageFolder, trace: Sequence[int], **_: int) -> Fed:
        traces.append(trace)
        return Fed(next(speeds), loads=1, load_s=0.1, steps=1, hit_rate=0.0, streams=[])

    monkeypatch.setattr(thrash, "_feed", feed)
    rows = {row.id: row.value for row in await thrash.measure_uniform(images, adapters.FULL)}
    assert [f"uniform/{size}" for size in (40, 100, 300, 1000, 3000)] == list(rows)[2:]
    assert [max(trace) < size for trace, size in zip(traces, adapters.FULL.uniform, strict=False)] == [True] * 5
    assert rows["thrash_monotone"] == pytest.approx(1.1)
    assert rows["thrash_floor"] == pytest.approx(290 * (64 / 580 + 0.1) / 64)


@pytest.mark.parametrize("scale", [adapters.FULL, adapters.SHORT], ids=["full", "short"])
def test_five_catalogues_take_as_long_as_three_whole_traces(scale: thrash.Scale) -> None:
    assert (scale.uniform[0], scale.uniform[-1], len(scale.uniform)) == (scale.room, scale.catalogue, 5)
    assert sorted(set(scale.uniform)) == list(scale.uniform)
    served = 5 * (2 * scale.requests // 5 + scale.outstanding)
    assert served <= 3 * (scale.requests + scale.outstanding)
