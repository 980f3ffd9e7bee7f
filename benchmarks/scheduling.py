"""The scheduler by itself, and what it does for tenants: `python -m benchmarks.scheduling [--json PATH]`.

The first rows time `schedule` and `commit` on integers, without a model. The others run the engine on SmolLM2-135M: one tenant
floods, and another's requests come one by one; and a long prompt that a tenant repeats.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks import report
from benchmarks.beside import beside
from benchmarks.report import Row
from dataplane.engine.batch import StepBuffers
from dataplane.engine.client import EngineClient
from dataplane.engine.collector import tame
from dataplane.engine.config import EngineConfig
from dataplane.engine.intake import Intake
from dataplane.engine.kv_cache import PagePool
from dataplane.engine.limits import Limits
from dataplane.engine.messages import Event, Sampling, State, Submit, Tokens
from dataplane.engine.scheduler import Scheduler
from dataplane.lora.holdings import Budget, Lease
from demo.prepare import prepare

SEED = 20_26
RUNNING, QUEUED, TENANTS, VERSIONS = 256, 10_000, 100, 64
SEATS, OUTPUT = 16, 48


class _Resident:
    """Adapters of which all but every tenth version are on the device."""

    def __init__(self) -> None:
        self._ids = itertools.count()

    def acquire(self, version: str, tenant: str = "", *, weight: int = 1, max_bytes: int = 0) -> Lease | None:
        del tenant, weight, max_bytes
        number = int(version)
        return None if number % 10 == 9 else Lease(next(self._ids), version, number, 16, 1)

    def release(self, lease: Lease, *, served: int = 0) -> None:
        pass

    def withdraw(self, version: str) -> None:
        pass

    def arrived(self) -> Mapping[str, int]:
        return {}

    def is_starved(self, _version: str) -> bool:
        return False

    def budget(self, version: str, tenant: str, *, max_bytes: int) -> Budget | None:
        pass

    def is_pinned(self, _version: str) -> bool:
        return False

    def reserve(self, version: str) -> None:
        pass

    def may_return(self, _version: str) -> bool:
        return True

    def evict(self, version: str) -> None:
        pass

    def excess_of(self, _tenant: str) -> float:
        return 0.0

    def yields(self, holder: str, *, version: str, loader: str) -> bool:
        del holder, version, loader
        return False


class _Requests:
    """Mixed requests without end: tenants, adapters and none, short and long prompts, half with a tenant's own beginning."""

    def __init__(self) -> None:
        self._random = random.Random(SEED)
        self._count = 0

    def next(self) -> Submit:
        draw = self._random
        self._count += 1
        tenant = draw.randrange(TENANTS)
        version = draw.randrange(2 * VERSIONS)
        beginning = [tenant + 1] * 64 if draw.random() < 0.5 else []
        own = [draw.randrange(1000) for _ in range(draw.randrange(8, 300))]
        return Submit(
            request_id=f"r{self._count}",
            tenant=f"t{tenant}",
            prompt=tuple(beginning + own),
            sampling=Sampling(max_tokens=draw.randrange(16, 256)),
            version=str(version) if version < VERSIONS else None,
            weight=1 + tenant % 3,
            cache_salt=f"s{tenant}",
        )


@dataclass(frozen=True, slots=True)
class _Layout:
    """What filling a step needs to know of the KV tensor."""

    page_size: int = 16
    rows_per_page: int = 16


