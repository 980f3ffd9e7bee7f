from __future__ import annotations

import asyncio
import contextlib
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from tests.fixtures.adapters import make_adapter_folder
from tests.fixtures.stack import DATA_SETTINGS
from veneer.artifact import BaseDescription
from veneer.client import Client
from veneer.dataplane.v1 import generation_pb2 as pb
from veneer.errors import DeadlineExceededError, FailedPreconditionError, InvalidArgumentError, UnavailableError, VeneerError
from veneer.local.stack import LocalStack
from veneer.local.state import read_state

T = TypeVar("T")

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture
async def client(stack: LocalStack) -> AsyncIterator[Client]:
    async with tenant(stack) as client:
        yield client


def tenant(stack: LocalStack) -> Client:
    return Client(control=stack.state.control, data=stack.state.data, key=stack.state.tenant_key)


async def tokens(client: Client, *, adapter: str = "") -> list[int]:
    """Eight greedy tokens."""
    sampling = pb.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    ids: list[int] = []
    async for event in client.stream_complete("hello", adapter=adapter, sampling=sampling):
        ids += event.ids if isinstance(event, pb.Chunk) else []
    return ids


async def eventually(call: Callable[[], Awaitable[T]]) -> T:
    """The call's answer, tried again while the plane says that it is not there yet."""
    for _ in range(600):
        with contextlib.suppress(UnavailableError, DeadlineExceededError):
            return await call()
        await asyncio.sleep(0.1)  # a process elsewhere comes back
    raise AssertionError("the plane did not come back")


async def test_what_is_published_is_served_seconds_later(client: Client, model_base: BaseDescription, tmp_path: Path) -> None:
    folder = make_adapter_folder(tmp_path / "loud", model_base, scale=4.0)
    published = await client.publish(folder, adapter="loud", base=model_base.digest)
    assert published.alias.name == "stable"
    base, loud = await tokens(client), await tokens(client, adapter="loud")
    assert len(base) == len(loud) == 8
    assert base != loud


async def test_secrets_are_for_the_user_only(stack: LocalStack) -> None:
    assert stat.S_IMODE(stack.folder.stat().st_mode) == 0o700
    for name in ("stack.json", "operator.key", "tenant-acme.key", "node.key", "pepper"):
        assert stat.S_IMODE((stack.folder / name).stat().st_mode) == 0o600, name


async def test_a_second_start_is_refused_and_harms_nothing(stack: LocalStack, client: Client, model_dir: Path) -> None:
    with pytest.raises(FailedPreconditionError, match="runs already"):
        await asyncio.to_thread(LocalStack(stack.folder, model_dir).start)
    assert len(await tokens(client)) == 8


async def test_a_killed_control_plane_comes_back_at_its_address(stack: LocalStack, client: Client) -> None:
    before = stack.control_plane.addresses
    stack.control_plane.kill()
    with pytest.raises(UnavailableError):
        await client.adapters()
    await asyncio.to_thread(stack.control_plane.start)
    assert stack.control_plane.addresses == before
    await eventually(client.adapters)


async def test_a_killed_data_plane_comes_back_at_its_address(stack: LocalStack, client: Client) -> None:
    expected = await tokens(client)
    before = stack.data_plane.addresses
    stack.data_plane.kill()
    with pytest.raises(VeneerError):
        await tokens(client)
    await asyncio.to_thread(stack.data_plane.start)
    assert stack.data_plane.addresses == before
    assert await eventually(lambda: tokens(client)) == expected


async def test_a_stopped_stack_goes_on_where_it_was(tmp_path: Path, model_dir: Path, model_base: BaseDescription) -> None:
    stack = LocalStack(tmp_path / "stack", model_dir, data_settings=DATA_SETTINGS)
    try:
        await asyncio.to_thread(stack.start)
        await asyncio.to_thread(stack.add_tenant, "acme")
        async with tenant(stack) as client:
            await client.publish(make_adapter_folder(tmp_path / "a", model_base), adapter="a", base=model_base.digest)
            before = await tokens(client, adapter="a")
        await asyncio.to_thread(LocalStack(stack.folder).stop)  # as `veneer down` would
        assert read_state(stack.folder) is None
        await asyncio.to_thread(stack.start)
        await asyncio.to_thread(stack.add_tenant, "acme")
        async with tenant(stack) as client:
            assert await tokens(client, adapter="a") == before
    finally:
        await asyncio.to_thread(stack.remove)
    assert not stack.folder.exists()


def test_a_folder_that_is_no_model_is_refused_and_nothing_is_left_running(tmp_path: Path) -> None:
    stack = LocalStack(tmp_path / "stack", tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"config\.json"):
        stack.start()
    assert stack.postgres.process.pid is None


def test_a_plane_that_cannot_start_says_why_and_nothing_is_left_running(tmp_path: Path, model_dir: Path) -> None:
    stack = LocalStack(tmp_path / "stack", model_dir, control_settings={"max_rank": "many"})
    with pytest.raises(UnavailableError, match="VENEER_CONTROLPLANE_MAX_RANK"):
        stack.start()
    assert stack.postgres.process.pid is None
    assert stack.valkey.process.pid is None


def test_a_folder_with_other_things_is_neither_used_nor_removed(tmp_path: Path, model_dir: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(FailedPreconditionError, match="holds other things"):
        LocalStack(tmp_path, model_dir)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
