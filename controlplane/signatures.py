"""Whose signatures a tenant trusts, what it asks of them, and the signatures of its versions."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Any, Final

from pydantic import TypeAdapter
from sqlalchemy import Row, Select, delete, func, insert, select, true, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from controlplane import models
from controlplane.answers import RACED, Request, once
from controlplane.catalog import NO_VERSION, lock_adapter
from controlplane.changes import Change, ChangeKind, record
from controlplane.db import Database, Scope
from controlplane.locks import Lock, hold
from controlplane.signature_tables import signature_policies, signatures, trusted_keys
from controlplane.spool import CONFIG, WEIGHTS
from veneer.errors import AlreadyExistsError, NotFoundError, ResourceExhaustedError, Violation
from veneer.signature import Policy, SignatureError, SignatureReport, TrustedKey, judge, read_trusted_key

MAX_TRUSTED_KEYS: Final = 32
"""Keys and authorities that a tenant may trust; all of them go to whoever judges a signature."""
MAX_SIGNATURES: Final = 32
"""Signatures that a version may have."""


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A trusted key as the catalogue has it."""

    key: TrustedKey
    create_time: datetime


@dataclass(frozen=True, slots=True)
class Trust:
    """What a signature is judged by.

    Attributes:
        policy: What its owner asks.
        keys: Whom the owner trusts.
        time: When certificates must have been valid, by the database's clock.
        signature: The signature as it came; empty: none did.
    """

    policy: Policy
    keys: tuple[TrustedKey, ...]
    time: datetime
    signature: bytes = b""

    def judge(self, files: Mapping[str, str]) -> SignatureReport | None:
        """See `veneer.signature.judge`."""
        return judge(self.policy, self.signature, self.keys, files, at=self.time)


_KEPT_KEY, _KEPT_POLICY, _KEPT_REPORT = TypeAdapter(StoredKey), TypeAdapter(Policy), TypeAdapter(SignatureReport)


class Signatures:
    """Use cases of trust. Stateless; any task may call it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, owner: str, name: str, pem: bytes, *, request_id: str = "") -> StoredKey:
        """Trusts a key or an authority.

        Raises:
            InvalidArgumentError: It is neither, or of a kind that cannot be used.
            AlreadyExistsError: It is trusted already, or the name is taken.
            ResourceExhaustedError: So many are trusted already.
        """
        key = read_trusted_key(pem, name=name)
        refusals = {
            "pk_trusted_keys": AlreadyExistsError(f"the key {key.id} is trusted already"),
            "uq_trusted_keys_tenant_name": AlreadyExistsError(f"there is a trusted key {name!r} already"),
            **RACED,
        }
        request = Request.of(owner, request_id, "AddTrustedKey", name, key.id)
        async with self._database.transaction(Scope.of_tenant(owner), refusals=refusals) as connection:
            return await once(connection, request, _KEPT_KEY, lambda: _add(connection, owner, key))

    async def list(self, owner: str) -> tuple[Policy, list[StoredKey]]:
        """The policy, and the trusted keys by name."""
        async with self._database.transaction(Scope.of_tenant(owner)) as connection:
            return await _policy(connection, owner), await _keys(connection, owner)

    async def remove(self, owner: str, key_id: str, *, request_id: str = "") -> StoredKey:
        """Trusts a key or authority no longer.

        Raises:
            NotFoundError: The owner trusts no such key.
        """
        request = Request.of(owner, request_id, "RemoveTrustedKey", key_id)
        async with self._database.transaction(Scope.of_tenant(owner), refusals=RACED) as connection:
            return await once(connection, request, _KEPT_KEY, lambda: _remove(connection, owner, key_id))

    async def set_policy(self, owner: str, policy: Policy, *, request_id: str = "") -> Policy:
        """Says what is asked of signatures from now on."""
        request = Request.of(owner, request_id, "SetSignaturePolicy", policy.value)
        async with self._database.transaction(Scope.of_tenant(owner), refusals=RACED) as connection:
            return await once(connection, request, _KEPT_POLICY, lambda: _set_policy(connection, owner, policy))

    async def attach(self, owner: str, adapter: str, version: str, signature: bytes, *, request_id: str = "") -> SignatureReport:
        """Adds a signature, which must hold, to a version that was published before; the one that it has already changes nothing.

        Raises:
            NotFoundError: The owner has no such adapter or version.
            SignatureError: It does not hold.
            ResourceExhaustedError: The version has so many.
        """
        request = Request.of(owner, request_id, "AttachSignature", adapter, version, sha256(signature).hexdigest())
        async with self._database.transaction(Scope.of_tenant(owner), refusals=RACED) as connection:
            return await once(connection, request, _KEPT_REPORT, lambda: _attach(connection, owner, adapter, version, signature))

    async def trust(self, owner: str, signature: bytes) -> Trust:
        """What a signature that comes now is judged by."""
        async with self._database.transaction(Scope.of_tenant(owner)) as connection:
            policy = await _policy(connection, owner)
            keys = tuple(one.key for one in await _keys(connection, owner)) if signature else ()
            time = (await connection.execute(select(func.now()))).scalar_one()
        return Trust(policy, keys, time, signature)


async def trust_of(connection: AsyncConnection, owner: str, version: str) -> Trust:
    """What the last signature of a version is judged by now; in the owner's scope."""
    policies = signature_policies.c
    mine = _last(owner, version).subquery()
    policy = select(policies.policy).where(policies.tenant == owner).scalar_subquery()
    asked = select(policy.label("policy"), func.now().label("now")).subquery()
    row = (await connection.execute(select(asked, mine).outerjoin_from(asked, mine, true()))).one()
    asks = Policy.OFF if row.policy is None else Policy(row.policy)
    if row.bundle is None:
        return Trust(asks, (), row.now)
    return Trust(asks, tuple(one.key for one in await _keys(connection, owner)), row.judge_time, bytes(row.bundle))


