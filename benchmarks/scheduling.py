"""The scheduler by itself, and what it does for tenants: `python -m benchmarks.scheduling [--json PATH]`.

The first rows time `schedule` and `commit` on integers, without a model. The others run the engine on SmolLM2-135M: one tenant
floods, and another's requests come one by one; and a long prompt that a tenant repeats.
"""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import time
from collections.abc import Mapping

from benchmarks.report import Row
from dataplane.engine.collector import tame
from dataplane.engine.intake import Intake
from dataplane.engine.kv_cache import PagePool
from dataplane.engine.limits import Limits
from dataplane.engine.messages import Sampling, Submit
from dataplane.engine.scheduler import Scheduler
from dataplane.lora.residency import Lease

SEED = 20_26
RUNNING, QUEUED, TENANTS, VERSIONS = 256, 10_000, 100, 64


class _Resident:
    """Adapters of which all but every tenth version are on the device."""

    def __init__(self) -> None:
        self._ids = itertools.count()

    def acquire(self, version: str) -> Lease | None:
        number = int(version)
        return None if number % 10 == 9 else Lease(next(self._ids), version, number, 16, 1)

    def release(self, lease: Lease) -> None:
        pass

    def withdraw(self, version: str) -> None:
        pass

    def arrived(self) -> Mapping[str, int]:
        return {}

    def is_starved(self, _version: str) -> bool:
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


def measure_schedule(*, steps: int = 2000, warm_up: int = 300) -> list[Row]:
    """Times the scheduler with everything on, garbage collection as in the engine and counted."""
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
    taken = []
    for step in range(warm_up + steps):
        start = time.perf_counter()
        plan = scheduler.schedule()
        planned = time.perf_counter()
        assert plan is not None, "there is always work"
        tokens = [5] * sum(rows.sampling is not None for rows in plan.rows)
        ran = time.perf_counter()
        outcome = scheduler.commit(plan, tokens, seconds=0.08)
        taken.append(planned - start + time.perf_counter() - ran)
        for _ in range(sum(delta.finish is not None for delta in outcome.deltas)):
            add()
        if step == warm_up:
            assert scheduler.num_running == RUNNING, "every seat is taken"
    gc.unfreeze()
    del taken[:warm_up]
    taken.sort()
    return [
        Row("schedule_ms", statistics.fmean(taken) * 1e3, unit="ms", target="<= 0.6"),
        Row("schedule_p99_ms", taken[len(taken) * 99 // 100] * 1e3, unit="ms", target="<= 1.5"),
    ]
