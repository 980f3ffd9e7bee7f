"""Quotas are one number in all: three data planes' own keepers lease from a real control plane, and lose it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest

from dataplane.catalog_client import CatalogClient, open_channel
from dataplane.quotas import Demand, Leased, QuotaExceededError, Quotas
from dataplane.resolution import Caller, Target
from dataplane.resolve_cache import Key
from tests.fixtures.controlplane import BASE_DIGEST, Client, World, adapter_files, refused, serve, settings_for
from tests.fixtures.services import TestDatabase
from veneer.controlplane.v1 import catalog_pb2, nodes_pb2, tenants_pb2
from veneer.errors import UnavailableError


class Clock:
    """Seconds that the test counts: a minute lasts as long as the test."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Replica:
    """What a data plane has of quotas, with a line to the control plane that can be cut."""

    def __init__(self, client: CatalogClient, key_digest: bytes, clock: Clock) -> None:
        self._client = client
        self._key = Key(key_digest, Target())
        self.is_cut = False
        self.loses_answers = False
        self.quotas = Quotas(self._lease, hard_age_s=60.0, clock=clock)
        self.caller: Caller
        self.num_admitted = 0
        self.num_asked = 0

    async def learn(self) -> None:
        self.caller = (await self._client.resolve(self._key)).caller

    async def renew(self) -> None:
        await self.quotas.renew("acme")

    async def ask(self, num: int, streams: int = 1) -> list[QuotaExceededError]:
        """Sends requests, one after the other; returns the refusals."""
        refusals = []
        for _ in range(num):
            try:
                async with self.quotas.admitted(self.caller, streams):
                    self.num_admitted += 1
            except QuotaExceededError as error:
                refusals.append(error)
        return refusals

    async def _lease(self, demands: Sequence[Demand]) -> Leased:
        self.num_asked += 1
        if self.is_cut:
            raise UnavailableError("cut")
        leased = await self._client.lease_quotas(demands)
        if self.loses_answers:
            raise UnavailableError("lost")
        return leased


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():  # noqa: ASYNC110  shares follow use from one renewal to the next
            await asyncio.sleep(0)


@asynccontextmanager
async def replicas(world: World, tenant: Client, num: int, clock: Clock) -> AsyncIterator[list[Replica]]:
    assert world.plane.server.addresses is not None
    made = []
    async with AsyncExitStack() as stack:
        for number in range(num):
            channel = await stack.enter_async_context(open_channel(world.plane.server.addresses.callers, ca_pem=None))
            client = CatalogClient(channel, base_digest=BASE_DIGEST, timeout_s=60)
            client._secret = (await world.node(f"node-{number}")).secret
            replica = Replica(client, tenant.digest, clock)
            await replica.learn()
            task = asyncio.create_task(replica.quotas.run())
            stack.callback(task.cancel)
            made.append(replica)
        yield made


@pytest.fixture
async def quick(database: TestDatabase, pepper_file: Path, tmp_path: Path) -> AsyncIterator[World]:
    """A control plane whose leases last as long as a test: they end when it says."""
    async for world in serve(settings_for(database, pepper_file, tmp_path, quota_lease_s=60.0)):
        await world.base()
        yield world


async def test_three_replicas_together_never_exceed_the_quota_and_use_all_of_it(quick: World) -> None:
    tenant = await quick.tenant("acme", quotas=tenants_pb2.TenantQuotas(max_requests_per_minute=60))
    async with replicas(quick, tenant, 3, Clock()) as all_three:
        one, two, three = all_three
        await asyncio.gather(one.ask(5), two.ask(5), three.ask(5))
        assert [replica.num_admitted for replica in all_three] == [5, 5, 5]

        async def used_up() -> bool:  # by one replica now, whose share follows its use
            await one.ask(1)
            for replica in all_three:
                await replica.renew()
            assert sum(replica.num_admitted for replica in all_three) <= 60
            return one.num_admitted == 50

        await until(used_up)
        refusals = [
            refusal for refused in await asyncio.gather(*(replica.ask(30) for replica in all_three)) for refusal in refused
        ]
        assert len(refusals) == 90
        assert sum(replica.num_admitted for replica in all_three) == 60


