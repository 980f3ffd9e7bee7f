"""Organisations: what operators lay down for them, and what their tenants have together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from pydantic import TypeAdapter
from sqlalchemy import Row, cast, func, insert, select, text, update
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncConnection

from controlplane import models
from controlplane.answers import RACED, Request, once
from controlplane.db import OPERATOR, Database, Scope
from controlplane.limits import OrganizationQuotas, TenantLimits, TenantQuotas
from controlplane.locks import Lock, hold
from controlplane.organization_tables import organizations
from controlplane.paging import page_limit, page_start, page_token
from veneer.errors import AlreadyExistsError, FailedPreconditionError, NotFoundError, ResourceExhaustedError, Violation

NO_ORGANIZATION: Final = "there is no such organisation"
SEPARATOR: Final = "--"
"""Between the name of an organisation, which has none in it, and the rest of a name of a tenant that it made."""

_STORED = text("SELECT * FROM stored_in_organization('', '')")
_QUOTAS = tuple(field.name for field in dataclasses.fields(OrganizationQuotas))


@dataclass(frozen=True, slots=True)
class Organization:
    """A customer with tenants of its own.

    Attributes:
        name: Unique, never changed.
        quotas: What its tenants may have at most together.
        tenant_limits: What each tenant that it makes may use at most on one data plane.
        tenant_quotas: What each tenant that it makes may use at most in all.
        create_time: When it was created.
    """

    name: str
    quotas: OrganizationQuotas
    tenant_limits: TenantLimits
    tenant_quotas: TenantQuotas
    create_time: datetime


@dataclass(frozen=True, slots=True)
class OrganizationUse:
    """What the tenants of an organisation have together."""

    num_tenants: int
    num_adapters: int
    stored_bytes: int


_KEPT = TypeAdapter(Organization)


class Organizations:
    """Use cases of organisations. Stateless; any task may call it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(
        self,
        name: str,
        *,
        quotas: OrganizationQuotas,
        tenant_limits: TenantLimits,
        tenant_quotas: TenantQuotas,
        request_id: str = "",
    ) -> Organization:
        """Creates an organisation.

        Raises:
            AlreadyExistsError: The name is taken.
            FailedPreconditionError: A tenant of nobody's or of another organisation's has a name that would be this one's alone.
        """
        taken = AlreadyExistsError(f"there is an organisation {name!r} already")
        row = {"name": name, **_columns(quotas, tenant_limits, tenant_quotas)}
        request = Request.of_operator(name, request_id, "CreateOrganization", row, space="organization")
        async with self._database.transaction(OPERATOR, refusals={"pk_organizations": taken, **RACED}) as connection:

            async def create() -> Organization:
                await _refuse_names(connection, name)
                return _organization((await connection.execute(insert(organizations).values(row).returning(organizations))).one())

            return await once(connection, request, _KEPT, create)

    async def set_quotas(
        self,
        name: str,
        quotas: Mapping[str, int],
        *,
        tenant_limits: Mapping[str, int],
        tenant_quotas: Mapping[str, int],
        request_id: str = "",
    ) -> Organization:
        """Sets its ceilings, and what the tenants may use that it makes from now on; numbers that are not named stay.

        Raises:
            NotFoundError: There is no such organisation.
        """
        values: dict[str, Any] = {**quotas, "tenant_limits": dict(tenant_limits), "tenant_quotas": dict(tenant_quotas)}
        request = Request.of_operator(name, request_id, "SetOrganizationQuotas", values, space="organization")
        merged = {part: organizations.c[part].concat(cast(values[part], JSONB)) for part in ("tenant_limits", "tenant_quotas")}
        query = update(organizations).where(organizations.c.name == name).values({**values, **merged}).returning(organizations)
        async with self._database.transaction(OPERATOR, refusals=RACED) as connection:

            async def change() -> Organization:
                await hold(connection, Lock.TENANTS, name)  # a tenant that is being made gets the old numbers, all of them
                row = (await connection.execute(query)).one_or_none()
                if row is None:
                    raise NotFoundError(NO_ORGANIZATION)
                return _organization(row)

            return await once(connection, request, _KEPT, change)

    async def page(self, *, page_size: int, token: str) -> tuple[list[Organization], str]:
        """A page of organisations by name, and the next page's token."""
        limit = page_limit(page_size)
        start = page_start("organizations", token, kinds=[str])
        query = select(organizations).order_by(organizations.c.name).limit(limit + 1)
        if start is not None:
            query = query.where(organizations.c.name > start[0])
        async with self._database.transaction(OPERATOR) as connection:
            rows = (await connection.execute(query)).all()
        found = [_organization(row) for row in rows[:limit]]
        return found, page_token("organizations", [found[-1].name]) if len(rows) > limit else ""

    async def get(self, name: str) -> tuple[Organization, OrganizationUse]:
        """An organisation, and what its tenants have together.

        Raises:
            NotFoundError: There is no such organisation.
        """
        async with self._database.transaction(Scope.of_organization(name)) as connection:
            organization = await known_organization(connection, name)
            num_tenants = await _num_tenants(connection, name)
            stored = (await connection.execute(_STORED)).one()
        return organization, OrganizationUse(num_tenants, stored.num_adapters, stored.stored_bytes)


