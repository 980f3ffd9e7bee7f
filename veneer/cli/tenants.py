"""`veneer tenant`, `veneer key`, `veneer grant`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Literal

import typer

from veneer.cli.output import note, print_json, print_table, say, when
from veneer.cli.target import Target
from veneer.controlplane.v1 import tenants_pb2
from veneer.errors import InvalidArgumentError, Violation
from veneer.operator_client import OperatorClient

tenants = typer.Typer(no_args_is_help=True)
keys = typer.Typer(no_args_is_help=True)
grants = typer.Typer(no_args_is_help=True)

_POLICIES = {
    "allowed": tenants_pb2.FALLBACK_POLICY_ALLOWED,
    "forbidden": tenants_pb2.FALLBACK_POLICY_FORBIDDEN,
    "exact": tenants_pb2.FALLBACK_POLICY_EXACT,
}

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
OfTenant = Annotated[str, typer.Option(help="As an operator or organisation, for this tenant; else for that of the key.")]
OfOrganization = Annotated[str, typer.Option("--org", help="As an operator, of this organisation.")]


@tenants.command("create")
def create_tenant(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="1 to 63 lower-case letters, digits and inner hyphens.")],
    *,
    weight: Annotated[int, typer.Option(help="Share of capacity relative to other tenants.", min=1, max=1000)] = 1,
    forbid_fallback: Annotated[bool, typer.Option("--forbid-fallback", help="The base never answers for an adapter.")] = False,
    organization: OfOrganization = "",
    json: Json = False,
) -> None:
    """Create a tenant; with an organisation's key one of its own, which is called ORGANISATION--NAME."""
    target: Target = context.obj
    policy = tenants_pb2.FALLBACK_POLICY_FORBIDDEN if forbid_fallback else tenants_pb2.FALLBACK_POLICY_ALLOWED

    async def run() -> tenants_pb2.Tenant:
        async with target.steward() as client:
            if isinstance(client, OperatorClient):
                return await client.create_tenant(name, fallback=policy, weight=weight, organization=organization)
            if weight != 1:
                raise InvalidArgumentError.of([Violation("--weight", "is for operators to set")])
            return await client.create_tenant(name, fallback=policy)

    tenant = asyncio.run(run())
    print_json(tenant) if json else say(
        f"created tenant {tenant.name}; next: veneer key create --tenant {tenant.name} --role owner"
    )


@tenants.command("limit")
def limit_tenant(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The tenant.")],
    *,
    rank_rows: Annotated[int | None, typer.Option(help="Rank rows of adapters that run at a time.", min=0, max=1 << 20)] = None,
    arena_bytes: Annotated[int | None, typer.Option(help="Bytes of its adapters on the device.", min=0, max=1 << 50)] = None,
    host_bytes: Annotated[int | None, typer.Option(help="Bytes of its adapters in host memory.", min=0, max=1 << 50)] = None,
    json: Json = False,
) -> None:
    """Set what a tenant may use at most on each data plane; what is not named stays, 0 leaves it to the data plane's settings."""
    target: Target = context.obj

    async def run() -> tenants_pb2.Tenant:
        async with target.operator() as operator:
            return await operator.set_tenant_limits(
                name, max_rank_rows=rank_rows, max_arena_bytes=arena_bytes, max_host_bytes=host_bytes
            )

    tenant = asyncio.run(run())
    print_json(tenant) if json else say(f"{tenant.name}: {limits_text(tenant.limits)}; data planes follow within 5 s")


@tenants.command("quota")
def set_quotas(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The tenant.")],
    *,
    requests_per_minute: Annotated[int | None, typer.Option(help="Requests in any 60 s.", min=0, max=10**12)] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="Tokens of prompts and answers in any 60 s.", min=0, max=10**12)
    ] = None,
    streams: Annotated[int | None, typer.Option(help="Streams at a time.", min=0, max=10**12)] = None,
    adapters: Annotated[int | None, typer.Option(help="Adapters that are not deleted.", min=0, max=10**12)] = None,
    stored_bytes: Annotated[int | None, typer.Option(help="Bytes of the files of its versions.", min=0, max=1 << 50)] = None,
    json: Json = False,
) -> None:
    """Set what a tenant may use at most in all, over all data planes; what is not named stays, 0 is no limit."""
    target: Target = context.obj

    async def run() -> tenants_pb2.Tenant:
        async with target.operator() as operator:
            return await operator.set_tenant_quotas(
                name,
                max_requests_per_minute=requests_per_minute,
                max_tokens_per_minute=tokens_per_minute,
                max_streams=streams,
                max_adapters=adapters,
                max_stored_bytes=stored_bytes,
            )

    tenant = asyncio.run(run())
    print_json(tenant) if json else say(f"{tenant.name}: {quotas_text(tenant.quotas)}; data planes follow within 5 s")


