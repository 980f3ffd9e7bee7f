"""The ledger counts each report once, takes none of what its node was not told of, and shows a tenant its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from dataplane.usage import UseCounts, UseKey
from dataplane.usage_reports import UsageReporter
from tests.controlplane.using import DAY_S, NOON_S, listed, node_client, use_of
from tests.fixtures.controlplane import CALLER, World, refused
from veneer.controlplane.v1 import nodes_pb2, tenants_pb2
from veneer.errors import PermissionDeniedError


async def test_a_report_that_comes_twice_or_out_of_turn_counts_once(world: World) -> None:
    await world.base()
    acme, node = await world.tenant("acme"), await world.node()
    await world.publish(acme)
    async with node_client(world, node) as client:
        use = await use_of(client, acme)
    entry = nodes_pb2.UsageEntry(
        tenant="acme", owner="acme", adapter="style", version=use.version, ticket=bytes.fromhex(use.ticket),
        hour=Timestamp(seconds=NOON_S), requests=3, failed_requests=1, prompt_tokens=30, cached_tokens=12, output_tokens=9,
    )  # fmt: skip

    async def report(first: int, last: int, journal: str = "a" * 32) -> int:
        request = nodes_pb2.ReportUsageRequest(journal=journal, first_sequence=first, last_sequence=last, entries=[entry])
        return int((await node.nodes.ReportUsage(request)).last_sequence)

    assert await asyncio.gather(*(report(1, 3) for _ in range(5))) == [3] * 5
    assert [await report(*which) for which in ((1, 3), (2, 5), (5, 7), (4, 6), (4, 6), (1, 3))] == [3, 3, 3, 6, 6, 6]
    assert await report(1, 3, "b" * 32) == 3
    (usage,) = await listed(acme)
    assert (usage.requests, usage.failed_requests, usage.output_tokens) == (9, 3, 27)
    assert (usage.prompt_tokens, usage.cached_tokens) == (90, 36)


async def test_a_node_reports_of_nothing_that_it_was_not_told_of(world: World) -> None:
    await world.base()
    acme, rival = await world.tenant("acme"), await world.tenant("rival")
    node, other = await world.node("one"), await world.node("other")
    await world.publish(acme)
    async with node_client(world, node) as client, node_client(world, other) as foreign:
        use = await use_of(client, acme)
        key = UseKey(*use[:5], hour=NOON_S)
        base_ticket = (await use_of(client, rival, "")).ticket
        wrong = [
            (foreign, key),
            (client, key._replace(tenant="rival")),
            (client, key._replace(tenant="rival", ticket=base_ticket)),
            (client, key._replace(version="0" * 64)),
            (client, key._replace(ticket="")),
        ]
        for who, one in wrong:
            with pytest.raises(PermissionDeniedError):
                await who.reports.usage("a" * 32, 1, 1, {key._replace(hour=0): UseCounts(1), one: UseCounts(1)})
    assert await listed(acme) == await listed(rival) == []


async def test_usage_is_read_by_adapter_and_hour_or_day_in_pages_by_its_tenant_alone(world: World, tmp_path: Path) -> None:
    await world.base()
    acme, rival, node = await world.tenant("acme"), await world.tenant("rival"), await world.node()
    await world.publish(acme)
    await world.publish(acme, "other", seed=1)
    async with node_client(world, node) as client:
        reporter = UsageReporter(tmp_path, client.reports.usage)
        for hour in range(3):
            for adapter in ("style", "other", ""):
                reporter.add(await use_of(client, acme, adapter, unix_s=NOON_S + hour * 3600 + 5))
        reporter.add(await use_of(client, acme, unix_s=NOON_S - DAY_S))
        reporter.add(await use_of(client, acme, unix_s=4_000_000_000))  # a clock that is wrong
        await reporter.send()
        await reporter.close()
    by_day = await listed(acme)
    assert [(one.adapter, one.requests) for one in by_day[1:]] == [("", 3), ("other", 3), ("style", 3), ("style", 1)]
    assert by_day[0].start_time.seconds < 4_000_000_000 - DAY_S
    assert by_day[1].start_time.seconds == NOON_S // DAY_S * DAY_S

    hours = {"period": tenants_pb2.USAGE_PERIOD_HOUR}
    paged, token = [], ""
    while not paged or token:
        request = tenants_pb2.ListUsageRequest(page_size=2, page_token=token, **hours)
        response = await acme.tenants.ListUsage(request)
        paged += response.usage
        token = response.next_page_token
    assert paged == await listed(acme, **hours)
    assert len(paged) == 11
    assert [one.start_time.seconds for one in paged[1:4]] == [NOON_S + 2 * 3600] * 3
    assert len(await listed(acme, start_time=Timestamp(seconds=NOON_S - 3600))) == 4

    assert await listed(rival) == []
    assert (await refused(rival.tenants.ListUsage(tenants_pb2.ListUsageRequest(tenant="acme"))))[0] == grpc.StatusCode.NOT_FOUND
    operated = await world.operator.tenants.ListUsage(tenants_pb2.ListUsageRequest(tenant="acme"))
    assert list(operated.usage) == by_day
    caller = await world.key("acme", CALLER)
    code, _ = await refused(caller.tenants.ListUsage(tenants_pb2.ListUsageRequest()))
    assert code == grpc.StatusCode.PERMISSION_DENIED