async def test_a_replica_that_is_cut_off_adds_at_most_its_last_share(quick: World, database: TestDatabase) -> None:
    tenant = await quick.tenant("acme", quotas=tenants_pb2.TenantQuotas(max_requests_per_minute=60))
    clock = Clock()
    async with replicas(quick, tenant, 3, clock) as all_three:
        one, two, three = all_three
        await asyncio.gather(*(replica.ask(1) for replica in all_three))
        three.is_cut = True
        kept = three.quotas.share("acme")["requests"]
        with database.connect() as connection:
            connection.execute("UPDATE quota_leases SET end_time = now() FROM nodes WHERE node = nodes.id AND name = 'node-2'")

        async def all_is_used() -> bool:
            await asyncio.gather(*(replica.ask(10) for replica in all_three))
            await asyncio.gather(one.renew(), two.renew())
            return one.num_admitted + two.num_admitted == 60

        await until(all_is_used)  # the lost lease has ended, and others have its part
        await asyncio.gather(*(replica.ask(100) for replica in all_three))
        overshoot = sum(replica.num_admitted for replica in all_three) - 60
        assert three.quotas.share("acme")["requests"] == kept
        assert overshoot == three.num_admitted == kept
        assert 0 < kept < 60

        clock.now_s += 61  # beyond the hard age there is no share at all
        with pytest.raises(UnavailableError, match="quotas"):
            await three.ask(1)
        three.is_cut = False

        async def is_back() -> bool:  # as soon as the others have said that their minute is over
            clock.now_s += 1
            await asyncio.gather(one.renew(), two.renew())
            await three.ask(1)
            return three.num_admitted > kept

        await until(is_back)


async def test_answers_that_are_lost_give_nothing_away_twice(quick: World) -> None:
    tenant = await quick.tenant("acme", quotas=tenants_pb2.TenantQuotas(max_requests_per_minute=40))
    async with replicas(quick, tenant, 2, Clock()) as (one, two):
        await asyncio.gather(one.ask(1), two.ask(1))
        one.loses_answers = True
        for _ in range(5):
            await asyncio.gather(one.ask(10), two.ask(10))
            await asyncio.gather(one.renew(), two.renew())
            assert one.num_admitted + two.num_admitted <= 40
        one.loses_answers = False
        await until(lambda: _done(one, two, total=40))


async def _done(*all_of_them: Replica, total: int) -> bool:
    await asyncio.gather(*(replica.ask(10) for replica in all_of_them))
    await asyncio.gather(*(replica.renew() for replica in all_of_them))
    num_admitted = sum(replica.num_admitted for replica in all_of_them)
    assert num_admitted <= total
    return num_admitted == total


async def test_a_refusal_names_the_quota_and_when_there_is_room_again(quick: World) -> None:
    tenant = await quick.tenant("acme", quotas=tenants_pb2.TenantQuotas(max_requests_per_minute=2))
    async with replicas(quick, tenant, 1, Clock()) as (one,):
        (refusal,) = await one.ask(3)
        assert "quota max_requests_per_minute: 2 requests in all, of which this data plane may admit 2" in refusal.message
        assert refusal.violations[0].field == "quotas.max_requests_per_minute"
        assert refusal.retry_after_s == 61
        asked = one.num_asked
        await one.ask(100)
        assert one.num_asked == asked  # what is known to be used up is not asked for again and again


async def test_streams_are_counted_while_they_run_and_tokens_as_the_most_that_may_come(quick: World) -> None:
    quotas = tenants_pb2.TenantQuotas(max_streams=3, max_tokens_per_minute=1000)
    tenant = await quick.tenant("acme", quotas=quotas)
    async with replicas(quick, tenant, 1, Clock()) as (one,):
        async with one.quotas.admitted(one.caller, 2) as first:
            await first.reserve(prompt=100, output=500)
            (refusal,) = await one.ask(1, streams=2)
            assert "max_streams" in refusal.message
            async with one.quotas.admitted(one.caller, 1) as second:
                with pytest.raises(QuotaExceededError, match="max_tokens_per_minute"):
                    await second.reserve(prompt=1, output=400)
                await second.reserve(prompt=1, output=399)
            first.saw(10)
        (refusal,) = await one.ask(1, streams=4)
        assert refusal.retry_after_s is None  # it can never be
        async with one.quotas.admitted(one.caller, 3) as third:
            await third.reserve(prompt=0, output=890)  # 110 of the minute were used
            with pytest.raises(QuotaExceededError, match="used"):
                await third.reserve(prompt=0, output=1)


