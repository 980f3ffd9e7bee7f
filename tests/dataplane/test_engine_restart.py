"""A fault in what all requests share: every stream ends, and a new engine comes up by itself and gets its adapters again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from dataplane.engine.client import EngineClient
from dataplane.engine.config import EngineConfig
from dataplane.engine.messages import Sampling, Submit
from dataplane.engine.runner import Runner, model_features
from dataplane.lora.image import ImagePair, build_image
from dataplane.lora.image_file import write_image
from dataplane.metrics import Metrics
from dataplane.model.config import read_config
from dataplane.supervision import EngineSupervisor
from tests.dataplane.doubles import until
from veneer.errors import UnavailableError

VERSIONS = ("v1", "v2")


class Prefetcher:
    """Brings images as the real one does: when the engine asks, and again to a new engine."""

    def __init__(self, supervisor: EngineSupervisor, folder: Path) -> None:
        self._supervisor = supervisor
        self._folder = folder
        self.num_engines = 0

    def want(self, version: str) -> None:
        self._supervisor.stage(version, str(self._folder / version))

    def moved(self, version: str, place: str, *, seconds: float, reason: str) -> None:
        pass

    def unloaded(self, event: object) -> None:
        pass

    def forget_engine(self) -> None:
        self.num_engines += 1

    def meet_engine(self) -> None:
        pass


class Rig:
    """A supervised engine with adapters of its own."""

    def __init__(self, model_dir: Path, folder: Path) -> None:
        config = EngineConfig(
            model_dir=str(model_dir), dtype="float32", num_threads=1, max_sequences=8, max_step_tokens=32, kv_bytes=1 << 20,
            arena_bytes=1 << 20, arena_unit_bytes=4096, max_slots=2, max_step_rank_rows=64,
        )  # fmt: skip
        self.registry = CollectorRegistry()
        self.supervisor = EngineSupervisor(
            lambda: EngineClient.start(config, in_process=True),
            metrics=Metrics(self.registry, base_name="tiny"),
            report_not_finite=self._report,
        )
        self.prefetcher = Prefetcher(self.supervisor, folder)
        self.supervisor.attach(self.prefetcher)

    async def _report(self, version: str) -> None:
        raise AssertionError("nothing is reported")

    async def ask(self, name: str, version: str | None, *, max_tokens: int = 9) -> list[int]:
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0)
        submit = Submit(request_id=name, tenant="t", prompt=(5, 6, 7), sampling=sampling, version=version, cache_salt="s")
        return [id_ async for delta in self.supervisor.submit(submit) for id_ in delta.ids]


@pytest.fixture
async def rig(model_dir: Path, tmp_path: Path) -> AsyncIterator[Rig]:
    form = read_config(model_dir)
    features, random = model_features(form), np.random.default_rng(3)
    for version in VERSIONS:
        pairs = [
            ImagePair(layer, i, 0.5, *(random.standard_normal(shape).astype(np.float32) * 0.3 for shape in ((3, k), (n, 3))))
            for layer in range(form.num_layers)
            for i, (k, n) in enumerate(features)
        ]
        image = build_image(
            pairs, version=version, base_digest="", dtype="float32", num_layers=form.num_layers, num_slices=len(features)
        )
        write_image(tmp_path / version, image)
    made = Rig(model_dir, tmp_path)
    await made.supervisor.start()
    running = asyncio.create_task(made.supervisor.run())
    yield made
    running.cancel()
    await asyncio.wait([running])
    await made.supervisor.stop()


@pytest.mark.parametrize(
    "error", [RuntimeError("planted"), MemoryError(), AssertionError()], ids=lambda error: type(error).__name__
)
async def test_all_streams_end_unavailable_and_a_new_engine_answers_as_the_old_one_did(
    rig: Rig, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    references = (None, *VERSIONS)
    before = [await rig.ask(f"before {version}", version) for version in references]
    assert len({tuple(ids) for ids in before}) == 3
    run, failing = Runner.run, asyncio.Event()

    def fail_once(self: Runner, plan: Any) -> Any:
        if len(plan.rows) < len(references):
            return run(self, plan)
        monkeypatch.setattr(Runner, "run", run)
        failing.set()
        raise error

    monkeypatch.setattr(Runner, "run", fail_once)
    ended = await asyncio.gather(
        *(rig.ask(f"cut {version}", version, max_tokens=200) for version in references), return_exceptions=True
    )
    assert failing.is_set()
    assert [type(one) for one in ended] == [UnavailableError] * 3

    await until(lambda: rig.supervisor.is_running and rig.prefetcher.num_engines == 2, limit_s=100.0)
    assert [await rig.ask(f"after {version}", version) for version in references] == before
    assert rig.registry.get_sample_value("veneer_engine_starts_total") == 2
    state = await rig.supervisor.state()
    assert {holding.version: holding.place for holding in state.holdings} == dict.fromkeys(VERSIONS, "device")
    assert (state.running, state.waiting, state.kv_pages_used, state.leases) == (0, 0, 0, 0)
