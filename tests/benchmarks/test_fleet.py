"""An engine that serves many adapters from little room, on a tiny model."""

from __future__ import annotations

import pytest

from benchmarks import traces
from benchmarks.fleet import Fleet, ImageFolder
from benchmarks.loads import _measure_pairs, measure_copy
from benchmarks.models import write_random_llama
from veneer.errors import InvalidArgumentError

SMALL = {"kv_bytes": 32 << 20, "arena_bytes": 1 << 20, "arena_unit_bytes": 4096, "max_step_tokens": 256}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> ImageFolder:
    model = tmp_path_factory.mktemp("model")
    write_random_llama(model, hidden=64, mlp=96, heads=4, layers=3, vocab=160)
    return ImageFolder(tmp_path_factory.mktemp("images"), model)


def test_an_image_is_made_once_and_three_in_ten_are_larger(images: ImageFolder) -> None:
    sizes = [images.path(number).stat().st_size for number in range(10)]
    assert sorted(sizes)[6] < sorted(sizes)[7]
    made = images.path(3).stat().st_mtime_ns
    assert images.path(3).stat().st_mtime_ns == made


async def test_a_trace_over_more_adapters_than_there_is_room_for_is_served_to_its_end(images: ImageFolder) -> None:
    trace = traces.uniform(6, 40).tolist()
    async with Fleet.started(images, room=2, streams=4, output_tokens=4, **SMALL) as fleet:
        fed = await fleet.feed(trace, outstanding=8, output_tokens=4)
        cold, warm = [await fleet.stream(number, output_tokens=4) for number in (7, 7) if fleet.stage([7]) is None]
    assert fed.loads > 2
    assert 0 <= fed.hit_rate < 1
    assert fed.tokens_per_s > 0
    assert all(len(stream.times_s) == 4 for stream in fed.streams)
    assert len(fed.streams) >= 32
    assert all(stream.ttft_s > 0 and stream.ttft_steps > 0 for stream in (cold, warm))


def test_a_load_is_compared_with_a_copy(images: ImageFolder) -> None:
    rows = {row.id: row.value for row in measure_copy(images, count=2, turns=1)}
    assert rows["load_vs_copy"] > 0


async def test_visitors_come_in_pairs_and_what_they_find_was_opened(images: ImageFolder) -> None:
    async with Fleet.started(images, room=4, streams=24, output_tokens=200, **SMALL) as fleet:
        fleet.stage(range(5))
        rows = {row.id: row.value for row in await _measure_pairs(fleet, images, iter(range(10, 100)), count=3)}
        state = await fleet.state()
    assert set(rows) == {"cold_ttft_host", "cold_ttft_host_ms", "cold_ttft_host_counted"}
    assert (state.store_loads, len(fleet.loads) >= 3) == (0, True)


async def test_a_request_that_fails_ends_the_feed(images: ImageFolder) -> None:
    async with Fleet.started(images, room=2, streams=2, output_tokens=4, max_rank=4, **SMALL) as fleet:
        with pytest.raises(InvalidArgumentError):
            await fleet.feed([0, 1, 0, 1], outstanding=2, output_tokens=4)
