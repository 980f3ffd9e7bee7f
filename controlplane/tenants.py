"""Tenants."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from pydantic import TypeAdapter
from sqlalchemy import Row, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from controlplane import models
from controlplane.answers import RACED, Request, once
from controlplane.changes import Change, ChangeKind, record
from controlplane.db import OPERATOR, Database, Scope
from controlplane.fallback import FallbackPolicy
from controlplane.limits import TenantLimits, TenantQuotas
from controlplane.organizations import NO_ORGANIZATION, SEPARATOR, known_organization, take_place
from controlplane.paging import page_limit, page_start, page_token
from veneer.errors import AlreadyExistsError, FailedPreconditionError, InvalidArgumentError, NotFoundError, Violation

_NO_TENANT = "there is no such tenant"
_REFUSALS: Final = {**RACED, "fk_tenants_organization_organizations": NotFoundError(NO_ORGANIZATION)}


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
        organization: The organisation that owns it; empty: none.
    """

    name: str
    fallback: FallbackPolicy
    weight: int
    create_time: datetime
    limits: TenantLimits
    quotas: TenantQuotas
    organization: str = ""


_LIMITS = tuple(field.name for field in dataclasses.fields(TenantLimits))
_QUOTAS = tuple(field.name for field in dataclasses.fields(TenantQuotas))
_FALLBACK = ("fallback_allowed", "previous_allowed", "default_fallback")
_TENANT = tuple(
    models.tenants.c[name] for name in ("name", *_FALLBACK, "weight", "create_time", *_LIMITS, *_QUOTAS, "organization")
)
_KEPT_TENANT = TypeAdapter(Tenant)