def measure_schedule(*, steps: int = 2000, warm_up: int = 300) -> list[Row]:
    """Times the scheduler with everything on, garbage collection as in the engine and counted; and filling the buffers."""
    limits = Limits(
        max_sequences=RUNNING, max_step_tokens=2048, max_step_rank_rows=16 * VERSIONS, max_context=2048, max_waiting=2 * QUEUED
    )
    pool = PagePool(16_384, 16)
    scheduler = Scheduler(limits, pool, _Resident())
    intake = Intake(base_digest="base", page_size=16, vocab_size=1000, max_context=2048)
    requests = _Requests()

    def add() -> None:
        arrival = intake.prepare(requests.next())
        scheduler.add(arrival.submit, 0.0, chain=arrival.chain, keys=arrival.keys)

    for _ in range(QUEUED + RUNNING):
        add()
    tame()
    buffers = StepBuffers(max_step_tokens=2048, max_sequences=RUNNING, max_pages=128, device=torch.device("cpu"))
    taken, filling = [], []
    for step in range(warm_up + steps):
        start = time.perf_counter()
        plan = scheduler.schedule()
        planned = time.perf_counter()
        assert plan is not None, "there is always work"
        tokens = [5] * (len(plan.decodes) + sum(rows.sampling is not None for rows in plan.rows))
        begun = time.perf_counter()
        buffers.fill(plan, _Layout())  # type: ignore[arg-type]
        ran = time.perf_counter()
        filling.append(ran - begun)
        outcome = scheduler.commit(plan, tokens, seconds=0.08)
        taken.append(planned - start + time.perf_counter() - ran)
        for _ in range(len(outcome.tokens.finishes)):
            add()
        if step == warm_up:
            assert scheduler.num_running > RUNNING - 10, "every seat is taken but those of requests that just ended"
    gc.unfreeze()
    del taken[:warm_up], filling[:warm_up]
    taken.sort()
    return [
        Row("schedule_ms", statistics.fmean(taken) * 1e3, unit="ms", target="<= 0.6"),
        Row("schedule_p99_ms", taken[len(taken) * 99 // 100] * 1e3, unit="ms", target="<= 1.5"),
        Row("fill_ms", statistics.fmean(filling) * 1e3, unit="ms"),
    ]


class _Counting(EngineClient):
    """Counts steps as their tokens come, in the order in which the engine sent them."""

    num_steps = 0
    steps_at_state = 0

    def _receive(self, events: Iterable[Event]) -> None:
        for event in events:
            self.num_steps += isinstance(event, Tokens)
            if isinstance(event, State):
                self.steps_at_state = self.num_steps
            super()._receive((event,))


@dataclass(frozen=True, slots=True)
class _First:
    """When a request's first token came after it was sent."""

    seconds: float
    steps: int


class _Load:
    """Requests of several tenants on one engine."""

    def __init__(self, client: _Counting) -> None:
        self._client = client
        self._random = random.Random(SEED)
        self._count = 0
        self.tokens: Counter[str] = Counter()

    def request(self, tenant: str, *, prompt: int, output: int, salt: str = "", beginning: Sequence[int] = ()) -> Submit:
        """Makes a request of random tokens that runs to its full length."""
        self._count += 1
        own = [self._random.randrange(10, 40_000) for _ in range(prompt)]
        sampling = Sampling(max_tokens=output, temperature=0.0)
        return Submit(
            request_id=f"{tenant}-{self._count}", tenant=tenant, prompt=(*beginning, *own), sampling=sampling, cache_salt=salt
        )

    async def run(self, submit: Submit) -> _First:
        """Runs a request to its end and returns when its first token came."""
        first: _First | None = None
        started = time.perf_counter()
        state = asyncio.create_task(self._client.state())
        await asyncio.sleep(0)  # the query goes first, in the same message
        async for delta in self._client.submit(submit):
            if first is None:
                first = _First(time.perf_counter() - started, self._client.num_steps - self._client.steps_at_state)
            self.tokens[submit.tenant] += len(delta.ids)
        await state
        assert first is not None, "every request has a token"
        return first

    async def begun(self, tenants: Sequence[str]) -> None:
        """Waits until each of the tenants has had a token."""
        while not all(self.tokens[tenant] for tenant in tenants):
            await self._client.state()

    async def keep_busy(self, tenant: str, *, prompt: int, output: int) -> None:
        """Sends one request of a tenant after the other, until it is cancelled."""
        while True:
            async for delta in self._client.submit(self.request(tenant, prompt=prompt, output=output)):
                self.tokens[tenant] += len(delta.ids)


async def _victim(client: _Counting, tenants: Sequence[str], *, prompt: int, count: int) -> list[_First]:
    """Keeps an engine full and sends one request of another tenant after the other; returns their first tokens."""
    load = _Load(client)
    busy = (load.keep_busy(tenants[index % len(tenants)], prompt=prompt, output=OUTPUT) for index in range(4 * SEATS))
    async with beside(busy):
        await load.begun(tenants[:1])
        return [await load.run(load.request("victim", prompt=prompt, output=1)) for _ in range(count)]


async def _share(client: _Counting, *, seconds: float) -> float:
    """Returns a backlogged tenant's part of all tokens over its weight's part, while another sends ten times as much."""
    load = _Load(client)
    counts = {"flood": 10 * SEATS, "victim": SEATS}
    busy = (load.keep_busy(tenant, prompt=32, output=OUTPUT) for tenant, count in counts.items() for _ in range(count))
    async with beside(busy):
        await load.begun(list(counts))
        load.tokens.clear()
        await asyncio.sleep(seconds)
        return 2 * load.tokens["victim"] / load.tokens.total()


async def _prefix(client: _Counting, *, count: int) -> float:
    """Returns the time to the first token without the prefix cache over that with it."""
    load = _Load(client)
    beginning = [load._random.randrange(10, 40_000) for _ in range(1000)]
    medians = []
    for salt in ("", "salt"):
        times = [await load.run(load.request("t", prompt=32, output=1, salt=salt, beginning=beginning)) for _ in range(count + 1)]
        medians.append(statistics.median(first.seconds for first in times[1:]))
    return medians[0] / medians[1]


async def measure_engine(*, count: int = 25, seconds: float = 10.0) -> list[Row]:
    """Measures what one tenant sees of another's flood, and what a repeated beginning saves."""
    config = EngineConfig(
        model_dir=str(prepare()), max_sequences=SEATS, max_step_tokens=512, max_context=1200, kv_bytes=1 << 30, arena_bytes=0
    )
    client = await _Counting.start(config)
    assert isinstance(client, _Counting), "`start` makes one of its own class"
    try:
        share = await _share(client, seconds=seconds)
        steps, ratios = [], []
        for prompt, number in ((32, count), (1000, max(1, count // 3))):
            flood = await _victim(client, ["flood"], prompt=prompt, count=number)
            equal = await _victim(client, [f"t{index}" for index in range(SEATS)], prompt=prompt, count=number)
            steps.append(_p99([first.steps for first in flood]))
            ratios.append(_p99([first.seconds for first in flood]) / _p99([first.seconds for first in equal]))
        prefix = await _prefix(client, count=5)
    finally:
        await client.stop()
    return [
        Row("flood_share", share, target=">= 0.9"),
        Row("flood_steps", steps[0], unit="steps", target="<= 3"),
        Row("flood_steps_1000", steps[1], unit="steps"),
        Row("flood_ttft", max(ratios), target="<= 1.5"),
        Row("prefix_ttft", prefix, target=">= 6"),
    ]


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[len(values) * 99 // 100]


def main() -> None:
    """Entry point."""
    arguments = report.parser("Measures the scheduler, the shares of tenants and the prefix cache.").parse_args()
    rows = measure_schedule() + asyncio.run(measure_engine())
    raise SystemExit(0 if report.publish(rows, path=arguments.json, title="scheduling, SmolLM2-135M, bfloat16") else 1)


if __name__ == "__main__":
    main()
