"""Veneer's engine in a process of its own, as a data plane has it, behind its own client: no network, no text."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from benchmarks.contenders.process import Setup
from benchmarks.workload import AdapterKey, Run, Workload
from dataplane.engine.client import EngineClient
from dataplane.engine.config import EngineConfig
from dataplane.engine.messages import Moved, Sampling, Submit
from dataplane.folding import image_pairs
from dataplane.lora.image import Image, build_image
from dataplane.lora.image_file import write_image
from veneer.artifact import BaseWeights, check, describe_base


def engine_config(setup: Setup) -> EngineConfig:
    """Settings under which nothing but compute limits the engine; options named like a setting win."""
    rows = -(-setup.max_rank // 16) * 16 * max(1, setup.max_adapters)
    settings: dict[str, Any] = {
        "max_sequences": setup.streams,
        "max_step_tokens": 2048,
        "max_context": setup.context,
        "kv_bytes": 1 << 30,
        "arena_bytes": (1 << 30) if setup.max_adapters else 0,
        "max_slots": max(1, setup.max_adapters),
        "max_rank": max(64, setup.max_rank),
        "max_step_rank_rows": max(1024, rows),
        **setup.options,
    }
    return EngineConfig(model_dir=setup.model, **settings)


class Images:
    """Adapter folders as images: checked, read and laid out by what the data plane does it with."""

    def __init__(self, setup: Setup, *, dtype: str) -> None:
        self._setup, self._dtype = setup, dtype
        self._base, self._base_weights = describe_base(Path(setup.model)), BaseWeights(Path(setup.model))

    def image(self, key: AdapterKey) -> Image:
        """Makes an adapter's image; its version is a digest of the name."""
        source = Path(self._setup.adapters) / key.name
        weights = source / "adapter_model.safetensors"
        artifact = check((source / "adapter_config.json").read_bytes(), weights, self._base)
        return build_image(
            image_pairs(artifact, weights, base=self._base, base_weights=self._base_weights),
            version=hashlib.sha256(key.name.encode()).hexdigest(),
            base_digest=self._base.digest,
            dtype=self._dtype,
            num_layers=self._base.num_layers,
            num_slices=len(self._base.modules),
        )


class Veneer:
    """The engine's client and its streams. Its runs say in `extra` where the step loop's time went, in seconds by part.

    Attributes:
        loads_s: Seconds that each load of an adapter took, for a MiB.
    """

    _in_process = False

    def __init__(self, setup: Setup) -> None:
        config = engine_config(setup)
        self._loop = asyncio.Runner()
        self._client = self._loop.run(EngineClient.start(config, in_process=self._in_process))
        self._images = Images(setup, dtype=config.dtype)
        self._folder = tempfile.TemporaryDirectory(prefix="veneer-bench-")
        self._versions: dict[AdapterKey | None, str | None] = {None: None}
        self._mib: dict[str, float] = {}
        self._runs = 0
        self.loads_s: list[float] = []
        self._client.on_moved = self._moved
        self.settings = {**dataclasses.asdict(config), "plan": list(self._client.ready.plan)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._client.stop())
        self._loop.close()
        self._folder.cleanup()

    def run(self, workload: Workload) -> Run:
        """See `Contender`."""
        return self._loop.run(self._run(workload))

    async def _run(self, workload: Workload) -> Run:
        self._runs += 1
        versions = [self._version(key) for key in workload.adapter_keys()]
        submits = [
            Submit(
                request_id=f"{self._runs}-{index}",
                tenant="bench",
                prompt=tuple(prompt),
                sampling=Sampling(max_tokens=workload.output_tokens, temperature=0.0),
                version=version,
                cache_salt=f"{self._runs:x}",  # every run computes its prompts anew
            )
            for index, (prompt, version) in enumerate(zip(workload.prompts(), versions, strict=True))
        ]
        before = await self._parts()
        start = time.perf_counter()
        streams = await asyncio.gather(*map(self._stream, submits))
        seconds = time.perf_counter() - start
        run = timed(streams, start=start, seconds=seconds, workload=workload)
        run.extra.update({part: after - before.get(part, 0.0) for part, after in (await self._parts()).items()})
        return run

    def _version(self, key: AdapterKey | None) -> str | None:
        """Returns an adapter's version; the first time its image is made and the engine told."""
        if key is not None and key not in self._versions:
            image = self._images.image(key)
            path = Path(self._folder.name) / f"{image.version}.image"
            write_image(path, image)
            self._mib[image.version] = path.stat().st_size / (1 << 20)
            self._client.stage(image.version, path)
            self._versions[key] = image.version
        return self._versions[key]

    def _moved(self, moved: Moved) -> None:
        if moved.place == "device":
            self.loads_s.append(moved.seconds / self._mib[moved.version])

    async def _parts(self) -> dict[str, float]:
        return dict((await self._client.state()).seconds)

    async def _stream(self, submit: Submit) -> list[tuple[float, tuple[int, ...]]]:
        return [(time.perf_counter(), delta.ids) async for delta in self._client.submit(submit) if delta.ids]


def timed(streams: list[list[tuple[float, tuple[int, ...]]]], *, start: float, seconds: float, workload: Workload) -> Run:
    """Makes a run of what came in each stream, and when; tokens that came together have no time between them."""
    ids = [[token for _, tokens in stream for token in tokens] for stream in streams]
    assert {len(one) for one in ids} == {workload.output_tokens}, "every stream has all its tokens"
    gaps: list[float] = []
    for stream in streams:
        times = [moment for moment, tokens in stream for _ in tokens]
        gaps += [later - earlier for earlier, later in itertools.pairwise(times)]
    return Run(seconds, ids, [stream[0][0] - start for stream in streams], gaps)
