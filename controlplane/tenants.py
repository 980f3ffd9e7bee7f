"""Tenants and their keys."""

from __future__ import annotations

import dataclasses
import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import Row, func, insert, or_, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from controlplane import models
from controlplane.answers import RACED, Request, once
from controlplane.changes import Change, ChangeKind, record
from controlplane.db import OPERATOR, Database, Scope
from controlplane.fallback import FallbackPolicy
from controlplane.limits import TenantLimits, TenantQuotas
from controlplane.paging import page_limit, page_start, page_token
from controlplane.vault import Vault, secret_digest
from veneer.errors import AlreadyExistsError, FailedPreconditionError, NotFoundError

_NO_TENANT = "there is no such tenant"
_NO_KEY = "there is no such key"
_NONCE_BYTES = 32


@dataclass(frozen=True, slots=True)
class Tenant:
    """A customer.

    Attributes:
        name: Unique, never changed.
        fallback: What may answer when a version cannot be had in time.
        weight: Share of capacity relative to other tenants; 1 to 1000.
        create_time: When it was created.
        limits: What it may use at most on one data plane.
        quotas: What it may use at most in all.
    """

    name: str
    fallback: FallbackPolicy
    weight: int
    create_time: datetime
    limits: TenantLimits
    quotas: TenantQuotas


