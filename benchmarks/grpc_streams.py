"""The same workload as gRPC streams: a whole local stack, and the client in a process of its own.

`python -m benchmarks.grpc_streams --data HOST:PORT` (key in VENEER_API_KEY) is that client: it answers lines of JSON like
`benchmarks.contenders`.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.bare import Timing
from benchmarks.workload import Workload
from dataplane.engine.config import EngineConfig
from veneer.client import Client
from veneer.dataplane.v1 import generation_pb2
from veneer.local.stack import LocalStack

_SHARED = (
    "dtype", "max_sequences", "max_step_tokens", "page_size", "kv_bytes", "arena_bytes", "max_step_rank_rows", "max_context",
)  # fmt: skip


class GrpcStreams:
    """Both planes with an engine of the given settings, and a client process. An asynchronous context manager."""

    def __init__(self, model: Path, config: EngineConfig) -> None:
        self._model = model
        self._settings = {name: str(getattr(config, name)) for name in _SHARED}

    async def __aenter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="veneer-bench-")
        self._stack = LocalStack(Path(self._folder.name), self._model, data_settings=self._settings)
        await asyncio.to_thread(self._stack.start)
        state = await asyncio.to_thread(self._stack.add_tenant, "bench")
        self._client = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.grpc_streams", "--data", state.data,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "VENEER_API_KEY": state.tenant_key or ""},
        )  # fmt: skip
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._client.stdin is not None
        self._client.stdin.close()
        await self._client.wait()
        await asyncio.to_thread(self._stack.stop)
        self._folder.cleanup()

    async def run(self, workload: Workload) -> tuple[Timing, float]:
        """Generates all tokens once; returns the timing and the mean number of tokens in a message."""
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        self._client.stdin.write(json.dumps(dataclasses.asdict(workload)).encode() + b"\n")
        line = await self._client.stdout.readline()
        if not line:
            raise RuntimeError(f"the client ended with status {await self._client.wait()}")
        timing, per_message = json.loads(line)
        return Timing(**timing), per_message


async def _stream(client: Client, workload: Workload, ids: list[int], *, salt: bytes) -> tuple[float, int]:
    """Returns when the first token came, and the number of messages that carried tokens."""
    sampling = generation_pb2.SamplingParams(max_tokens=workload.output_tokens, temperature=0.0, ignore_eos=True)
    count, messages, first = 0, 0, 0.0
    async for event in client.generate(ids, sampling=sampling, cache_salt=salt):
        if isinstance(event, generation_pb2.Chunk) and event.ids:
            first = first or time.perf_counter()
            count += len(event.ids)
            messages += 1
    assert count == workload.output_tokens, f"{count} tokens of {workload.output_tokens}"
    return first, messages


async def _run(client: Client, workload: Workload) -> tuple[Timing, float]:
    start = time.perf_counter()
    salt = secrets.token_bytes(16)  # every run computes its prompts anew
    results = await asyncio.gather(*(_stream(client, workload, ids, salt=salt) for ids in workload.prompts()))
    total = time.perf_counter() - start
    prefill = max(first for first, _ in results) - start
    tokens = workload.streams * workload.output_tokens
    timing = Timing(tokens / total, prefill, (total - prefill) / max(1, workload.output_tokens - 1))
    return timing, tokens / sum(messages for _, messages in results)


async def _serve(address: str, key: str) -> None:
    async with Client(data=address, key=key) as client:
        while line := await asyncio.to_thread(sys.stdin.readline):
            timing, per_message = await _run(client, Workload(**json.loads(line)))
            print(json.dumps([dataclasses.asdict(timing), per_message]), flush=True)


def main() -> None:
    """Entry point of the client process."""
    parser = argparse.ArgumentParser(description="Streams workloads that come on standard input.")
    parser.add_argument("--data", required=True, help="address of the data plane")
    asyncio.run(_serve(parser.parse_args().data, os.environ["VENEER_API_KEY"]))


if __name__ == "__main__":
    main()
