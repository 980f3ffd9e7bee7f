"""More adapters than there is room for: what is left of the throughput, and of the time to the first token."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks import traces
from benchmarks.fleet import Fed, Fleet, ImageFolder
from benchmarks.report import Row
from benchmarks.workload import percentile

OUTPUT = 64


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured.

    Attributes:
        catalogue: Adapters that traces name.
        room: Adapters on the device.
        streams: Requests that run at the same time.
        waiting: Requests that wait beside.
        requests: Requests that are counted; as many as are outstanding come before and after them.
        uniform: Sizes of the catalogues of which all adapters are asked for alike, from `room` to `catalogue`.
        rounds: Alternations.
    """

    catalogue: int
    room: int
    streams: int
    waiting: int
    requests: int
    uniform: tuple[int, ...]
    rounds: int

    @property
    def outstanding(self) -> int:
        """Requests that run or wait."""
        return self.streams + self.waiting

    @property
    def length(self) -> int:
        """Requests of a trace."""
        return self.requests + 2 * self.outstanding


async def _feed(images: ImageFolder, trace: Sequence[int], *, room: int, streams: int, outstanding: int) -> Fed:
    async with Fleet.started(images, room=room, streams=streams, output_tokens=OUTPUT) as fleet:
        fed = await fleet.feed(trace, outstanding=outstanding, output_tokens=OUTPUT)
    print(
        f"  room for {room:4}: {fed.tokens_per_s:7.1f} tokens/s, {fed.loads} loads of {fed.load_s * 1e3:.1f} ms in {fed.steps} "
        f"steps, hits {fed.hit_rate:.2f}",
        flush=True,
    )
    return fed


async def measure_zipf(images: ImageFolder, scale: Scale) -> list[Row]:
    """Serves traces by Zipf's law from the room there is, in turns with room for all that they touch."""
    rows: list[Row] = []
    for exponent, name, target in (
        (1.0, "zipf_vs_roomy", ">= 0.85"),
        (0.8, "zipf_0.8_vs_roomy", ""),
        (1.2, "zipf_1.2_vs_roomy", ""),
    ):
        trace = traces.zipf(scale.catalogue, scale.length, exponent=exponent).tolist()
        print(f"Zipf {exponent} over {scale.catalogue}, of which the trace touches {len(set(trace))}")
        ratios = []
        for _ in range(scale.rounds if target else 1):
            tight, roomy = [
                await _feed(images, trace, room=room, streams=scale.streams, outstanding=scale.outstanding)
                for room in (scale.room, len(set(trace)))
            ]
            ratios.append(tight.tokens_per_s / roomy.tokens_per_s)
        rows.append(Row(name, statistics.median(ratios), target=target))
    return rows


async def measure_uniform(images: ImageFolder, scale: Scale) -> list[Row]:
    """Serves catalogues of which all adapters are asked for alike, beside what loads alone explain.

    With room for each of the catalogue's adapters nothing is loaded; as many streams as adapters then give the time of a request.
    Where each request needs a load, a request takes that time and the load's.
    """
    found: list[Fed] = []
    num_requests = 2 * scale.requests // 5  # of each of five, with what comes before them as long as three whole traces
    for size in scale.uniform:
        print(f"uniform over {size}")
        trace = traces.uniform(size, num_requests + 2 * scale.outstanding).tolist()
        found.append(await _feed(images, trace, room=scale.room, streams=scale.streams, outstanding=scale.outstanding))
    print(f"uniform over {scale.room}, a stream an adapter")
    streams = min(scale.streams, scale.room)
    trace = traces.uniform(scale.room, scale.requests + 2 * scale.room).tolist()
    alone = await _feed(images, trace, room=scale.room, streams=streams, outstanding=scale.room)
    request_s = OUTPUT / alone.tokens_per_s + found[-1].load_s
    rises = [larger.tokens_per_s / smaller.tokens_per_s for smaller, larger in pairwise(found)]
    return [
        Row("thrash_floor", found[-1].tokens_per_s * request_s / OUTPUT, target=">= 0.8"),
        Row("thrash_monotone", max(rises), target="<= 1.05"),
        *(Row(f"uniform/{size}", fed.tokens_per_s, unit="tokens/s") for size, fed in zip(scale.uniform, found, strict=True)),
    ]


async def measure_ttft(images: ImageFolder, scale: Scale) -> list[Row]:
    """Serves a uniform trace over twice the room with few streams, in turns with room for all."""
    streams, ratios = 16, []
    print(f"uniform over {2 * scale.room}, {streams} streams")
    trace = traces.uniform(2 * scale.room, scale.requests + 4 * scale.room).tolist()
    for _ in range(scale.rounds):
        tails = []
        for room in (scale.room, 2 * scale.room):
            fed = await _feed(images, trace, room=room, streams=streams, outstanding=streams)
            tails.append(percentile([stream.ttft_s for stream in fed.streams[2 * scale.room :]], 90))
        print(f"  p90 of the time to the first token: {tails[0] * 1e3:.1f} and {tails[1] * 1e3:.1f} ms", flush=True)
        ratios.append(tails[0] / tails[1])
    return [Row("ttft_2x_p90", statistics.median(ratios), target="<= 2")]
