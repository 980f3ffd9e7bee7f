"""Keys over the wire: rotation, roles, and the walls of the database around both."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from sqlalchemy import text
from sqlalchemy.exc import ProgrammingError

from controlplane.db import Scope
from tests.fixtures.controlplane import AUDITOR, CALLER, OWNER, PUBLISHER, Client, World, refused
from veneer.controlplane.v1 import bases_pb2, tenants_pb2
from veneer.key_lookups import LookupLimits

_DAY_S = 86400


async def make(owner: Client, **fields: object) -> tenants_pb2.CreateKeyResponse:
    request = tenants_pb2.CreateKeyRequest(**{"roles": [PUBLISHER, CALLER], "label": "ci", **fields})
    return await owner.tenants.CreateKey(request)


async def rotate(owner: Client, key_id: str, **fields: object) -> tenants_pb2.RotateKeyResponse:
    return await owner.tenants.RotateKey(tenants_pb2.RotateKeyRequest(id=key_id, **fields))


async def works(world: World, secret: str) -> bool:
    try:
        await world.caller(secret).bases.ListBases(bases_pb2.ListBasesRequest())
    except grpc.aio.AioRpcError as error:
        assert error.code() == grpc.StatusCode.UNAUTHENTICATED
        return False
    return True


async def test_a_rotated_key_works_beside_its_successor_for_the_overlap(world: World) -> None:
    owner = await world.tenant("acme", OWNER)
    old = await make(owner)
    new = await rotate(owner, old.key.id)

    assert (new.key.roles, new.key.label, new.key.HasField("expire_time")) == (old.key.roles, "ci", False)
    assert new.secret != old.secret
    assert (new.previous.id, new.previous.successor) == (old.key.id, new.key.id)
    assert new.previous.expire_time.ToSeconds() - new.key.create_time.ToSeconds() == _DAY_S
    assert [await works(world, secret) for secret in (old.secret, new.secret)] == [True, True]

    last = await rotate(owner, new.key.id, overlap=Duration())
    assert [await works(world, secret) for secret in (new.secret, last.secret)] == [False, True]
    listed = (await owner.tenants.ListKeys(tenants_pb2.ListKeysRequest())).keys
    assert [key.successor for key in listed if key.label == "ci"] == ["", last.key.id, new.key.id]


async def test_an_overlap_gives_a_key_no_more_time_and_its_successor_as_long_as_it_had(world: World) -> None:
    owner = await world.tenant("acme", OWNER)
    old = await make(owner, lifetime=Duration(seconds=3600))
    new = await rotate(owner, old.key.id)
    assert new.previous.expire_time == old.key.expire_time
    assert new.key.expire_time.ToSeconds() - new.key.create_time.ToSeconds() == 3600
    last = await rotate(owner, new.key.id, lifetime=Duration(seconds=60))
    assert last.key.expire_time.ToSeconds() - last.key.create_time.ToSeconds() == 60


async def test_only_a_key_that_works_and_was_not_rotated_is_rotated(world: World) -> None:
    owner = await world.tenant("acme", OWNER)
    old = await make(owner)
    new = await rotate(owner, old.key.id)
    assert await refused(rotate(owner, old.key.id)) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        f"the key was rotated before; {new.key.id} took its place",
    )
    await owner.tenants.RevokeKey(tenants_pb2.RevokeKeyRequest(id=new.key.id))
    code, message = await refused(rotate(owner, new.key.id))
    assert (code, "create another" in message) == (grpc.StatusCode.FAILED_PRECONDITION, True)
    rival = await world.tenant("rival", OWNER)
    for key_id in (old.key.id, str(uuid.uuid4())):
        assert await refused(rotate(rival, key_id)) == (grpc.StatusCode.NOT_FOUND, "there is no such key")
    code, message = await refused(rotate(owner, old.key.id, overlap=Duration(seconds=91 * _DAY_S)))
    assert (code, "overlap" in message) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_an_auditor_reads_the_log_and_the_keys_and_writes_nothing(world: World) -> None:
    await world.base()
    await world.publish(await world.tenant("acme"))
    auditor = await world.key("acme", AUDITOR)
    assert (await auditor.tenants.ListAudit(tenants_pb2.ListAuditRequest())).entries
    assert len((await auditor.tenants.ListKeys(tenants_pb2.ListKeysRequest())).keys) == 2
    code, message = await refused(make(auditor))
    assert (code, message) == (grpc.StatusCode.PERMISSION_DENIED, "the key needs one of the roles owner")


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE tenants SET max_rank_rows = 999",
        "UPDATE tenants SET max_host_bytes = 0, default_fallback = 'FAIL'",
        "UPDATE tenants SET max_streams = 999",
        "UPDATE keys SET expire_time = NULL",
        "UPDATE keys SET expire_time = now() + interval '1 year'",
        "UPDATE keys SET revoke_time = NULL",
        "UPDATE keys SET roles = ARRAY['owner']",
    ],
)
async def test_the_database_lets_a_tenant_raise_neither_its_limits_nor_a_keys_time(world: World, statement: str) -> None:
    owner = await world.tenant("acme", OWNER, limits=tenants_pb2.TenantLimits(max_host_bytes=5))
    made = await make(owner, lifetime=Duration(seconds=3600))
    await owner.tenants.RevokeKey(tenants_pb2.RevokeKeyRequest(id=made.key.id))
    where = f" WHERE id = '{made.key.id}'" if " keys " in statement else ""
    with pytest.raises(ProgrammingError, match=r"a tenant changes its fallback|no more time|permission denied"):
        async with world.plane.database.transaction(Scope.of_tenant("acme")) as connection:
            await connection.execute(text(statement + where))


async def test_unknown_keys_are_looked_up_so_often_and_known_ones_as_ever(world: World) -> None:
    owner = await world.tenant("acme", OWNER)
    made = await make(owner)
    codes = Counter[str]()

    async def show(number: int) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await world.caller(f"vnr_{number:043}").bases.ListBases(bases_pb2.ListBasesRequest())
        codes[caught.value.code().name] += 1

    await asyncio.gather(*(show(number) for number in range(200)))
    assert set(codes) == {"UNAUTHENTICATED", "RESOURCE_EXHAUSTED"}
    assert codes["UNAUTHENTICATED"] >= LookupLimits().peer_burst
    assert await works(world, owner.secret)
    later = await make(owner)
    assert later.key.id != made.key.id