async def why_untrusted(connection: AsyncConnection, owner: str, digests: Sequence[str]) -> dict[str, str]:
    """Of versions, those that no data plane loads since the owner's policy does not allow their signature now, and why."""
    if await _policy(connection, owner) is Policy.OFF:
        return {}
    columns = models.versions.c
    query = select(columns.digest, columns.config_digest, columns.weights_digest)
    rows = (await connection.execute(query.where(columns.tenant == owner, columns.digest.in_(digests)))).all()
    found = {}
    for row in rows:
        trust = await trust_of(connection, owner, row.digest)
        try:
            trust.judge({CONFIG: row.config_digest, WEIGHTS: row.weights_digest})
        except SignatureError as error:
            found[row.digest] = error.message
    return found


async def keep_signature(connection: AsyncConnection, owner: str, version: str, trust: Trust) -> None:
    """Keeps the signature of a version, in the transaction that publishes it."""
    if trust.signature:
        row = {"tenant": owner, "version": version, "bundle": trust.signature, "judge_time": trust.time}
        await connection.execute(insert(signatures).values(row))


def _last(owner: str, version: str) -> Select[tuple[int, bytes, datetime]]:
    columns = signatures.c
    mine = (columns.tenant == owner, columns.version == version)
    return select(columns.number, columns.bundle, columns.judge_time).where(*mine).order_by(columns.number.desc()).limit(1)


async def _attach(connection: AsyncConnection, owner: str, adapter: str, version: str, signature: bytes) -> SignatureReport:
    await lock_adapter(connection, owner, adapter)  # a deletion waits, and another signature
    columns = models.versions.c
    mine = (columns.tenant == owner, columns.adapter == adapter, columns.digest == version)
    query = select(columns.config_digest, columns.weights_digest, columns.signature, func.now().label("now")).where(*mine)
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        raise NotFoundError(NO_VERSION)
    keys = tuple(one.key for one in await _keys(connection, owner))
    files = {CONFIG: row.config_digest, WEIGHTS: row.weights_digest}
    found = await asyncio.to_thread(judge, Policy.REQUIRE, signature, keys, files, at=row.now)
    assert found is not None
    last = (await connection.execute(_last(owner, version))).one_or_none()
    if last is not None and bytes(last.bundle) == signature and row.signature == dataclasses.asdict(found):
        return found
    number = 0 if last is None else last.number + 1
    if number >= MAX_SIGNATURES:
        violation = Violation("signature", f"the version has {number}; at most {MAX_SIGNATURES} may be")
        raise ResourceExhaustedError(str(violation), violations=[violation])
    stored = {"tenant": owner, "version": version, "number": number, "bundle": signature, "judge_time": row.now}
    await connection.execute(insert(signatures).values(stored))
    await connection.execute(update(models.versions).where(*mine).values(signature=dataclasses.asdict(found)))
    await _tell(connection, owner)
    return found


async def _add(connection: AsyncConnection, owner: str, key: TrustedKey) -> StoredKey:
    await hold(connection, Lock.TRUST, owner)  # or two at a time would pass the limit together
    known = await _keys(connection, owner)
    if len(known) >= MAX_TRUSTED_KEYS and all(one.key.id != key.id for one in known):
        violation = Violation("trusted_keys", f"{len(known)} are trusted; at most {MAX_TRUSTED_KEYS} may be")
        raise ResourceExhaustedError(str(violation), violations=[violation])
    row = {"tenant": owner, **dataclasses.asdict(key)}
    stored = (await connection.execute(insert(trusted_keys).values(row).returning(*trusted_keys.c))).one()
    await _tell(connection, owner)
    return _stored(stored)


async def _remove(connection: AsyncConnection, owner: str, key_id: str) -> StoredKey:
    columns = trusted_keys.c
    query = delete(trusted_keys).where(columns.tenant == owner, columns.id == key_id).returning(*columns)
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        raise NotFoundError("there is no such trusted key")
    await _tell(connection, owner)
    return _stored(row)


async def _set_policy(connection: AsyncConnection, owner: str, policy: Policy) -> Policy:
    if await _policy(connection, owner) is not policy:
        made = upsert(signature_policies).values(tenant=owner, policy=policy.value)
        await connection.execute(made.on_conflict_do_update(constraint="pk_signature_policies", set_={"policy": policy.value}))
        await _tell(connection, owner)
    return policy


async def _tell(connection: AsyncConnection, owner: str) -> None:
    """Has data planes ask again about what they hold of the tenant."""
    await record(connection, Change(kind=ChangeKind.TRUST, tenant=owner))


async def _policy(connection: AsyncConnection, owner: str) -> Policy:
    columns = signature_policies.c
    found = (await connection.execute(select(columns.policy).where(columns.tenant == owner))).scalar_one_or_none()
    return Policy.OFF if found is None else Policy(found)


async def _keys(connection: AsyncConnection, owner: str) -> list[StoredKey]:
    query = select(*trusted_keys.c).where(trusted_keys.c.tenant == owner).order_by(trusted_keys.c.name)
    return list(map(_stored, (await connection.execute(query)).all()))


def _stored(row: Row[Any]) -> StoredKey:
    key = TrustedKey(id=row.id, kind=row.kind, algorithm=row.algorithm, pem=row.pem, subject=row.subject, name=row.name)
    return StoredKey(key, row.create_time)
