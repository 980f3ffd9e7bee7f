"""Veneer whole: both planes on this machine, and this process the client of their gRPC streams."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from pathlib import Path
from typing import Self

import psutil

from benchmarks.contenders.process import Setup
from benchmarks.contenders.veneer import engine_config, timed
from benchmarks.workload import Run, Workload
from veneer.client import Client
from veneer.dataplane.v1 import generation_pb2
from veneer.local.stack import LocalStack

_SHARED = (
    "dtype", "max_sequences", "max_step_tokens", "page_size", "kv_bytes", "arena_bytes", "max_step_rank_rows", "max_context",
)  # fmt: skip
"""Settings that engine and data plane name alike."""


class Streams:
    """A stack of its own, and streams of the base.

    Its runs say in `extra`: tokens_per_message, the mean; streaming_cpu_ms, processor time a token of the serving process and of
    this one; engine_cpu_ms, of the engine's process.
    """

    def __init__(self, setup: Setup) -> None:
        config = engine_config(setup)
        self.settings = {name: str(getattr(config, name)) for name in _SHARED}
        self._folder = tempfile.TemporaryDirectory(prefix="veneer-bench-")
        self._stack = LocalStack(Path(self._folder.name), Path(setup.model), data_settings=self.settings)
        self._stack.start()
        state = self._stack.add_tenant("bench")
        pid = self._stack.data_plane.process.pid
        assert pid is not None, "it has started"
        self._serving = psutil.Process(pid)
        self._engine = next(child for child in self._serving.children() if "dataplane.engine" in child.cmdline())
        self._loop = asyncio.Runner()
        self._client = self._loop.run(self._connect(state.data, state.tenant_key or ""))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._client.close())
        self._loop.close()
        self._stack.stop()
        self._folder.cleanup()

    async def _connect(self, address: str, key: str) -> Client:
        return Client(data=address, key=key)

    def run(self, workload: Workload) -> Run:
        """See `Contender`."""
        before = self._cpu_s()
        run, messages = self._loop.run(self._run(workload))
        streaming, engine = (after - earlier for earlier, after in zip(before, self._cpu_s(), strict=True))
        tokens = workload.streams * workload.output_tokens
        run.extra.update(
            tokens_per_message=tokens / messages, streaming_cpu_ms=streaming * 1e3 / tokens, engine_cpu_ms=engine * 1e3 / tokens
        )
        return run

    def _cpu_s(self) -> tuple[float, float]:
        serving, engine = (sum(process.cpu_times()[:2]) for process in (self._serving, self._engine))
        return serving + time.process_time(), engine

    async def _run(self, workload: Workload) -> tuple[Run, int]:
        salt = secrets.token_bytes(16)  # every run computes its prompts anew
        sampling = generation_pb2.SamplingParams(max_tokens=workload.output_tokens, temperature=0.0, ignore_eos=True)
        prompts = workload.prompts()
        start = time.perf_counter()
        streams = await asyncio.gather(*(self._stream(prompt, sampling, salt) for prompt in prompts))
        seconds = time.perf_counter() - start
        return timed(streams, start=start, seconds=seconds, workload=workload), sum(map(len, streams))

    async def _stream(
        self, prompt: list[int], sampling: generation_pb2.SamplingParams, salt: bytes
    ) -> list[tuple[float, tuple[int, ...]]]:
        return [
            (time.perf_counter(), tuple(event.ids))
            async for event in self._client.generate(prompt, sampling=sampling, cache_salt=salt)
            if isinstance(event, generation_pb2.Chunk) and event.ids
        ]
