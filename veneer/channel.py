"""Channels from callers to a plane: transport security, keepalive, retries, and errors with their families."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from veneer.errors import InvalidArgumentError, Violation
from veneer.statuses import error_of

# Calls whose effect is the same when they run twice, by service: some only under a request_id, which the clients send with each.
# gRPC retries them on UNAVAILABLE and on CANCELLED (a server that stops resets them so; a call that its own caller cancels is
# over), and only before the first message of the answer. No upload is among them: see `open_channel`.
_REPEATABLE: dict[str, tuple[str, ...]] = {
    "veneer.controlplane.v1.BaseService": ("RegisterBase", "ListBases"),
    "veneer.controlplane.v1.CatalogService": (
        "GetAdapter",
        "ListAdapters",
        "ListVersions",
        "StartCanary",
        "GetCanary",
        "StopCanary",
        "SetAlias",
        "Rollback",
        "Promote",
        "FreezeAlias",
        "RetireVersion",
        "DeleteVersion",
        "DeleteAdapter",
    ),
    "veneer.controlplane.v1.NodeService": ("ListNodes", "RevokeNode"),
    "veneer.controlplane.v1.OrganizationService": (
        "CreateOrganization",
        "ListOrganizations",
        "GetOrganization",
        "SetOrganizationQuotas",
        "AdoptTenant",
        "CreateOrganizationKey",
        "RotateOrganizationKey",
        "ListOrganizationKeys",
        "RevokeOrganizationKey",
    ),
    "veneer.controlplane.v1.PlacementService": ("LocateAdapter",),
    "veneer.controlplane.v1.SignatureService": (
        "AddTrustedKey",
        "ListTrustedKeys",
        "RemoveTrustedKey",
        "SetSignaturePolicy",
        "AttachSignature",
    ),
    "veneer.controlplane.v1.TenantService": (
        "CreateTenant",
        "ListTenants",
        "SetTenantLimits",
        "SetTenantQuotas",
        "SetFallback",
        "CreateKey",
        "RotateKey",
        "ListKeys",
        "RevokeKey",
        "CreateGrant",
        "ListGrants",
        "ListAudit",
        "ListUsage",
        "RevokeGrant",
    ),
    "veneer.dataplane.v1.GenerationService": ("Generate",),
    "veneer.dataplane.v1.AdminService": ("GetResidency", "UnloadVersion", "PinVersion", "UnpinVersion", "ListPins"),
}
_RETRY_POLICY = {
    "maxAttempts": 3,
    "initialBackoff": "0.1s",
    "maxBackoff": "2s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
}
_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{"service": service, "method": method} for service, methods in _REPEATABLE.items() for method in methods],
            "retryPolicy": _RETRY_POLICY,
        }
    ],
    # When most calls fail, retries only add to the load.
    "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
}
_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", 4 << 20),
    # A larger request is not retried: room for the largest that planes take (4 MiB) with its metadata; the default is 256 KiB.
    ("grpc.per_rpc_retry_buffer_size", 5 << 20),
    # A long prefill sends no data: ping, but no oftener than the planes allow (20 s).
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A plane that restarts is back within seconds; the defaults would look again after up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """Transport security of a client; all files are PEM.

    Attributes:
        ca: Authorities to trust; None trusts those of the system.
        certificate: Our own chain, for planes that ask for one.
        key: Its private key.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


def open_channel(address: str, *, tls: ClientTls | None, retries: bool = True) -> grpc.aio.Channel:
    """Opens a channel; it connects at its first call.

    Args:
        address: Where to, `host:port`.
        tls: Transport security; None is plaintext.
        retries: Whether gRPC repeats calls there; not where the caller has other places to try first, and never for uploads: gRPC
            1.85 ends the process when it repeats one ("ILLEGAL STATE: FORWARDED_BATCH"), which it does without a policy too, as
            after a GOAWAY that left the call out.

    Raises:
        InvalidArgumentError: A TLS file cannot be read.
    """
    options = (*_OPTIONS, ("grpc.enable_retries", int(retries)))
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(_read(tls.ca), _read(tls.key), _read(tls.certificate))
    return grpc.aio.secure_channel(address, credentials, options=options)


@contextmanager
def typed_errors() -> Iterator[None]:
    """Turns a gRPC error into the `VeneerError` that the plane raised, or UNAVAILABLE where the connection ended the call."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_of(error) from error


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    """The metadata that shows a key.

    Raises:
        InvalidArgumentError: The key holds what no key and no header can hold, such as the line break at the end of its file.
    """
    if not key:
        return ()
    if not is_header_text(key):
        raise InvalidArgumentError.of([Violation("key", "holds a character that no key has, perhaps a line break at its end")])
    return (("authorization", f"Bearer {key}"),)


def is_header_text(text: str) -> bool:
    """Whether metadata can carry it: printable ASCII; gRPC ends a call with any other without a status."""
    return text.isascii() and text.isprintable()


async def pages(fetch: Callable[[str], Awaitable[Any]], field: str) -> AsyncIterator[Any]:
    """Goes through all pages of a list call: `fetch(page_token)` gives one response, whose `field` holds the rows."""
    token = ""
    while True:
        response = await fetch(token)
        for row in getattr(response, field):
            yield row
        token = response.next_page_token
        if not token:
            return


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError.of([Violation("tls", f"cannot read {path}: {error.strerror}")]) from error
