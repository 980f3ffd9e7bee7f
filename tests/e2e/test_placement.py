"""Two data planes: callers go where their adapter is, and to the other where one is away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.e2e.conftest import Publish, Secrets
from tests.e2e.driving import Stream, aside, generate, greedy, until
from tests.fixtures.stack import DATA_SETTINGS
from veneer.client import Client
from veneer.controlplane.v1 import placement_pb2, placement_pb2_grpc
from veneer.dataplane.v1 import generation_pb2, generation_pb2_grpc
from veneer.errors import UnavailableError
from veneer.local.plane import Plane
from veneer.local.stack import LocalStack
from veneer.operator_client import OperatorClient

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def second(stack: LocalStack, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    """Another data plane of the stack."""
    folder = tmp_path_factory.mktemp("second")
    plane = Plane("dataplane", folder)
    settings = {
        "model_dir": str(model_dir),
        "control_plane": stack.state.control,
        "node_key_file": str(folder / "node.key"),
        "redis_url": stack.valkey.url(),
        "cache_folder": str(folder / "cache"),
        "listen_callers": "127.0.0.1:0",
        "listen_operators": "127.0.0.1:0",
        "listen_metrics": "127.0.0.1:0",
        **DATA_SETTINGS,
    }

    async def let_in() -> str:
        async with stack.operator() as operator:
            return (await operator.create_enrollment_token("second")).token

    plane.configure({**settings, "enrollment_token": asyncio.run(let_in())})
    plane.start()
    yield plane
    plane.stop()


@pytest.fixture
async def both(stack: LocalStack, second: Plane, secrets: Secrets) -> AsyncIterator[Client]:
    """A client that was given both data planes."""
    addresses = f"{stack.state.data},{second.addresses.callers}"
    async with Client(control=stack.state.control, data=addresses, key=secrets.acme, timeout_s=60.0) as client:
        yield client


async def located(client: Client, adapter: str) -> set[str]:
    stub = placement_pb2_grpc.PlacementServiceStub(client._channel("control"))
    response = await client._ask(stub.LocateAdapter, placement_pb2.LocateAdapterRequest(adapter=adapter))
    return set(response.addresses)


async def test_what_is_asked_for_is_located_and_staged_where_nobody_asked(
    stack: LocalStack, second: Plane, both: Client, operator: OperatorClient, secrets: Secrets, publish: Publish
) -> None:
    published = await publish(both, "A")
    adapter, version = published.version.adapter, published.version.digest
    async with Client(control=stack.state.control, data=second.addresses.callers, key=secrets.acme) as only_second:
        for _ in range(3):
            assert "A" in (await generate(only_second, adapter)).text
        await operator.unload(version)

        async def is_located() -> bool:
            # One home is enough for a small part of all traffic, and what other tests asked for counts for minutes.
            assert "A" in (await generate(only_second, adapter)).text
            return second.addresses.callers in await located(both, adapter)

        async def is_staged() -> bool:
            assert "A" in (await generate(only_second, adapter)).text
            return version in {held.version for held in (await operator.residency()).versions}

        await until(is_located)
        await until(is_staged)
    assert "A" in (await generate(both, adapter)).text


async def test_a_data_plane_that_is_told_to_stop_costs_no_request_that_another_can_answer(
    stack: LocalStack, second: Plane, both: Client, secrets: Secrets, publish: Publish
) -> None:
    adapter = (await publish(both, "C")).version.adapter
    codes, address = Counter[str](), second.addresses.callers

    async def call_it_alone() -> None:
        """Calls that nothing repeats, until the data plane has gone."""
        metadata = (("authorization", f"Bearer {secrets.acme}"),)
        async with grpc.aio.insecure_channel(address, options=(("grpc.enable_retries", 0),)) as channel:
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
            while "UNAVAILABLE" not in codes or not stopping.done():
                call = stub.Generate(generation_pb2.GenerateRequest(text="hi", sampling=greedy(2)), metadata=metadata, timeout=60)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    async for _ in call:
                        pass
                codes[(await call.code()).name] += 1

    async def ask_both() -> None:
        while not stopping.done():
            assert "C" in (await generate(both, adapter)).text
            await generate(both, "")

    async with Client(data=address, key=secrets.acme) as only_second:
        running = Stream(only_second, adapter, max_tokens=64)
        await running.first()
        waiting = [asyncio.create_task(generate(both, name)) for _ in range(32) for name in (adapter, "")]
        begun = Stream(both, adapter, max_tokens=8)
        await begun.first()
        stopping = asyncio.create_task(aside(second.stop))
        asking = [asyncio.create_task(one) for one in (*(ask_both() for _ in range(8)), *(call_it_alone() for _ in range(4)))]
        await asyncio.gather(*waiting, *asking)
        await stopping
        answer = await running.read()
    assert set(codes) <= {"OK", "UNAVAILABLE"}
    # A busy machine may need longer than the grace.
    assert answer.error is None or (isinstance(answer.error, UnavailableError) and answer.num_tokens)
    assert (await begun.read()).num_tokens
    await aside(second.start)


async def test_a_killed_data_plane_costs_no_request_that_had_not_begun(
    stack: LocalStack, second: Plane, both: Client, publish: Publish
) -> None:
    adapter = (await publish(both, "B")).version.adapter
    for _ in range(3):
        await generate(both, adapter)
    assert second.process.pid is not None
    os.kill(second.process.pid, signal.SIGKILL)
    for _ in range(6):
        assert "B" in (await generate(both, adapter)).text
    await aside(second.stop)

    async def is_elsewhere() -> bool:
        return await located(both, adapter) == {stack.state.data}

    await until(is_elsewhere)