@dataclass(frozen=True, slots=True)
class Key:
    """A credential of a tenant, without its secret."""

    id: str
    tenant: str
    roles: tuple[str, ...]
    label: str
    create_time: datetime
    expire_time: datetime | None
    revoke_time: datetime | None
    successor: str = ""


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key with its secret, which is kept nowhere, and the key whose place it takes, if any."""

    key: Key
    secret: str
    previous: Key | None = None


@dataclass(frozen=True, slots=True)
class _Made:
    """A new key as its answer is kept: what its secret is derived from is in it, and the secret is not."""

    key: Key
    nonce: str
    previous: Key | None = None


_LIMITS = tuple(field.name for field in dataclasses.fields(TenantLimits))
_QUOTAS = tuple(field.name for field in dataclasses.fields(TenantQuotas))
_FALLBACK = ("fallback_allowed", "previous_allowed", "default_fallback")
_TENANT = tuple(models.tenants.c[name] for name in ("name", *_FALLBACK, "weight", "create_time", *_LIMITS, *_QUOTAS))
_KEY = tuple(
    models.keys.c[name] for name in ("id", "tenant", "roles", "label", "create_time", "expire_time", "revoke_time", "successor")
)
_KEPT_TENANT, _KEPT_KEY, _KEPT_MADE = TypeAdapter(Tenant), TypeAdapter(Key), TypeAdapter(_Made)


class Tenants:
    """Use cases of tenants and keys. Stateless; any task may call it."""

    def __init__(self, database: Database, vault: Vault) -> None:
        self._database = database
        self._vault = vault

    async def create(
        self,
        name: str,
        *,
        fallback: FallbackPolicy,
        weight: int,
        limits: TenantLimits,
        quotas: TenantQuotas,
        request_id: str = "",
    ) -> Tenant:
        """Creates a tenant.

        Raises:
            AlreadyExistsError: The name is taken.
            InvalidArgumentError: The default fallback is not allowed by the policy.
        """
        fallback.check()
        taken = AlreadyExistsError(f"there is a tenant {name!r} already")
        numbers = {**dataclasses.asdict(limits), **dataclasses.asdict(quotas)}
        row = {"name": name, "weight": weight, **fallback.columns(), **numbers}
        request = Request.of_operator(name, request_id, "CreateTenant", row)
        async with self._database.transaction(OPERATOR, refusals={"pk_tenants": taken, **RACED}) as connection:

            async def create() -> Tenant:
                return _tenant((await connection.execute(insert(models.tenants).values(row).returning(*_TENANT))).one())

            return await once(connection, request, _KEPT_TENANT, create)

    async def set_limits(self, name: str, limits: TenantLimits, *, request_id: str = "") -> Tenant:
        """Replaces what a tenant may use at most on one data plane.

        Raises:
            NotFoundError: There is no such tenant.
        """
        return await self._set_numbers("SetTenantLimits", name, dataclasses.asdict(limits), request_id)

    async def set_quotas(self, name: str, quotas: TenantQuotas, *, request_id: str = "") -> Tenant:
        """Replaces what a tenant may use at most in all.

        Raises:
            NotFoundError: There is no such tenant.
        """
        return await self._set_numbers("SetTenantQuotas", name, dataclasses.asdict(quotas), request_id)

    async def _set_numbers(self, method: str, name: str, numbers: dict[str, int], request_id: str) -> Tenant:
        request = Request.of_operator(name, request_id, method, numbers)
        async with self._database.transaction(OPERATOR, refusals=RACED) as connection:
            return await once(connection, request, _KEPT_TENANT, lambda: _change(connection, name, numbers))

    async def page(self, *, page_size: int, token: str) -> tuple[list[Tenant], str]:
        """A page of tenants by name, and the next page's token."""
        limit = page_limit(page_size)
        start = page_start("tenants", token, kinds=[str])
        columns = models.tenants.c
        query = select(*_TENANT).order_by(columns.name).limit(limit + 1)
        if start is not None:
            query = query.where(columns.name > start[0])
        async with self._database.transaction(OPERATOR) as connection:
            rows = (await connection.execute(query)).all()
        tenants = [_tenant(row) for row in rows[:limit]]
        return tenants, page_token("tenants", [tenants[-1].name]) if len(rows) > limit else ""

    async def set_fallback(self, name: str, fallback: FallbackPolicy, *, request_id: str = "") -> Tenant:
        """Replaces what may answer when a version cannot be had in time.

        Raises:
            InvalidArgumentError: The default is not allowed by the policy.
            NotFoundError: There is no such tenant.
        """
        fallback.check()
        values = fallback.columns()
        request = Request.of(name, request_id, "SetFallback", values)
        async with self._database.transaction(Scope.of_tenant(name), refusals=RACED) as connection:
            return await once(connection, request, _KEPT_TENANT, lambda: _change(connection, name, values))

    async def create_key(
        self, tenant: str, roles: Sequence[str], *, label: str, lifetime: timedelta | None, request_id: str = ""
    ) -> NewKey:
        """Creates a key; its secret is in the result and is stored nowhere.

        Raises:
            NotFoundError: There is no such tenant.
        """
        request = Request.of(tenant, request_id, "CreateKey", sorted(roles), label, _seconds(lifetime))
        refusals = {"fk_keys_tenant_tenants": NotFoundError(_NO_TENANT), **RACED}
        async with self._database.transaction(Scope.of_tenant(tenant), refusals=refusals) as connection:

            async def create() -> _Made:
                return await self._make_key(connection, tenant, roles, label=label, lifetime=lifetime)

            made = await once(connection, request, _KEPT_MADE, create)
        return self._new_key(made)

    async def rotate_key(
        self, tenant: str, key_id: str, *, overlap: timedelta, lifetime: timedelta | None, request_id: str = ""
    ) -> NewKey:
        """Creates a key with the roles and label of another, which ends after the overlap or sooner, as it would have.

        Args:
            tenant: Whose key it is.
            key_id: Key whose place is taken.
            overlap: How long it goes on working.
            lifetime: How long the new key lives; None: as long as the other one was made for.
            request_id: The caller's own identifier of this rotation.

        Raises:
            NotFoundError: The tenant has no such key.
            FailedPreconditionError: The key was rotated before, or works no longer.
        """
        request = Request.of(tenant, request_id, "RotateKey", key_id, _seconds(overlap), _seconds(lifetime))
        async with self._database.transaction(Scope.of_tenant(tenant), refusals=RACED) as connection:

            async def rotate() -> _Made:
                return await self._rotate(connection, tenant, uuid.UUID(key_id), overlap=overlap, lifetime=lifetime)

            made = await once(connection, request, _KEPT_MADE, rotate)
        return self._new_key(made)

    async def list_keys(self, tenant: str, *, page_size: int, token: str) -> tuple[list[Key], str]:
        """A page of a tenant's keys, newest first, revoked ones included, and the next page's token.

        Raises:
            NotFoundError: There is no such tenant.
        """
        limit = page_limit(page_size)
        start = page_start("keys", token, kinds=[datetime, uuid.UUID])
        columns = models.keys.c
        query = select(*_KEY).where(columns.tenant == tenant)
        if start is not None:
            query = query.where(tuple_(columns.create_time, columns.id) < tuple(start))
        query = query.order_by(columns.create_time.desc(), columns.id.desc()).limit(limit + 1)
        async with self._database.transaction(Scope.of_tenant(tenant)) as connection:
            await _must_exist(connection, tenant)
            rows = (await connection.execute(query)).all()
        keys = [_key(row) for row in rows[:limit]]
        return keys, page_token("keys", [keys[-1].create_time, uuid.UUID(keys[-1].id)]) if len(rows) > limit else ""

    async def revoke_key(self, tenant: str, key_id: str, *, request_id: str = "") -> Key:
        """Ends a key at once; a second time changes nothing.

        Raises:
            NotFoundError: The tenant has no such key.
        """
        request = Request.of(tenant, request_id, "RevokeKey", key_id)
        async with self._database.transaction(Scope.of_tenant(tenant), refusals=RACED) as connection:
            return await once(connection, request, _KEPT_KEY, lambda: _revoke(connection, tenant, uuid.UUID(key_id)))

    async def _rotate(
        self, connection: AsyncConnection, tenant: str, key_id: uuid.UUID, *, overlap: timedelta, lifetime: timedelta | None
    ) -> _Made:
        columns = models.keys.c
        mine = (columns.tenant == tenant, columns.id == key_id)
        has_ended = or_(columns.revoke_time.is_not(None), columns.expire_time <= func.now()).label("has_ended")
        old = (await connection.execute(select(*_KEY, has_ended).where(*mine).with_for_update())).one_or_none()
        if old is None:
            raise NotFoundError(_NO_KEY)
        if old.has_ended:
            raise FailedPreconditionError("the key was revoked or is at its end; create another one")
        if old.successor is not None:
            raise FailedPreconditionError(f"the key was rotated before; {old.successor} took its place")
        if lifetime is None and old.expire_time is not None:
            lifetime = old.expire_time - old.create_time
        made = await self._make_key(connection, tenant, old.roles, label=old.label, lifetime=lifetime)
        end = func.least(columns.expire_time, func.now() + overlap)  # of a key without an end: NULL is left out
        query = update(models.keys).where(*mine).values(expire_time=end, successor=uuid.UUID(made.key.id)).returning(*_KEY)
        return dataclasses.replace(made, previous=_key((await connection.execute(query)).one()))

    async def _make_key(
        self, connection: AsyncConnection, tenant: str, roles: Sequence[str], *, label: str, lifetime: timedelta | None
    ) -> _Made:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        row: dict[str, object] = {
            "tenant": tenant,
            "id": uuid.uuid4(),
            "hash": self._vault.key_hash(secret_digest(self._vault.key_secret(tenant, nonce))),
            "roles": sorted(roles),
            "label": label,
            "expire_time": None if lifetime is None else func.now() + lifetime,
        }
        stored = (await connection.execute(insert(models.keys).values(row).returning(*_KEY))).one()
        await record(connection, Change(kind=ChangeKind.KEY, tenant=tenant))
        return _Made(_key(stored), nonce.hex())

    def _new_key(self, made: _Made) -> NewKey:
        return NewKey(made.key, self._vault.key_secret(made.key.tenant, bytes.fromhex(made.nonce)), made.previous)