@tenants.command("list")
def list_tenants(context: typer.Context, *, organization: OfOrganization = "", json: Json = False) -> None:
    """List the tenants; with an organisation's key its own."""
    target: Target = context.obj

    async def run() -> list[tenants_pb2.Tenant]:
        async with target.steward() as client:
            return await client.tenants(organization=organization)

    found = asyncio.run(run())
    if json:
        print_json(found)
        return
    rows = []
    for one in found:
        numbers = (max(one.weight, 1), limits_text(one.limits), quotas_text(one.quotas))
        rows.append((one.name, one.organization or "–", *numbers, _fallback_text(one), when(one.create_time)))
    print_table("tenants", ("name", "organisation", "weight", "limits", "quotas", "fallback", "created"), rows)


@tenants.command("fallback")
def set_fallback(
    context: typer.Context,
    policy: Annotated[
        Literal["allowed", "forbidden", "exact"],
        typer.Argument(help="What callers may ask for: all; all but the base; nothing but the version itself."),
    ],
    *,
    default: Annotated[
        Literal["none", "not-ready", "any", "previous", "fail"] | None,
        typer.Option(help="What a request asks for that does not say; as `veneer generate --fallback`. Else it stays as it is."),
    ] = None,
    tenant: Annotated[str, typer.Option(help="As an operator, for this tenant; else for that of the key.")] = "",
    json: Json = False,
) -> None:
    """Set what may answer when a version cannot be had in time; data planes follow within 5 s."""
    target: Target = context.obj
    mode = None if default is None else tenants_pb2.DefaultFallback.Value(f"DEFAULT_FALLBACK_{default.replace('-', '_').upper()}")

    async def run() -> tenants_pb2.Tenant:
        async with target.operator() if tenant else target.client() as client:
            return await client.set_fallback(_POLICIES[policy], default=mode, tenant=tenant)

    stored = asyncio.run(run())
    print_json(stored) if json else say(f"{stored.name}: fallback {_fallback_text(stored)}")


@keys.command("create")
def create_key(
    context: typer.Context,
    *,
    role: Annotated[list[str], typer.Option(help="owner, publisher, caller or auditor; repeat for several.")],
    tenant: OfTenant = "",
    label: Annotated[str, typer.Option(help="Free text, up to 100 characters.")] = "",
    lifetime_s: Annotated[float | None, typer.Option(help="Seconds that it lives; else until revoked.", min=1)] = None,
    json: Json = False,
) -> None:
    """Create a key. It is printed this once: alone on standard output, so that a script can take it."""
    target: Target = context.obj

    async def run() -> tenants_pb2.CreateKeyResponse:
        async with target.keeper(tenant) as client:
            return await client.create_key(roles=role, tenant=tenant, label=label, lifetime_s=lifetime_s)

    response = asyncio.run(run())
    if json:
        print_json(response)
        return
    note(f"key {response.key.id} of tenant {response.key.tenant}; it cannot be shown again:")
    typer.echo(response.secret)


@keys.command("rotate")
def rotate_key(
    context: typer.Context,
    key_id: Annotated[str, typer.Argument(help="Identifier from `veneer key list`.")],
    *,
    overlap_s: Annotated[float, typer.Option(help="Seconds that it goes on working.", min=0, max=7776000)] = 86400,
    lifetime_s: Annotated[
        float | None, typer.Option(help="Seconds that the new one lives; else as long as it did.", min=1)
    ] = None,
    tenant: OfTenant = "",
    json: Json = False,
) -> None:
    """Create a key in the place of another one, which goes on working for a while. It is printed this once, alone."""
    target: Target = context.obj

    async def run() -> tenants_pb2.RotateKeyResponse:
        async with target.keeper(tenant) as client:
            return await client.rotate_key(key_id, tenant=tenant, overlap_s=overlap_s, lifetime_s=lifetime_s)

    response = asyncio.run(run())
    if json:
        print_json(response)
        return
    note(f"key {response.key.id} takes the place of {key_id}, which ends {when(response.previous.expire_time)}:")
    typer.echo(response.secret)


@keys.command("list")
def list_keys(context: typer.Context, *, tenant: OfTenant = "", json: Json = False) -> None:
    """List a tenant's keys, without their secrets."""
    target: Target = context.obj

    async def run() -> list[tenants_pb2.Key]:
        async with target.keeper(tenant) as client:
            return await client.keys(tenant=tenant)

    found = asyncio.run(run())
    if json:
        print_json(found)
        return
    print_keys(found)


