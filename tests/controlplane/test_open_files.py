"""However often the database ends connections, the service has as many files open as before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import grpc
import pytest
import uvloop

from controlplane.settings import Settings
from tests.fixtures.controlplane import Client, World, serve
from tests.fixtures.descriptors import num_open_files
from tests.fixtures.services import TestDatabase
from veneer.controlplane.v1 import catalog_pb2
from veneer.local.postgres import Postgres

_END_ALL = """
    SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
        WHERE datname = current_database() AND application_name LIKE 'veneer-controlplane%'
"""
_CALLS = 20
LOOPS = pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


async def _call(tenant: Client) -> bool:
    """Whether a call was answered; UNAVAILABLE is what it may be instead."""
    try:
        await tenant.catalog.ListAdapters(catalog_pb2.ListAdaptersRequest())
    except grpc.aio.AioRpcError as error:
        if error.code() != grpc.StatusCode.UNAVAILABLE:
            raise
        return False
    return True


async def _idle(world: World, tenant: Client) -> int:
    """Files that are open while the service works, has given up the connections that it has, and made none but for one call."""
    await world.plane.database.renew()
    while not await _call(tenant):
        pass
    await world.plane.database.renew()
    return num_open_files()


async def _comes_down_to(world: World, tenant: Client, before: int) -> None:
    """Waits until no more files are open than before; connections of the service's own jobs come and go."""
    async with asyncio.timeout(30):
        while await _idle(world, tenant) > before:
            pass


@LOOPS
def test_ended_connections_leave_no_file_open(
    settings: Settings, database: TestDatabase, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    def end_all() -> int:
        with database.connect() as connection:
            found = connection.execute(_END_ALL).fetchone()
        return int(found[0]) if found else 0

    async def rounds(tenant: Client, times: int) -> int:
        ended = 0
        for _ in range(times):
            calls = [asyncio.create_task(_call(tenant)) for _ in range(_CALLS)]
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)  # the others are on connections or wait for them
            ended += await asyncio.to_thread(end_all)
            await asyncio.gather(*calls)
        return ended

    async def run() -> None:
        async with aclosing(serve(settings)) as worlds:
            world = await anext(worlds)
            tenant = await world.tenant("acme")
            assert await rounds(tenant, 10) >= 10
            after_ten = await _idle(world, tenant)
            assert await rounds(tenant, 20) >= 20
            await _comes_down_to(world, tenant, after_ten)

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(run())


@pytest.mark.slow
@LOOPS
def test_a_database_that_is_killed_again_and_again_leaves_no_file_open(
    settings: Settings, postgres: Postgres, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def rounds(tenant: Client, times: int) -> None:
        for _ in range(times):
            calls = [asyncio.create_task(_call(tenant)) for _ in range(_CALLS)]
            await asyncio.to_thread(postgres.kill)
            calls += [asyncio.create_task(_call(tenant)) for _ in range(_CALLS)]
            await asyncio.to_thread(postgres.start)
            await asyncio.gather(*calls)

    async def run() -> None:
        async with aclosing(serve(settings)) as worlds:
            world = await anext(worlds)
            tenant = await world.tenant("acme")
            await rounds(tenant, 1)
            after_one = await _idle(world, tenant)
            await rounds(tenant, 4)
            await _comes_down_to(world, tenant, after_one)

    try:
        with asyncio.Runner(loop_factory=make_loop) as runner:
            runner.run(run())
    finally:
        if postgres.process.pid is None:
            postgres.start()  # it is the server of other tests too