async def _change(connection: AsyncConnection, name: str, values: Mapping[str, Any]) -> Tenant:
    """Writes columns of a tenant and tells the data planes."""
    query = update(models.tenants).where(models.tenants.c.name == name).values(values).returning(*_TENANT)
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        raise NotFoundError(_NO_TENANT)
    await record(connection, Change(kind=ChangeKind.KEY, tenant=name))
    return _tenant(row)


async def _revoke(connection: AsyncConnection, tenant: str, key_id: uuid.UUID) -> Key:
    columns = models.keys.c
    mine = (columns.tenant == tenant, columns.id == key_id)
    query = update(models.keys).where(*mine, columns.revoke_time.is_(None)).values(revoke_time=func.now()).returning(*_KEY)
    row = (await connection.execute(query)).one_or_none()
    if row is not None:
        await record(connection, Change(kind=ChangeKind.KEY, tenant=tenant))
        return _key(row)
    row = (await connection.execute(select(*_KEY).where(*mine))).one_or_none()
    if row is None:
        raise NotFoundError(_NO_KEY)
    return _key(row)


async def _must_exist(connection: AsyncConnection, tenant: str) -> None:
    if (await connection.execute(select(models.tenants.c.name).where(models.tenants.c.name == tenant))).one_or_none() is None:
        raise NotFoundError(_NO_TENANT)


def _tenant(row: Row[Any]) -> Tenant:
    fallback = FallbackPolicy(by_base=row.fallback_allowed, by_previous=row.previous_allowed, default=row.default_fallback)
    limits = TenantLimits(**{name: getattr(row, name) for name in _LIMITS})
    quotas = TenantQuotas(**{name: getattr(row, name) for name in _QUOTAS})
    return Tenant(row.name, fallback, row.weight, row.create_time, limits, quotas)


def _key(row: Row[Any]) -> Key:
    return Key(
        str(row.id),
        row.tenant,
        tuple(row.roles),
        row.label,
        row.create_time,
        row.expire_time,
        row.revoke_time,
        str(row.successor or ""),
    )


def _seconds(time: timedelta | None) -> float | None:
    return None if time is None else time.total_seconds()