@keys.command("revoke")
def revoke_key(
    context: typer.Context,
    key_id: Annotated[str, typer.Argument(help="Identifier from `veneer key list`.")],
    *,
    tenant: OfTenant = "",
    json: Json = False,
) -> None:
    """Revoke a key at once; data planes follow within 5 s."""
    target: Target = context.obj

    async def run() -> tenants_pb2.Key:
        async with target.keeper(tenant) as client:
            return await client.revoke_key(key_id, tenant=tenant)

    revoked = asyncio.run(run())
    print_json(revoked) if json else say(f"revoked {revoked.id}")


@grants.command("create")
def create_grant(
    context: typer.Context,
    adapter: Annotated[str, typer.Argument(help="Adapter of your tenant.")],
    grantee: Annotated[str, typer.Argument(help="Tenant that may use it.")],
    *,
    json: Json = False,
) -> None:
    """Let another tenant use (not read) an adapter."""
    target: Target = context.obj

    async def run() -> tenants_pb2.Grant:
        async with target.client() as client:
            return await client.create_grant(adapter, grantee)

    grant = asyncio.run(run())
    use = f"veneer generate --owner {grant.owner} --adapter {grant.adapter} …"
    print_json(grant) if json else say(f"{grant.grantee} may use it: {use}")


@grants.command("list")
def list_grants(context: typer.Context, *, json: Json = False) -> None:
    """List the grants that your tenant has given and received."""
    target: Target = context.obj

    async def run() -> tenants_pb2.ListGrantsResponse:
        async with target.client() as client:
            return await client.grants()

    found = asyncio.run(run())
    if json:
        print_json(found)
        return
    print_table("given", ("adapter", "to", "since"), [(one.adapter, one.grantee, when(one.create_time)) for one in found.given])
    print_table(
        "received", ("owner", "adapter", "since"), [(one.owner, one.adapter, when(one.create_time)) for one in found.received]
    )


@grants.command("revoke")
def revoke_grant(
    context: typer.Context,
    adapter: Annotated[str, typer.Argument(help="Adapter of your tenant.")],
    grantee: Annotated[str, typer.Argument(help="Tenant that may no longer use it.")],
    *,
    json: Json = False,
) -> None:
    """Withdraw a grant."""
    target: Target = context.obj

    async def run() -> None:
        async with target.client() as client:
            await client.revoke_grant(adapter, grantee)

    asyncio.run(run())
    print_json({"adapter": adapter, "grantee": grantee}) if json else say(f"{grantee} may no longer use {adapter}")


def _fallback_text(tenant: tenants_pb2.Tenant) -> str:
    policy = tenants_pb2.FallbackPolicy.Name(tenant.fallback).removeprefix("FALLBACK_POLICY_").lower()
    default = tenants_pb2.DefaultFallback.Name(tenant.default_fallback).removeprefix("DEFAULT_FALLBACK_")
    return f"{policy}, by default {default.lower().replace('_', '-')}"


def limits_text(limits: tenants_pb2.TenantLimits) -> str:
    """What a tenant may use at most, in words."""
    given = (
        (limits.max_rank_rows, "rank rows"),
        (limits.max_arena_bytes, "B on the device"),
        (limits.max_host_bytes, "B in host memory"),
    )
    return ", ".join(f"{number:,} {unit}" for number, unit in given if number) or "none of its own"


def quotas_text(quotas: tenants_pb2.TenantQuotas) -> str:
    """What a tenant may use at most in all, in words."""
    given = (
        (quotas.max_requests_per_minute, "requests/min"),
        (quotas.max_tokens_per_minute, "tokens/min"),
        (quotas.max_streams, "streams"),
        (quotas.max_adapters, "adapters"),
        (quotas.max_stored_bytes, "B of files"),
    )
    return ", ".join(f"{number:,} {unit}" for number, unit in given if number) or "no quotas"


def _role_names(key: tenants_pb2.Key) -> list[str]:
    return [tenants_pb2.Role.Name(role).removeprefix("ROLE_").lower() for role in key.roles]


def print_keys(keys: Sequence[tenants_pb2.Key]) -> None:
    """Prints keys as a table."""
    rows = [
        (
            one.id,
            ", ".join(_role_names(one)),
            one.label,
            when(one.create_time),
            when(one.expire_time),
            when(one.revoke_time),
            one.successor,
        )
        for one in keys
    ]
    print_table("keys", ("id", "roles", "label", "created", "expires", "revoked", "rotated to"), rows)
