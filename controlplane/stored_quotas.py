"""Quotas of what a tenant, and its organisation's tenants together, keep in the catalogue: adapters, and bytes of files."""

from __future__ import annotations

from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from controlplane import models
from controlplane.locks import Lock, hold
from veneer.errors import ResourceExhaustedError, Violation

_CEILING = text("SELECT organization, max_adapters, max_stored_bytes FROM stored_in_organization(NULL, NULL)")
_TOGETHER = text("SELECT * FROM stored_in_organization(:tenant, :adapter)")


async def check_stored(connection: AsyncConnection, tenant: str, adapter: str, *, num_bytes: int, final: bool) -> None:
    """Checks that a tenant may keep a version of an adapter.

    Args:
        connection: A transaction of the tenant's own.
        tenant: Whose version it is.
        adapter: The adapter, which may not exist yet.
        num_bytes: Bytes of the version's files; 1 where they are not known yet.
        final: Whether this transaction publishes it: then others of the tenant wait until it ends, where there are quotas.

    Raises:
        ResourceExhaustedError: It may not.
    """
    tenants, adapters, versions = models.tenants.c, models.adapters.c, models.versions.c
    query = select(tenants.max_adapters, tenants.max_stored_bytes, tenants.organization).where(tenants.name == tenant)
    if final:  # an organisation that takes the tenant over now waits for what is published, or has it counted here
        query = query.with_for_update(read=True, key_share=True)
    quotas = (await connection.execute(query)).one_or_none()
    if quotas is None:
        return
    if final and (quotas.max_adapters or quotas.max_stored_bytes):
        await hold(connection, Lock.STORED, tenant)
    if quotas.max_adapters:
        others = select(func.count()).where(adapters.tenant == tenant, adapters.name != adapter, adapters.delete_time.is_(None))
        num_adapters = (await connection.execute(others)).scalar_one()
        if num_adapters + 1 > quotas.max_adapters:
            used = f"the tenant has {num_adapters} adapters"
            raise _refusal("max_adapters", f"{used}, at most {quotas.max_adapters}; delete one, or have the quota raised")
    if quotas.max_stored_bytes:
        size = func.coalesce(func.sum(versions.config_bytes + versions.weights_bytes), 0)
        stored = int((await connection.execute(select(size).where(versions.tenant == tenant))).scalar_one())
        if stored + num_bytes > quotas.max_stored_bytes:
            more = f" and this one {num_bytes} more" if final else ""
            used = f"the tenant's versions take {stored} bytes{more}"
            raise _refusal("max_stored_bytes", f"{used}, at most {quotas.max_stored_bytes}; delete versions, or have it raised")
    if quotas.organization is not None:
        await _check_organization(connection, tenant, adapter, num_bytes=num_bytes, final=final)


async def _check_organization(connection: AsyncConnection, tenant: str, adapter: str, *, num_bytes: int, final: bool) -> None:
    """Checks the ceilings of the tenant's organisation; a refusal says nothing of what its other tenants have."""
    ceiling = (await connection.execute(_CEILING)).one()
    if not (ceiling.max_adapters or ceiling.max_stored_bytes):
        return
    if final:
        await hold(connection, Lock.ORGANIZATION_STORED, ceiling.organization)
    stored = (await connection.execute(_TOGETHER, {"tenant": tenant, "adapter": adapter})).one()
    remedy = "have some deleted, or have the ceiling raised"
    if stored.max_adapters and stored.num_adapters + 1 > stored.max_adapters:
        raise _refusal(
            "max_adapters", f"the tenant's organisation has its {stored.max_adapters} adapters; {remedy}", "organization."
        )
    if stored.max_stored_bytes and stored.stored_bytes + num_bytes > stored.max_stored_bytes:
        used = f"more than the {stored.max_stored_bytes} bytes of the tenant's organisation would be taken"
        raise _refusal("max_stored_bytes", f"{used}; {remedy}", "organization.")


def _refusal(name: str, text: str, whose: str = "") -> ResourceExhaustedError:
    return ResourceExhaustedError(f"quota {whose}{name}: {text}", violations=[Violation(f"{whose}quotas.{name}", text)])