async def test_a_quota_that_is_raised_or_lifted_is_followed(quick: World) -> None:
    tenant = await quick.tenant("acme", quotas=tenants_pb2.TenantQuotas(max_requests_per_minute=1))
    async with replicas(quick, tenant, 1, Clock()) as (one,):
        assert len(await one.ask(2)) == 1
        for quotas in (tenants_pb2.TenantQuotas(max_requests_per_minute=3), tenants_pb2.TenantQuotas()):
            await quick.operator.tenants.SetTenantQuotas(tenants_pb2.SetTenantQuotasRequest(tenant="acme", quotas=quotas))

            async def admits() -> bool:
                await one.learn()
                await one.renew()
                return not await one.ask(1)

            await until(admits)
        assert await one.ask(50) == []


async def test_a_node_that_was_not_told_of_a_tenant_leases_nothing(quick: World) -> None:
    tenant = await quick.tenant("acme", quotas=tenants_pb2.TenantQuotas(max_requests_per_minute=9))
    one, other = await quick.node("one"), await quick.node("other")
    resolve = nodes_pb2.ResolveRequest(key_digest=tenant.digest, target=nodes_pb2.AdapterTarget(), base_digest=BASE_DIGEST)
    ticket = (await one.nodes.Resolve(resolve)).caller.ticket
    wanted = nodes_pb2.QuotaAmounts(requests=9)
    right = nodes_pb2.LeaseQuotasRequest(demands=[nodes_pb2.QuotaDemand(tenant="acme", ticket=ticket, wanted=wanted)])
    for node, request in (
        (other, right),
        (one, nodes_pb2.LeaseQuotasRequest(demands=[nodes_pb2.QuotaDemand(tenant="acme", wanted=wanted)])),
        (one, nodes_pb2.LeaseQuotasRequest(demands=[nodes_pb2.QuotaDemand(tenant="beta", ticket=ticket, wanted=wanted)])),
    ):
        code, text = await refused(node.nodes.LeaseQuotas(request))
        assert (code, text) == (grpc.StatusCode.PERMISSION_DENIED, "the node was not told of this tenant")
    assert (await one.nodes.LeaseQuotas(right)).leases[0].share.requests == 9


async def test_adapters_and_bytes_beyond_the_quota_are_not_published(world: World) -> None:
    await world.base()
    size = sum(len(part) for part in (adapter_files(0).config, adapter_files(0).weights))
    acme = await world.tenant("acme", quotas=tenants_pb2.TenantQuotas(max_adapters=1, max_stored_bytes=2 * size + 40))
    await world.publish(acme, seed=1, request_id="first")
    code, text = await refused(world.publish(acme, "other", seed=2))
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max_adapters: the tenant has 1 adapters, at most 1" in text
    second = (await world.publish(acme, seed=2)).version.digest
    code, text = await refused(world.publish(acme, seed=3))
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max_stored_bytes" in text

    await world.publish(acme, seed=1, request_id="first")  # what was done is answered
    await acme.catalog.RetireVersion(catalog_pb2.RetireVersionRequest(adapter="style", version=second))
    await acme.catalog.DeleteVersion(catalog_pb2.DeleteVersionRequest(adapter="style", version=second))
    await world.publish(acme, seed=3)


async def test_of_publishes_at_once_no_more_go_through_than_the_quota_allows(world: World) -> None:
    await world.base()
    acme = await world.tenant("acme", quotas=tenants_pb2.TenantQuotas(max_adapters=2))
    calls = [world.publish(acme, f"style-{number}", seed=number) for number in range(4)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    lost = [one.code() for one in results if isinstance(one, grpc.aio.AioRpcError)]
    assert lost == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2


async def test_quotas_are_set_by_operators_replaced_whole_and_audited(world: World) -> None:
    owner = await world.tenant("acme", quotas=tenants_pb2.TenantQuotas(max_streams=4))
    quotas = tenants_pb2.TenantQuotas(max_tokens_per_minute=1 << 33)
    request = tenants_pb2.SetTenantQuotasRequest(tenant="acme", quotas=quotas)
    assert (await world.operator.tenants.SetTenantQuotas(request)).tenant.quotas == quotas
    assert (await world.operator.tenants.ListTenants(tenants_pb2.ListTenantsRequest())).tenants[0].quotas == quotas
    code, _ = await refused(owner.tenants.SetTenantQuotas(request))
    assert code == grpc.StatusCode.PERMISSION_DENIED
    code, _ = await refused(world.operator.tenants.SetTenantQuotas(tenants_pb2.SetTenantQuotasRequest(tenant="nobody")))
    assert code == grpc.StatusCode.NOT_FOUND
    entries = (await owner.tenants.ListAudit(tenants_pb2.ListAuditRequest(page_size=5))).entries
    assert any('"max_tokens_per_minute": 8589934592' in entry.after for entry in entries)