async def known_organization(connection: AsyncConnection, name: str) -> Organization:
    """An organisation, in a scope of its own or of an operator.

    Raises:
        NotFoundError: There is no such organisation.
    """
    row = (await connection.execute(select(organizations).where(organizations.c.name == name))).one_or_none()
    if row is None:
        raise NotFoundError(NO_ORGANIZATION)
    return _organization(row)


async def take_place(connection: AsyncConnection, name: str) -> Organization:
    """Checks that an organisation may have one tenant more; others that ask wait until this transaction ends.

    Raises:
        NotFoundError: There is no such organisation.
        ResourceExhaustedError: It may not.
    """
    await hold(connection, Lock.TENANTS, name)
    organization = await known_organization(connection, name)
    most = organization.quotas.max_tenants
    if most and await _num_tenants(connection, name) >= most:
        fault = f"the organisation has its {most} tenants; have the quota raised"
        raise ResourceExhaustedError(f"quota max_tenants: {fault}", violations=[Violation("quotas.max_tenants", fault)])
    return organization


async def _num_tenants(connection: AsyncConnection, name: str) -> int:
    query = select(func.count()).select_from(models.tenants).where(models.tenants.c.organization == name)
    return int((await connection.execute(query)).scalar_one())


async def _refuse_names(connection: AsyncConnection, name: str) -> None:
    """Refuses an organisation that could find out by a name of its own that a tenant which is not its has it."""
    columns = models.tenants.c
    theirs = (func.starts_with(columns.name, f"{name}{SEPARATOR}"), columns.organization.is_distinct_from(name))
    query = select(columns.name, columns.organization).where(*theirs).order_by(columns.name).limit(1)
    found = (await connection.execute(query)).one_or_none()
    if found is None:
        return
    if found.organization is None:
        whose, remedy = "which belongs to no organisation", "choose another name; one of any name can adopt that tenant"
    else:
        whose, remedy = f"which belongs to organisation {found.organization!r} for ever", "choose another name"
    fault = f"tenant {found.name!r}, {whose}, has a name that would be this organisation's alone"
    raise FailedPreconditionError(f"{fault}: {remedy}")


def _columns(quotas: OrganizationQuotas, limits: TenantLimits, tenant_quotas: TenantQuotas) -> dict[str, Any]:
    numbers = dataclasses.asdict(quotas)
    return {**numbers, "tenant_limits": dataclasses.asdict(limits), "tenant_quotas": dataclasses.asdict(tenant_quotas)}


def _organization(row: Row[Any]) -> Organization:
    quotas = OrganizationQuotas(**{name: getattr(row, name) for name in _QUOTAS})
    limits, tenant_quotas = TenantLimits(**row.tenant_limits), TenantQuotas(**row.tenant_quotas)
    return Organization(row.name, quotas, limits, tenant_quotas, row.create_time)
