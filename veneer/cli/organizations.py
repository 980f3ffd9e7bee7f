"""`veneer org`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from veneer.cli.audit import print_writes
from veneer.cli.output import note, print_json, print_table, say, size, when
from veneer.cli.target import Target
from veneer.cli.tenants import Json, limits_text, print_keys, quotas_text
from veneer.controlplane.v1 import organizations_pb2, tenants_pb2
from veneer.errors import InvalidArgumentError, Violation

organizations = typer.Typer(no_args_is_help=True)
keys = typer.Typer(no_args_is_help=True)
organizations.add_typer(keys, name="key", help="Keys of an organisation (for its owners, and with --org for operators).")

_EACH = "What each tenant that it makes may use"
Named = Annotated[str, typer.Option("--org", help="As an operator, of this organisation; else of the key in use.")]
MaxTenants = Annotated[int | None, typer.Option(help="Tenants.", min=0, max=10**12)]
MaxAdapters = Annotated[int | None, typer.Option(help="Adapters of all its tenants that are not deleted.", min=0, max=10**12)]
MaxBytes = Annotated[int | None, typer.Option(help="Bytes of the files of all their versions.", min=0, max=1 << 50)]
Requests = Annotated[int | None, typer.Option(help="Requests in any 60 s.", min=0, max=10**12, rich_help_panel=_EACH)]
Tokens = Annotated[
    int | None, typer.Option(help="Tokens of prompts and answers in any 60 s.", min=0, max=10**12, rich_help_panel=_EACH)
]
Streams = Annotated[int | None, typer.Option(help="Streams at a time.", min=0, max=10**12, rich_help_panel=_EACH)]
Adapters = Annotated[int | None, typer.Option(help="Adapters that are not deleted.", min=0, max=10**12, rich_help_panel=_EACH)]
Stored = Annotated[
    int | None, typer.Option(help="Bytes of the files of its versions.", min=0, max=1 << 50, rich_help_panel=_EACH)
]
RankRows = Annotated[
    int | None, typer.Option(help="Rank rows that run at a time on a data plane.", min=0, max=1 << 20, rich_help_panel=_EACH)
]


@organizations.command("create")
def create(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="1 to 30 lower-case letters, digits and single inner hyphens.")],
    *,
    max_tenants: MaxTenants = None,
    max_adapters: MaxAdapters = None,
    max_stored_bytes: MaxBytes = None,
    tenant_requests_per_minute: Requests = None,
    tenant_tokens_per_minute: Tokens = None,
    tenant_streams: Streams = None,
    tenant_adapters: Adapters = None,
    tenant_stored_bytes: Stored = None,
    tenant_rank_rows: RankRows = None,
    json: Json = False,
) -> None:
    """Create an organisation; what is not given has no limit. For operators."""
    target: Target = context.obj
    quotas = organizations_pb2.OrganizationQuotas(
        max_tenants=max_tenants or 0, max_adapters=max_adapters or 0, max_stored_bytes=max_stored_bytes or 0
    )
    each = tenants_pb2.TenantQuotas(
        max_requests_per_minute=tenant_requests_per_minute or 0,
        max_tokens_per_minute=tenant_tokens_per_minute or 0,
        max_streams=tenant_streams or 0,
        max_adapters=tenant_adapters or 0,
        max_stored_bytes=tenant_stored_bytes or 0,
    )
    limits = tenants_pb2.TenantLimits(max_rank_rows=tenant_rank_rows or 0)

    async def run() -> organizations_pb2.Organization:
        async with target.operator() as operator:
            return await operator.create_organization(name, quotas=quotas, tenant_limits=limits, tenant_quotas=each)

    made = asyncio.run(run())
    print_json(made) if json else say(
        f"created organisation {made.name}; next: veneer org key create --org {made.name} --role owner"
    )


@organizations.command("quota")
def set_quotas(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The organisation.")],
    *,
    max_tenants: MaxTenants = None,
    max_adapters: MaxAdapters = None,
    max_stored_bytes: MaxBytes = None,
    tenant_requests_per_minute: Requests = None,
    tenant_tokens_per_minute: Tokens = None,
    tenant_streams: Streams = None,
    tenant_adapters: Adapters = None,
    tenant_stored_bytes: Stored = None,
    tenant_rank_rows: RankRows = None,
    json: Json = False,
) -> None:
    """Set the ceilings of an organisation, and what tenants may use that it makes from now on.

    What is not named stays as it is; 0 is no limit.
    """
    target: Target = context.obj
    numbers = {
        "quotas.max_tenants": max_tenants,
        "quotas.max_adapters": max_adapters,
        "quotas.max_stored_bytes": max_stored_bytes,
        "tenant_quotas.max_requests_per_minute": tenant_requests_per_minute,
        "tenant_quotas.max_tokens_per_minute": tenant_tokens_per_minute,
        "tenant_quotas.max_streams": tenant_streams,
        "tenant_quotas.max_adapters": tenant_adapters,
        "tenant_quotas.max_stored_bytes": tenant_stored_bytes,
        "tenant_limits.max_rank_rows": tenant_rank_rows,
    }
    given = {path: number for path, number in numbers.items() if number is not None}
    if not given:
        raise InvalidArgumentError.of([Violation("org quota", "name at least one number; `--help` lists them, 0 takes one away")])

    def part(of: str) -> dict[str, int]:
        return {path.partition(".")[2]: number for path, number in given.items() if path.startswith(f"{of}.")}

    async def run() -> organizations_pb2.Organization:
        async with target.operator() as operator:
            return await operator.set_organization_quotas(
                name,
                quotas=organizations_pb2.OrganizationQuotas(**part("quotas")),
                tenant_limits=tenants_pb2.TenantLimits(**part("tenant_limits")),
                tenant_quotas=tenants_pb2.TenantQuotas(**part("tenant_quotas")),
                fields=list(given),
            )

    changed = asyncio.run(run())
    print_json(changed) if json else say(f"{changed.name}: {_ceilings(changed.quotas)}; each new tenant: {_each(changed)}")


@organizations.command("list")
def list_organizations(context: typer.Context, *, json: Json = False) -> None:
    """List the organisations. For operators."""
    target: Target = context.obj

    async def run() -> list[organizations_pb2.Organization]:
        async with target.operator() as operator:
            return await operator.organizations()

    found = asyncio.run(run())
    if json:
        print_json(found)
        return
    rows = [(one.name, _ceilings(one.quotas), _each(one), when(one.create_time)) for one in found]
    print_table("organisations", ("name", "ceilings", "each new tenant", "created"), rows)


@organizations.command("show")
def show(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="As an operator, the organisation; else that of the key in use.")] = "",
    *,
    json: Json = False,
) -> None:
    """Show an organisation: its ceilings, and what its tenants have together."""
    target: Target = context.obj

    async def run() -> organizations_pb2.GetOrganizationResponse:
        async with target.steward() as client:
            return await client.organization(name)

    found = asyncio.run(run())
    if json:
        print_json(found)
        return
    quotas, use = found.organization.quotas, found.use
    rows = [
        ("tenants", f"{use.num_tenants:,}", f"{quotas.max_tenants:,}" if quotas.max_tenants else "–"),
        ("adapters", f"{use.num_adapters:,}", f"{quotas.max_adapters:,}" if quotas.max_adapters else "–"),
        ("files", size(use.stored_bytes), size(quotas.max_stored_bytes) if quotas.max_stored_bytes else "–"),
    ]
    print_table(f"organisation {found.organization.name}", ("what", "there is", "at most"), rows)
    say(f"each new tenant: {_each(found.organization)}; they are called {found.organization.name}--NAME")


@organizations.command("adopt")
def adopt(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The organisation.")],
    tenant: Annotated[str, typer.Argument(help="Tenant that belongs to none.")],
    *,
    json: Json = False,
) -> None:
    """Give a tenant to an organisation, for ever. For operators."""
    target: Target = context.obj

    async def run() -> tenants_pb2.Tenant:
        async with target.operator() as operator:
            return await operator.adopt_tenant(name, tenant)

    adopted = asyncio.run(run())
    print_json(adopted) if json else say(f"tenant {adopted.name} belongs to organisation {adopted.organization}")


@organizations.command("audit")
def audit(
    context: typer.Context,
    *,
    limit: Annotated[int, typer.Option(help="How many entries.", min=1, max=1_000_000)] = 50,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with every entry whole.")] = False,
) -> None:
    """Show the last writes to the organisation of the key in use; `veneer audit --tenant` shows those to a tenant of its."""
    target: Target = context.obj

    async def run() -> list[tenants_pb2.AuditEntry]:
        async with target.organization() as client:
            return await client.audit(limit=limit)

    found = asyncio.run(run())
    print_json(found) if json else print_writes(found)


@keys.command("create")
def create_key(
    context: typer.Context,
    *,
    role: Annotated[list[str], typer.Option(help="owner or auditor; repeat for both.")],
    name: Named = "",
    label: Annotated[str, typer.Option(help="Free text, up to 100 characters.")] = "",
    lifetime_s: Annotated[float | None, typer.Option(help="Seconds that it lives; else until revoked.", min=1)] = None,
    json: Json = False,
) -> None:
    """Create a key. It is printed this once: alone on standard output, so that a script can take it."""
    target: Target = context.obj

    async def run() -> organizations_pb2.CreateOrganizationKeyResponse:
        async with target.steward() as client:
            return await client.create_organization_key(roles=role, organization=name, label=label, lifetime_s=lifetime_s)

    response = asyncio.run(run())
    if json:
        print_json(response)
        return
    note(f"key {response.key.id} of organisation {response.key.organization}; it cannot be shown again:")
    typer.echo(response.secret)


@keys.command("rotate")
def rotate_key(
    context: typer.Context,
    key_id: Annotated[str, typer.Argument(help="Identifier from `veneer org key list`.")],
    *,
    overlap_s: Annotated[float, typer.Option(help="Seconds that it goes on working.", min=0, max=7776000)] = 86400,
    lifetime_s: Annotated[
        float | None, typer.Option(help="Seconds that the new one lives; else as long as it did.", min=1)
    ] = None,
    name: Named = "",
    json: Json = False,
) -> None:
    """Create a key in the place of another one, which goes on working for a while. It is printed this once, alone."""
    target: Target = context.obj

    async def run() -> organizations_pb2.RotateOrganizationKeyResponse:
        async with target.steward() as client:
            return await client.rotate_organization_key(key_id, organization=name, overlap_s=overlap_s, lifetime_s=lifetime_s)

    response = asyncio.run(run())
    if json:
        print_json(response)
        return
    note(f"key {response.key.id} takes the place of {key_id}, which ends {when(response.previous.expire_time)}:")
    typer.echo(response.secret)


@keys.command("list")
def list_keys(context: typer.Context, *, name: Named = "", json: Json = False) -> None:
    """List an organisation's keys, without their secrets."""
    target: Target = context.obj

    async def run() -> list[tenants_pb2.Key]:
        async with target.steward() as client:
            return await client.organization_keys(organization=name)

    found = asyncio.run(run())
    print_json(found) if json else print_keys(found)


@keys.command("revoke")
def revoke_key(
    context: typer.Context,
    key_id: Annotated[str, typer.Argument(help="Identifier from `veneer org key list`.")],
    *,
    name: Named = "",
    json: Json = False,
) -> None:
    """Revoke a key at once."""
    target: Target = context.obj

    async def run() -> tenants_pb2.Key:
        async with target.steward() as client:
            return await client.revoke_organization_key(key_id, organization=name)

    revoked = asyncio.run(run())
    print_json(revoked) if json else say(f"revoked {revoked.id}")


def _ceilings(quotas: organizations_pb2.OrganizationQuotas) -> str:
    """What its tenants may have at most together, in words."""
    given = (
        (quotas.max_tenants, "tenants"),
        (quotas.max_adapters, "adapters"),
        (quotas.max_stored_bytes, "B of files"),
    )
    return ", ".join(f"{number:,} {unit}" for number, unit in given if number) or "no ceilings"


def _each(organization: organizations_pb2.Organization) -> str:
    """What each tenant that it makes may use, in words."""
    return f"{quotas_text(organization.tenant_quotas)}, limits: {limits_text(organization.tenant_limits)}"
