"""Who a credential belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from controlplane.coalesced import Coalesced
from controlplane.db import Database, translated
from controlplane.fallback import FallbackPolicy
from controlplane.limits import TenantLimits, TenantQuotas
from controlplane.pipeline import Statement
from controlplane.remembered import SOON_S, Freshness, node_subject
from controlplane.settings import AUTH_ROLE
from controlplane.vault import Vault
from veneer.access import Identity, Kind, current_kind, current_peer
from veneer.errors import UnauthenticatedError
from veneer.key_lookups import KeyLookups

_IDENTIFY = Statement(
    "identify",
    """
    SELECT i.kind, i.id::text, i.tenant, i.roles, i.expire_time, i.fallback_allowed, i.weight, i.max_rank_rows, i.max_arena_bytes,
           i.max_host_bytes, f.previous_allowed, f.default_fallback, q.max_requests_per_minute, q.max_tokens_per_minute,
           q.max_streams, q.max_adapters, q.max_stored_bytes
    FROM identify($1) i LEFT JOIN LATERAL fallback_of(i.tenant) f ON true LEFT JOIN LATERAL quotas_of(i.tenant) q ON true
    """,
)


class _Row(NamedTuple):
    kind: Kind
    id: str
    tenant: str  # the organisation, for its keys
    roles: list[str]
    expire_time: datetime | None
    fallback_allowed: bool
    weight: int
    max_rank_rows: int
    max_arena_bytes: int
    max_host_bytes: int
    previous_allowed: bool | None  # from here on None for who is no tenant
    default_fallback: str | None
    max_requests_per_minute: int | None
    max_tokens_per_minute: int | None
    max_streams: int | None
    max_adapters: int | None
    max_stored_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The holder of a valid credential.

    Attributes:
        identity: Kind, identifier, tenant or organisation, and roles, as calls know them.
        expire_time: When the credential ends by itself; None: never.
        fallback: For tenant keys: what may answer when a version cannot be had in time.
        weight: For tenant keys: share of capacity relative to other tenants.
        limits: For tenant keys: what the tenant may use at most on one data plane.
        quotas: For tenant keys: what it may use at most in all.
    """

    identity: Identity
    expire_time: datetime | None
    fallback: FallbackPolicy
    weight: int
    limits: TenantLimits
    quotas: TenantQuotas


class Identities:
    """Looks credentials up, as the role that may do nothing else. Also the `Authenticator` of both listeners.

    Owned by one event loop. Holders of keys of tenants and nodes are remembered; who asks for one credential at the same time
    shares a lookup, and lookups of credentials that were not seen before are bounded.
    """

    def __init__(self, database: Database, vault: Vault, freshness: Freshness, lookups: KeyLookups | None = None) -> None:
        self._lines = database.lines(AUTH_ROLE, _IDENTIFY)
        self._vault = vault
        self._freshness = freshness
        self._bound = lookups or KeyLookups()
        self._lookups = Coalesced[bytes, Holder | None](self._look_up)

    async def find(self, key_digest: bytes) -> Holder | None:
        """The holder of the credential with this SHA-256; None for unknown, expired, used and revoked ones alike.

        Raises:
            UnavailableError: The database is away.
            ResourceExhaustedError: The credential was not seen before, and too many of that kind were looked up in vain.
        """
        await self._freshness.check()
        tenants, nodes = self._freshness.tenants, self._freshness.nodes
        known: Holder | None = tenants.get(key_digest) or nodes.get(key_digest)
        if known is not None and not _ends_soon(known, self._freshness.now_s):
            return known
        epochs = tenants.epoch, nodes.epoch
        # A node bounds its own callers, whose keys it shows: an unknown one among them says nothing of the node's other callers.
        peer = "" if current_kind() == "node" else current_peer()
        try:
            holder = await self._bound.look_up(key_digest, lambda: self._holder(key_digest), peer=peer)
        except UnauthenticatedError:
            return None
        if holder.identity.kind == "tenant":
            tenant = holder.identity.tenant
            tenants.put(key_digest, holder, about=[(tenant, "")], epoch=epochs[0], tenant=tenant)
        elif holder.identity.kind == "node":
            nodes.put(key_digest, holder, about=[node_subject(holder.identity.key_id)], epoch=epochs[1])
        return holder

    async def _holder(self, key_digest: bytes) -> Holder:
        holder = await self._lookups.get(key_digest)
        if holder is None:
            raise UnauthenticatedError("no valid credential")
        return holder

    async def _look_up(self, key_digest: bytes) -> Holder | None:
        with translated():
            [rows] = await self._lines.ask((_IDENTIFY, [self._vault.key_hash(key_digest)]))
        if not rows:
            return None
        row = _Row(*rows[0])
        owner = {"organization" if row.kind == "organization" else "tenant": row.tenant}
        return Holder(
            identity=Identity(kind=row.kind, key_digest=key_digest, key_id=row.id, roles=frozenset(row.roles), **owner),
            expire_time=row.expire_time,
            fallback=FallbackPolicy(
                by_base=row.fallback_allowed, by_previous=bool(row.previous_allowed), default=row.default_fallback or "NONE"
            ),
            weight=row.weight,
            limits=TenantLimits(
                max_rank_rows=row.max_rank_rows, max_arena_bytes=row.max_arena_bytes, max_host_bytes=row.max_host_bytes
            ),
            quotas=TenantQuotas(
                max_requests_per_minute=row.max_requests_per_minute or 0,
                max_tokens_per_minute=row.max_tokens_per_minute or 0,
                max_streams=row.max_streams or 0,
                max_adapters=row.max_adapters or 0,
                max_stored_bytes=row.max_stored_bytes or 0,
            ),
        )

    async def authenticate(self, key_digest: bytes) -> Identity | None:
        """See `veneer.access.Authenticator`."""
        holder = await self.find(key_digest)
        return None if holder is None else holder.identity


def _ends_soon(holder: Holder, now_s: float) -> bool:
    """Whether a key ends so soon that only the database's clock may tell whether it has."""
    return holder.expire_time is not None and holder.expire_time.timestamp() < now_s + SOON_S
