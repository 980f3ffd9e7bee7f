"""What an adapter reference means for a caller: the hot path of the control plane."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from enum import IntEnum
from typing import NamedTuple

from controlplane.catalog import QUARANTINED, READY, RETIRED, STABLE
from controlplane.db import Database, Scope, translated
from controlplane.fallback import FallbackPolicy
from controlplane.identities import Holder, Identities
from controlplane.limits import TenantLimits, TenantQuotas
from controlplane.node_versions import NodeVersion, NodeVersions
from controlplane.pipeline import Statement
from controlplane.remembered import Freshness, Memory
from controlplane.settings import APP_ROLE
from controlplane.tickets import ticket
from controlplane.vault import Vault
from veneer.errors import UnauthenticatedError

_CALLER = "caller"
_MAX_PRIORITY = {"caller": 0, "auditor": 0, "publisher": 50, "owner": 100}


class Refusal(IntEnum):
    """Why a reference has no resolution, numbered as in the API."""

    NOT_FOUND = 1
    ROLE = 2
    BASE_MISMATCH = 3
    RETIRED = 4
    QUARANTINED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """An adapter as a caller wrote it.

    Attributes:
        adapter: Name; empty means the base itself.
        owner: Tenant that owns it; empty means the caller's own.
        alias: Alias; empty means `stable`. Ignored when a version is named.
        version: Digest of a version; empty when an alias is followed.
    """

    adapter: str
    owner: str = ""
    alias: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A caller as data planes know it."""

    tenant: str
    key_id: str
    roles: tuple[str, ...]
    fallback: FallbackPolicy
    weight: int
    limits: TenantLimits
    quotas: TenantQuotas
    ticket: bytes
    cache_salt: bytes
    expire_time: datetime | None
    max_priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Servable:
    """A version that a node may serve to the caller, with its share, and the one before it, if that may be served too."""

    digest: str
    number: int
    weight: int
    max_rank: int
    size_bytes: int
    state: str
    invocation_tokens: tuple[int, ...] = ()
    previous: Servable | None = None
    ticket: bytes = b""
    points: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """What a reference means; without arms for the base."""

    owner: str = ""
    adapter: str = ""
    alias: str = ""
    generation: int = 0
    arms: tuple[Servable, ...] = ()
    split_salt: bytes = b""


@dataclass(frozen=True, slots=True)
class Resolved:
    """The caller, and what the reference means or why it means nothing."""

    caller: Caller
    outcome: Resolution | Refusal


class _Question(NamedTuple):
    tenant: str
    reference: Reference
    base_digest: str


_BY_ALIAS = Statement(
    "by_alias",
    """
    SELECT a.generation, b.weight, v.digest, v.number, v.max_rank, v.config_bytes + v.weights_bytes AS size_bytes, v.state,
           v.base_digest, v.report -> 'invocation_tokens' AS invocation_tokens, b.points, before.*
    FROM aliases a
    JOIN arms b ON b.tenant = a.tenant AND b.adapter = a.adapter AND b.alias = a.name AND b.generation = a.generation
    JOIN versions v ON v.tenant = b.tenant AND v.digest = b.version
    LEFT JOIN LATERAL (
        SELECT w.digest AS before_digest, w.number AS before_number, w.max_rank AS before_max_rank,
               w.config_bytes + w.weights_bytes AS before_size_bytes,
               w.report -> 'invocation_tokens' AS before_invocation_tokens
        FROM arms p JOIN versions w ON w.tenant = p.tenant AND w.digest = p.version
        WHERE p.tenant = b.tenant AND p.adapter = b.adapter AND p.alias = b.alias AND w.state = 'READY'
          AND w.base_digest = $4
          AND p.generation < (SELECT min(f.generation) FROM arms f WHERE f.tenant = b.tenant AND f.adapter = b.adapter
                              AND f.alias = b.alias AND f.version = b.version)
          AND NOT EXISTS (SELECT FROM arms o WHERE o.tenant = p.tenant AND o.adapter = p.adapter AND o.alias = p.alias
                          AND o.generation = p.generation AND o.position <> p.position)
        ORDER BY p.generation DESC LIMIT 1
    ) before ON true
    WHERE a.tenant = $1 AND a.adapter = $2 AND a.name = $3
    ORDER BY b.position
    """,
)
"""The arms of an alias, each with the version before it: of those still ready, the one to which all traffic last went before the
alias first served the arm's. So what a rollback left is never taken for an earlier version of what came after it.
"""
_BY_VERSION = Statement(
    "by_version",
    """
    SELECT 0 AS generation, 1 AS weight, digest, number, max_rank, config_bytes + weights_bytes AS size_bytes, state, base_digest,
           report -> 'invocation_tokens' AS invocation_tokens, NULL::INTEGER[] AS points
    FROM versions WHERE tenant = $1 AND adapter = $2 AND digest = $3
    """,
)
_SCOPE = Statement("scope", "SELECT set_config('app.tenant', $1, true), set_config('app.scope', $2, true)")


class _Row(NamedTuple):
    generation: int
    weight: int
    digest: str
    number: int
    max_rank: int
    size_bytes: int
    state: str
    base_digest: str
    invocation_tokens: list[int] | None  # the reports of older versions do not have the field
    points: list[int] | None
    before_digest: str | None = None
    before_number: int = 0
    before_max_rank: int = 0
    before_size_bytes: int = 0
    before_invocation_tokens: list[int] | None = None


