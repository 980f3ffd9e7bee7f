"""A version whose products overflow: its own request ends, its neighbours do not notice, and it is reported."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry
from safetensors.torch import save_file

from dataplane.engine.client import EngineClient
from dataplane.engine.config import EngineConfig
from dataplane.engine.messages import Sampling, Submit
from dataplane.engine.runner import model_features
from dataplane.lora.image import ImagePair, build_image
from dataplane.lora.image_file import write_image
from dataplane.metrics import Metrics
from dataplane.model.config import parse_config
from dataplane.model.decoder import weight_shapes
from dataplane.supervision import EngineSupervisor
from tests.dataplane.doubles import VERSION
from tests.dataplane.engine.conftest import FIELDS
from veneer.errors import InternalError


class Events:
    """Hears of adapters and does nothing."""

    def want(self, version: str) -> None:
        pass

    def moved(self, version: str, place: str, *, seconds: float, reason: str) -> None:
        pass

    def meet_engine(self) -> None:
        pass

    def unloaded(self, event: object) -> None:
        pass

    def forget_engine(self) -> None:
        pass


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    generator = torch.Generator().manual_seed(1)
    shapes = weight_shapes(parse_config(FIELDS))
    weights = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path


def write_overflowing(path: Path) -> None:
    """An image of finite values whose products are not."""
    config = parse_config(FIELDS)
    features = model_features(config)[6]
    a, b = np.full((1, features[0]), 1e30, np.float32), np.full((features[1], 1), 1e30, np.float32)
    pairs = [ImagePair(layer, 6, 1.0, a, b) for layer in range(config.num_layers)]
    image = build_image(pairs, version=VERSION, base_digest="base", dtype="float32", num_layers=config.num_layers, num_slices=7)
    write_image(path, image)


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0}, {"logprobs": 2, "frequency_penalty": 0.5}, {"prompt_logprobs": 1}])
async def test_the_version_is_reported_and_only_its_request_ends(model_dir: Path, fields: dict[str, float]) -> None:
    reported: asyncio.Queue[str] = asyncio.Queue()
    registry = CollectorRegistry()
    config = EngineConfig(
        model_dir=str(model_dir), dtype="float32", num_threads=1, max_sequences=4, max_step_tokens=32, kv_bytes=1 << 20,
        arena_bytes=1 << 20, arena_unit_bytes=4096, max_slots=2, max_step_rank_rows=64,
    )  # fmt: skip
    supervisor = EngineSupervisor(
        lambda: EngineClient.start(config, in_process=True),
        metrics=Metrics(registry, base_name="tiny"),
        report_not_finite=reported.put,
    )
    supervisor.attach(Events())
    await supervisor.start()
    write_overflowing(model_dir / "image")
    supervisor.stage(VERSION, str(model_dir / "image"))

    async def run(name: str, version: str | None) -> list[int]:
        sampling = Sampling(**({"max_tokens": 9, "temperature": 0.0} | (fields if version else {})))
        submit = Submit(request_id=name, tenant="t", prompt=(5, 6, 7), sampling=sampling, version=version)
        return [id_ for delta in [delta async for delta in supervisor.submit(submit)] for id_ in delta.ids]

    alone = await run("alone", None)
    bad, good = await asyncio.gather(run("bad", VERSION), run("good", None), return_exceptions=True)
    assert isinstance(bad, InternalError)
    assert good == alone
    async with asyncio.timeout(60):
        assert await reported.get() == VERSION
    assert reported.empty()
    assert registry.get_sample_value("veneer_not_finite_total") == 1
    state = await supervisor.state()
    assert (state.running, state.kv_pages_used, state.leases) == (0, 0, 0)
    await supervisor.stop()