class Tenants:
    """Use cases of tenants. Stateless; any task may call it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(
        self,
        name: str,
        *,
        fallback: FallbackPolicy,
        weight: int,
        limits: TenantLimits,
        quotas: TenantQuotas,
        organization: str = "",
        request_id: str = "",
    ) -> Tenant:
        """Creates a tenant, as an operator; without an organisation it belongs to none.

        Raises:
            AlreadyExistsError: The name is taken.
            InvalidArgumentError: The default fallback is not allowed by the policy, or the name is one of another organisation's.
            NotFoundError: There is no such organisation.
            ResourceExhaustedError: It has as many tenants as it may.
        """
        fallback.check()
        of_name, separator, _ = name.partition(SEPARATOR)
        if separator and of_name != organization:
            fault = f"names that begin with {of_name + SEPARATOR!r} are those of that organisation's tenants"
            raise InvalidArgumentError.of([Violation("tenant.name", f"{fault}: name it as the tenant's, or choose another name")])
        numbers = {**dataclasses.asdict(limits), **dataclasses.asdict(quotas)}
        row = {"name": name, "weight": weight, **fallback.columns(), **numbers}
        if organization:
            row["organization"] = organization
        request = Request.of_operator(name, request_id, "CreateTenant", row)
        async with self._database.transaction(OPERATOR, refusals={"pk_tenants": _taken(name), **_REFUSALS}) as connection:

            async def create() -> Tenant:
                if organization:
                    await take_place(connection, organization)
                return await _insert(connection, row)

            return await once(connection, request, _KEPT_TENANT, create)

    async def create_in(self, organization: str, name: str, *, fallback: FallbackPolicy, request_id: str = "") -> Tenant:
        """Creates a tenant, as the organisation that owns it; limits and quotas are those that were laid down for its tenants.

        Raises:
            AlreadyExistsError: The organisation has a tenant of this name.
            InvalidArgumentError: The default fallback is not allowed by the policy, or the name is none of the organisation's.
            ResourceExhaustedError: It has as many tenants as it may.
        """
        fallback.check()
        prefix = organization + SEPARATOR
        if not name.startswith(prefix):
            fault = f"must begin with {prefix!r}, as all names of the tenants that the organisation makes"
            raise InvalidArgumentError.of([Violation("tenant.name", fault)])
        row = {"name": name, "weight": 1, "organization": organization, **fallback.columns()}
        request = Request.of_organization(organization, request_id, "CreateTenant", row)
        scope, refusals = Scope.of_organization(organization), {"pk_tenants": _taken(name), **_REFUSALS}
        async with self._database.transaction(scope, refusals=refusals) as connection:

            async def create() -> Tenant:
                laid_down = await take_place(connection, organization)
                numbers = {**dataclasses.asdict(laid_down.tenant_limits), **dataclasses.asdict(laid_down.tenant_quotas)}
                return await _insert(connection, {**row, **numbers})

            return await once(connection, request, _KEPT_TENANT, create)

    async def adopt(self, organization: str, name: str, *, request_id: str = "") -> Tenant:
        """Gives a tenant that belongs to none to an organisation, for ever; a second time changes nothing.

        Raises:
            NotFoundError: There is no such tenant, or no such organisation.
            FailedPreconditionError: It belongs to another one.
            ResourceExhaustedError: The organisation has as many tenants as it may.
        """
        request = Request.of_operator(name, request_id, "AdoptTenant", organization)
        columns = models.tenants.c
        query = select(*_TENANT).where(columns.name == name).with_for_update()
        async with self._database.transaction(OPERATOR, refusals=_REFUSALS) as connection:

            async def adopt() -> Tenant:
                row = (await connection.execute(query)).one_or_none()
                if row is None:
                    raise NotFoundError(_NO_TENANT)
                if row.organization == organization:
                    return _tenant(row)
                if row.organization is not None:
                    raise FailedPreconditionError(f"the tenant belongs to the organisation {row.organization!r}, and stays there")
                await take_place(connection, organization)
                return await _change(connection, name, {"organization": organization})

            return await once(connection, request, _KEPT_TENANT, adopt)

    async def set_limits(self, name: str, limits: Mapping[str, int], *, request_id: str = "") -> Tenant:
        """Sets what a tenant may use at most on one data plane; limits that are not named stay.

        Raises:
            NotFoundError: There is no such tenant.
        """
        return await self._set_numbers("SetTenantLimits", name, dict(limits), request_id)

    async def set_quotas(self, name: str, quotas: Mapping[str, int], *, request_id: str = "") -> Tenant:
        """Sets what a tenant may use at most in all; quotas that are not named stay.

        Raises:
            NotFoundError: There is no such tenant.
        """
        return await self._set_numbers("SetTenantQuotas", name, dict(quotas), request_id)

    async def _set_numbers(self, method: str, name: str, numbers: dict[str, int], request_id: str) -> Tenant:
        request = Request.of_operator(name, request_id, method, numbers)
        async with self._database.transaction(OPERATOR, refusals=RACED) as connection:
            return await once(connection, request, _KEPT_TENANT, lambda: _change(connection, name, numbers))

    async def page(
        self, *, page_size: int, token: str, organization: str = "", scope: Scope = OPERATOR
    ) -> tuple[list[Tenant], str]:
        """A page of tenants by name, of all or of one organisation, and the next page's token.

        Raises:
            NotFoundError: There is no such organisation.
        """
        limit = page_limit(page_size)
        start = page_start("tenants", token, kinds=[str])
        columns = models.tenants.c
        query = select(*_TENANT).order_by(columns.name).limit(limit + 1)
        if start is not None:
            query = query.where(columns.name > start[0])
        if organization:
            query = query.where(columns.organization == organization)
        async with self._database.transaction(scope) as connection:
            if organization:
                await known_organization(connection, organization)
            rows = (await connection.execute(query)).all()
        tenants = [_tenant(row) for row in rows[:limit]]
        return tenants, page_token("tenants", [tenants[-1].name]) if len(rows) > limit else ""

    async def set_fallback(
        self,
        name: str,
        fallback: FallbackPolicy,
        *,
        keeps_policy: bool = False,
        keeps_default: bool = False,
        request_id: str = "",
    ) -> Tenant:
        """Sets what may answer when a version cannot be had in time.

        Args:
            name: The tenant.
            fallback: The policy, and what a request asks for that does not say.
            keeps_policy: The policy stays as it is.
            keeps_default: What a request asks for that does not say stays as it is.
            request_id: Identifies this change.

        Raises:
            InvalidArgumentError: The default is not allowed by the policy, both as they would be.
            NotFoundError: There is no such tenant.
        """
        values = fallback.columns()
        asked = {**values, "keeps": [keeps_policy, keeps_default]} if keeps_policy or keeps_default else values
        request = Request.of(name, request_id, "SetFallback", asked)
        async with self._database.transaction(Scope.of_tenant(name), refusals=RACED) as connection:

            async def change() -> Tenant:
                present = await _fallback(connection, name) if keeps_policy or keeps_default else fallback
                policy = present if keeps_policy else fallback
                whole = FallbackPolicy(
                    by_base=policy.by_base,
                    by_previous=policy.by_previous,
                    default=present.default if keeps_default else fallback.default,
                )
                whole.check()
                return await _change(connection, name, whole.columns())

            return await once(connection, request, _KEPT_TENANT, change)


async def _insert(connection: AsyncConnection, row: Mapping[str, Any]) -> Tenant:
    return _tenant((await connection.execute(insert(models.tenants).values(row).returning(*_TENANT))).one())


async def _fallback(connection: AsyncConnection, name: str) -> FallbackPolicy:
    """What a tenant lets answer; others that would change it wait until this transaction ends."""
    query = select(*_TENANT).where(models.tenants.c.name == name).with_for_update()
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        raise NotFoundError(_NO_TENANT)
    return _tenant(row).fallback


async def _change(connection: AsyncConnection, name: str, values: Mapping[str, Any]) -> Tenant:
    """Writes columns of a tenant and tells the data planes."""
    query = update(models.tenants).where(models.tenants.c.name == name).values(values).returning(*_TENANT)
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        raise NotFoundError(_NO_TENANT)
    await record(connection, Change(kind=ChangeKind.KEY, tenant=name))
    return _tenant(row)


def _tenant(row: Row[Any]) -> Tenant:
    fallback = FallbackPolicy(by_base=row.fallback_allowed, by_previous=row.previous_allowed, default=row.default_fallback)
    limits = TenantLimits(**{name: getattr(row, name) for name in _LIMITS})
    quotas = TenantQuotas(**{name: getattr(row, name) for name in _QUOTAS})
    return Tenant(row.name, fallback, row.weight, row.create_time, limits, quotas, row.organization or "")


def _taken(name: str) -> AlreadyExistsError:
    return AlreadyExistsError(f"there is a tenant {name!r} already")