class Resolver:
    """Resolves references, and remembers what they mean. Owned by one event loop."""

    def __init__(
        self, database: Database, identities: Identities, vault: Vault, freshness: Freshness, node_versions: NodeVersions
    ) -> None:
        self._lines = database.lines(APP_ROLE, _SCOPE, _BY_ALIAS, _BY_VERSION)
        self._identities = identities
        self._vault = vault
        self._node_versions = node_versions
        self._memory: Memory[_Question, Resolution | Refusal] = freshness.adapters

    async def resolve(self, key_digest: bytes, reference: Reference, *, base_digest: str, node: str = "") -> Resolved:
        """Tells who a key belongs to and what a reference means for its tenant on a node with this base.

        The lookup runs in the caller's own row-level-security scope, which holds its own adapters and those granted to it; so a
        foreign adapter and one that does not exist take the same query and give the same answer. What is not there is not
        remembered: else the time of an answer would tell of a change to an adapter of somebody else. That the node was told of
        every version in the answer is noted before the answer is given: the node may ask for their files at once.

        Raises:
            UnauthenticatedError: No tenant's valid key has this digest.
            UnavailableError: The database is away.
        """
        holder = await self._identities.find(key_digest)  # from here on what is remembered is as of this call
        if holder is None or holder.identity.kind != "tenant":
            raise UnauthenticatedError("no valid credential")
        tenant, caller = holder.identity.tenant, self._caller(holder, node)
        if _CALLER not in holder.identity.roles:
            return Resolved(caller, Refusal.ROLE)
        if not reference.adapter:
            return Resolved(caller, Resolution())
        outcome = await self._meaning(tenant, reference, base_digest=base_digest)
        if node and isinstance(outcome, Resolution):
            await self._node_versions.note(_told(outcome, node))
            outcome = self._with_tickets(outcome, tenant, node)
        return Resolved(caller, outcome)

    async def _meaning(self, tenant: str, reference: Reference, *, base_digest: str) -> Resolution | Refusal:
        """What is remembered as of the last look at changes, else what the catalogue says."""
        question = _Question(tenant, reference, base_digest)
        outcome = self._memory.get(question)
        if outcome is None:
            epoch = self._memory.epoch
            outcome = await self._look_up(tenant, reference, base_digest=base_digest)
            if outcome is not Refusal.NOT_FOUND:
                about = [(reference.owner or tenant, reference.adapter)]
                self._memory.put(question, outcome, about=about, epoch=epoch, tenant=tenant)
        return outcome

    async def _look_up(self, tenant: str, reference: Reference, *, base_digest: str) -> Resolution | Refusal:
        owner, alias = reference.owner or tenant, "" if reference.version else reference.alias or STABLE
        query = _BY_VERSION if reference.version else _BY_ALIAS
        named = [owner, reference.adapter, reference.version or alias, *([] if reference.version else [base_digest])]
        scope = Scope.of_caller(tenant)
        with translated():
            _, found = await self._lines.ask(
                (_SCOPE, [scope.tenant.encode(), scope.kind.encode()]), (query, [one.encode() for one in named])
            )
        rows = [_Row(*row) for row in found]
        if not rows:
            return Refusal.NOT_FOUND
        if any(row.base_digest != base_digest for row in rows):
            return Refusal.BASE_MISMATCH
        if all(row.state != READY for row in rows):
            return {RETIRED: Refusal.RETIRED, QUARANTINED: Refusal.QUARANTINED}[rows[0].state]
        arms = tuple(
            Servable(
                digest=row.digest,
                number=row.number,
                weight=row.weight,
                max_rank=row.max_rank,
                size_bytes=row.size_bytes,
                state=row.state,
                invocation_tokens=tuple(row.invocation_tokens or ()),
                previous=_previous(row),
                points=tuple(row.points or ()),
            )
            for row in rows
        )
        versions = [arm.digest for arm in arms]
        salt = self._vault.split_salt(owner, reference.adapter, alias, versions) if len(arms) > 1 else b""
        return Resolution(
            owner=owner, adapter=reference.adapter, alias=alias, generation=rows[0].generation, arms=arms, split_salt=salt
        )

    def _with_tickets(self, found: Resolution, tenant: str, node: str) -> Resolution:
        def marked(version: Servable) -> Servable:
            given = ticket(self._vault, node, tenant, found.owner, found.adapter, version.digest)
            previous = None if version.previous is None else marked(version.previous)
            return replace(version, ticket=given, previous=previous)

        return replace(found, arms=tuple(map(marked, found.arms)))

    def _caller(self, holder: Holder, node: str) -> Caller:
        known = holder.identity
        return Caller(
            tenant=known.tenant,
            key_id=known.key_id,
            roles=tuple(sorted(known.roles)),
            fallback=holder.fallback,
            weight=holder.weight,
            limits=holder.limits,
            quotas=holder.quotas,
            ticket=ticket(self._vault, node, known.tenant) if node else b"",
            cache_salt=self._vault.cache_salt(known.tenant),
            expire_time=holder.expire_time,
            max_priority=max((_MAX_PRIORITY[role] for role in known.roles), default=0),
        )


def _told(found: Resolution, node: str) -> list[NodeVersion]:
    """What an answer tells a node of: all arms, of which any may be drawn, and what may take their place."""
    versions = [version for arm in found.arms for version in (arm, arm.previous) if version is not None]
    return [NodeVersion(found.owner, found.adapter, node, version.digest) for version in versions]


def _previous(row: _Row) -> Servable | None:
    if row.before_digest is None:
        return None
    return Servable(
        digest=row.before_digest,
        number=row.before_number,
        weight=1,
        max_rank=row.before_max_rank,
        size_bytes=row.before_size_bytes,
        state=READY,
        invocation_tokens=tuple(row.before_invocation_tokens or ()),
    )
