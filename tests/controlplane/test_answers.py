"""Writes that come again under their request_id: answered as they were, and done once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from tests.fixtures.controlplane import CALLER, OWNER, PUBLISHER, Client, World, refused
from tests.fixtures.services import TestDatabase
from veneer.controlplane.v1 import catalog_pb2, tenants_pb2

_T = tenants_pb2


async def _key(owner: Client) -> str:
    return (await owner.tenants.CreateKey(_T.CreateKeyRequest(roles=[CALLER]))).key.id


async def _version(world: World, owner: Client) -> str:
    await world.base()
    first = (await world.publish(owner)).version.digest
    await world.publish(owner, seed=1, alias="stable")
    return first


Write = Callable[[World, Client, str], Awaitable[Callable[[], Awaitable[Any]]]]


async def _create_tenant(world: World, owner: Client, name: str) -> Callable[[], Awaitable[Any]]:
    request = _T.CreateTenantRequest(tenant=_T.Tenant(name="fresh", weight=3), request_id=name)
    return lambda: world.operator.tenants.CreateTenant(request)


async def _set_limits(world: World, owner: Client, name: str) -> Callable[[], Awaitable[Any]]:
    request = _T.SetTenantLimitsRequest(tenant="acme", limits=_T.TenantLimits(max_rank_rows=16), request_id=name)
    return lambda: world.operator.tenants.SetTenantLimits(request)


async def _set_quotas(world: World, owner: Client, name: str) -> Callable[[], Awaitable[Any]]:
    request = _T.SetTenantQuotasRequest(tenant="acme", quotas=_T.TenantQuotas(max_streams=16), request_id=name)
    return lambda: world.operator.tenants.SetTenantQuotas(request)


async def _set_fallback(world: World, owner: Client, name: str) -> Callable[[], Awaitable[Any]]:
    request = _T.SetFallbackRequest(fallback=_T.FALLBACK_POLICY_EXACT, request_id=name)
    return lambda: owner.tenants.SetFallback(request)


async def _create_key(world: World, owner: Client, name: str) -> Callable[[], Awaitable[Any]]:
    request = _T.CreateKeyRequest(roles=[PUBLISHER, CALLER], label="ci", lifetime=Duration(seconds=99), request_id=name)
    return lambda: owner.tenants.CreateKey(request)


async def _rotate_key(world: World, owner: Client, name: str) -> Callable[[], Awaitable[Any]]:
    request = _T.RotateKeyRequest(id=await _key(owner), request_id=name)
    return lambda: owner.tenants.RotateKey(request)


async def _revoke_key(world: World, owner: Client, name: str) -> Callable[[], Awaitable[Any]]:
    request = _T.RevokeKeyRequest(id=await _key(owner), request_id=name)
    return lambda: owner.tenants.RevokeKey(request)


async def _create_grant(world: World, owner: Client, name: str) -> Callable[[], Awaitable[Any]]:
    await _version(world, owner)
    request = _T.CreateGrantRequest(adapter="style", grantee="friend", request_id=name)
    return lambda: owner.tenants.CreateGrant(request)


async def _revoke_grant(world: World, owner: Client, name: str) -> Callable[[], Awaitable[Any]]:
    await _version(world, owner)
    await owner.tenants.CreateGrant(_T.CreateGrantRequest(adapter="style", grantee="friend"))
    request = _T.RevokeGrantRequest(adapter="style", grantee="friend", request_id=name)
    return lambda: owner.tenants.RevokeGrant(request)


async def _retire(world: World, owner: Client, name: str) -> Callable[[], Awaitable[Any]]:
    request = catalog_pb2.RetireVersionRequest(adapter="style", version=await _version(world, owner), request_id=name)
    return lambda: owner.catalog.RetireVersion(request)


async def _promote(world: World, owner: Client, name: str) -> Callable[[], Awaitable[Any]]:
    first, arms = await _version(world, owner), [catalog_pb2.Arm(weight=1), catalog_pb2.Arm(weight=9)]
    listed = await owner.catalog.ListVersions(catalog_pb2.ListVersionsRequest(adapter="style"))
    for arm, version in zip(arms, listed.versions, strict=True):
        arm.version = version.digest
    await owner.catalog.SetAlias(catalog_pb2.SetAliasRequest(adapter="style", arms=arms))
    request = catalog_pb2.PromoteRequest(adapter="style", version=first, request_id=name)
    return lambda: owner.catalog.Promote(request)


async def _freeze(world: World, owner: Client, name: str) -> Callable[[], Awaitable[Any]]:
    await _version(world, owner)
    request = catalog_pb2.FreezeAliasRequest(adapter="style", frozen=True, request_id=name)
    return lambda: owner.catalog.FreezeAlias(request)


async def _delete_adapter(world: World, owner: Client, name: str) -> Callable[[], Awaitable[Any]]:
    await _version(world, owner)
    request = catalog_pb2.DeleteAdapterRequest(adapter="style", force=True, request_id=name)
    return lambda: owner.catalog.DeleteAdapter(request)


WRITES: list[Write] = [
    _create_tenant,
    _set_limits,
    _set_quotas,
    _set_fallback,
    _create_key,
    _rotate_key,
    _revoke_key,
    _create_grant,
    _revoke_grant,
    _retire,
    _promote,
    _freeze,
    _delete_adapter,
]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__.removeprefix("_"))
async def test_a_write_that_comes_again_is_answered_the_same_and_done_once(world: World, write: Write) -> None:
    owner = await world.tenant("acme")
    call = await write(world, owner, "once")
    told = _T.ListAuditRequest(tenant="acme")
    first = await call()
    before = await world.operator.tenants.ListAudit(told)
    answers = await asyncio.gather(*(call() for _ in range(3)))
    assert answers == [first] * 3
    assert await world.operator.tenants.ListAudit(told) == before


async def test_a_write_is_answered_as_it_was_after_its_adapter_is_gone_and_came_back(world: World) -> None:
    owner = await world.tenant("acme")
    frozen = catalog_pb2.FreezeAliasRequest(adapter="style", frozen=True, request_id="frozen")
    writes = [await _promote(world, owner, "promoted"), lambda: owner.catalog.FreezeAlias(frozen)]
    answers = [await call() for call in writes]
    await owner.catalog.FreezeAlias(catalog_pb2.FreezeAliasRequest(adapter="style"))
    await owner.catalog.DeleteAdapter(catalog_pb2.DeleteAdapterRequest(adapter="style", force=True))
    assert [await call() for call in writes] == answers
    again = (await world.publish(owner, seed=5)).alias
    assert [await call() for call in writes] == answers
    adapter = (await owner.catalog.GetAdapter(catalog_pb2.GetAdapterRequest(adapter="style"))).adapter
    assert list(adapter.aliases) == [again]


async def test_one_identifier_is_for_one_write(world: World) -> None:
    owner = await world.tenant("acme", OWNER)
    await (await _create_key(world, owner, "once"))()
    for other in (
        owner.tenants.CreateKey(_T.CreateKeyRequest(roles=[OWNER], request_id="once")),
        owner.tenants.RevokeKey(_T.RevokeKeyRequest(id=await _key(owner), request_id="once")),
    ):
        code, message = await refused(other)
        assert (code, "request_id" in message) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_identifiers_of_tenants_and_of_operators_are_apart(world: World) -> None:
    owner, rival = await world.tenant("acme"), await world.tenant("rival")
    secrets = {(await (await _create_key(world, one, "same"))()).secret for one in (owner, rival)}
    assert len(secrets) == 2
    limited = await (await _set_limits(world, owner, "same"))()
    assert limited.tenant.limits.max_rank_rows == 16


async def test_no_secret_is_kept_and_its_answer_alone_gives_none(world: World, database: TestDatabase) -> None:
    owner = await world.tenant("acme", OWNER)
    made = await (await _create_key(world, owner, "once"))()
    with database.connect() as connection:
        [[answer]] = connection.execute("SELECT answer::text FROM requests").fetchall()
        assert made.key.id in answer
        assert made.secret not in answer
        connection.execute("DELETE FROM requests")
    again = await (await _create_key(world, owner, "once"))()
    assert again.secret != made.secret
