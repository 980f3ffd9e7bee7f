"""Tenants and their keys."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row, func, insert, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from controlplane import models
from controlplane.changes import Change, ChangeKind, record
from controlplane.db import OPERATOR, Database, Scope
from controlplane.fallback import FallbackPolicy
from controlplane.limits import TenantLimits, TenantQuotas
from controlplane.paging import page_limit, page_start, page_token
from controlplane.vault import Vault, new_secret, secret_digest
from veneer.errors import AlreadyExistsError, NotFoundError

_NO_TENANT = "there is no such tenant"


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


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key with its secret, which is shown once."""

    key: Key
    secret: str


_LIMITS = tuple(field.name for field in dataclasses.fields(TenantLimits))
_QUOTAS = tuple(field.name for field in dataclasses.fields(TenantQuotas))
_FALLBACK = ("fallback_allowed", "previous_allowed", "default_fallback")
_TENANT = tuple(models.tenants.c[name] for name in ("name", *_FALLBACK, "weight", "create_time", *_LIMITS, *_QUOTAS))
_KEY = tuple(models.keys.c[name] for name in ("id", "tenant", "roles", "label", "create_time", "expire_time", "revoke_time"))


class Tenants:
    """Use cases of tenants and keys. Stateless; any task may call it."""

    def __init__(self, database: Database, vault: Vault) -> None:
        self._database = database
        self._vault = vault

    async def create(
        self, name: str, *, fallback: FallbackPolicy, weight: int, limits: TenantLimits, quotas: TenantQuotas
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
        async with self._database.transaction(OPERATOR, refusals={"pk_tenants": taken}) as connection:
            return _tenant((await connection.execute(insert(models.tenants).values(row).returning(*_TENANT))).one())

    async def set_limits(self, name: str, limits: TenantLimits) -> Tenant:
        """Replaces what a tenant may use at most on one data plane.

        Raises:
            NotFoundError: There is no such tenant.
        """
        return await self._set_numbers(name, dataclasses.asdict(limits))

    async def set_quotas(self, name: str, quotas: TenantQuotas) -> Tenant:
        """Replaces what a tenant may use at most in all.

        Raises:
            NotFoundError: There is no such tenant.
        """
        return await self._set_numbers(name, dataclasses.asdict(quotas))

    async def _set_numbers(self, name: str, numbers: dict[str, int]) -> Tenant:
        query = update(models.tenants).where(models.tenants.c.name == name).values(numbers).returning(*_TENANT)
        async with self._database.transaction(OPERATOR) as connection:
            row = (await connection.execute(query)).one_or_none()
            if row is None:
                raise NotFoundError(_NO_TENANT)
            await record(connection, Change(kind=ChangeKind.KEY, tenant=name))
        return _tenant(row)

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

    async def set_fallback(self, name: str, fallback: FallbackPolicy) -> Tenant:
        """Replaces what may answer when a version cannot be had in time.

        Raises:
            InvalidArgumentError: The default is not allowed by the policy.
            NotFoundError: There is no such tenant.
        """
        fallback.check()
        change = update(models.tenants).where(models.tenants.c.name == name).values(fallback.columns()).returning(*_TENANT)
        async with self._database.transaction(Scope.of_tenant(name)) as connection:
            row = (await connection.execute(change)).one_or_none()
            if row is None:
                raise NotFoundError(_NO_TENANT)
            await record(connection, Change(kind=ChangeKind.KEY, tenant=name))
        return _tenant(row)

    async def create_key(self, tenant: str, roles: Sequence[str], *, label: str, lifetime: timedelta | None) -> NewKey:
        """Creates a key; its secret is in the result and nowhere else.

        Raises:
            NotFoundError: There is no such tenant.
        """
        secret = new_secret()
        row: dict[str, object] = {
            "tenant": tenant,
            "id": uuid.uuid4(),
            "hash": self._vault.key_hash(secret_digest(secret)),
            "roles": sorted(roles),
            "label": label,
            "expire_time": None if lifetime is None else func.now() + lifetime,
        }
        absent = NotFoundError(_NO_TENANT)
        async with self._database.transaction(Scope.of_tenant(tenant), refusals={"fk_keys_tenant_tenants": absent}) as connection:
            stored = (await connection.execute(insert(models.keys).values(row).returning(*_KEY))).one()
            await record(connection, Change(kind=ChangeKind.KEY, tenant=tenant))
        return NewKey(_key(stored), secret)

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

    async def revoke_key(self, tenant: str, key_id: str) -> Key:
        """Ends a key at once; a second time changes nothing.

        Raises:
            NotFoundError: The tenant has no such key.
        """
        columns = models.keys.c
        mine = (columns.tenant == tenant, columns.id == uuid.UUID(key_id))
        query = update(models.keys).where(*mine, columns.revoke_time.is_(None)).values(revoke_time=func.now()).returning(*_KEY)
        async with self._database.transaction(Scope.of_tenant(tenant)) as connection:
            row = (await connection.execute(query)).one_or_none()
            if row is not None:
                await record(connection, Change(kind=ChangeKind.KEY, tenant=tenant))
            else:
                row = (await connection.execute(select(*_KEY).where(*mine))).one_or_none()
        if row is None:
            raise NotFoundError("there is no such key")
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
    return Key(str(row.id), row.tenant, tuple(row.roles), row.label, row.create_time, row.expire_time, row.revoke_time)
