"""What the control plane says about a caller and an adapter reference, as the data plane keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Target:
    """An adapter reference as the caller wrote it.

    Attributes:
        adapter: Name; empty for the base itself.
        owner: Tenant that owns it; empty for the caller's own.
        alias: Alias; empty for the default alias, unless `version` is set.
        version: Digest of a version; empty when an alias is meant.
    """

    adapter: str = ""
    owner: str = ""
    alias: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What a tenant may use at most on this node; 0 for no limit, or for none of its own in what the control plane says.

    Attributes:
        max_rank_rows: Rank rows of the distinct adapters of its running requests.
        max_arena_bytes: Bytes of its adapters on the device.
        max_host_bytes: Bytes of its adapters in host memory.
    """

    max_rank_rows: int = 0
    max_arena_bytes: int = 0
    max_host_bytes: int = 0

    def over(self, defaults: TenantLimits) -> TenantLimits:
        """Returns these limits, and where there is none the default one."""
        return TenantLimits(
            max_rank_rows=self.max_rank_rows or defaults.max_rank_rows,
            max_arena_bytes=self.max_arena_bytes or defaults.max_arena_bytes,
            max_host_bytes=self.max_host_bytes or defaults.max_host_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantQuotas:
    """What a tenant may use at most in all, over all data planes; 0 for no limit.

    Attributes:
        requests: Requests in any 60 s.
        tokens: Tokens of prompts and answers in any 60 s.
        streams: Streams at a time.
    """

    requests: int = 0
    tokens: int = 0
    streams: int = 0

    def __bool__(self) -> bool:
        return bool(self.requests or self.tokens or self.streams)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls.

    Attributes:
        tenant: Name of the tenant.
        key_id: Identifier of the key, for logs.
        fallback_allowed: Whether the tenant lets the base answer in place of an adapter.
        previous_allowed: Whether it lets an earlier version answer in place of the present one.
        default_fallback: What its requests ask for that do not say; name of a fallback mode.
        weight: Share of the tenant relative to others.
        cache_salt: Secret of the tenant, part of every cache key.
        expire_unix_s: When the key ends by itself, by the control plane's clock; None for never.
        max_priority: Largest priority of its requests among those of its tenant.
        limits: What the tenant may use at most, as the catalogue says.
        quotas: What it may use at most in all.
        ticket: Shows the control plane that this node was told of the tenant.
    """

    tenant: str
    key_id: str
    fallback_allowed: bool
    weight: int
    cache_salt: bytes
    expire_unix_s: float | None
    max_priority: int = 0
    previous_allowed: bool = True
    default_fallback: str = "NONE"
    limits: TenantLimits = TenantLimits()
    quotas: TenantQuotas = TenantQuotas()
    ticket: bytes = b""


@dataclass(frozen=True, slots=True)
class Arm:
    """A version that may answer, with its share.

    Attributes:
        invocation_tokens: Token ids that activate it, from where they last stand in a prompt on; empty: it is active from the
            first token.
        previous: The version that may answer in its place, if the request asks for that.
        ticket: Shows the control plane that this node was told of it for the caller.
        points: Points of the units that it serves in a split: start, end, start, end and so on; empty: see `draw_arm`.
    """

    version: str
    number: int
    weight: int
    max_rank: int
    size_bytes: int
    state: str
    invocation_tokens: tuple[int, ...] = ()
    previous: Arm | None = None
    ticket: bytes = b""
    points: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Resolution:
    """What a reference means: no arms for the base itself."""

    owner: str
    adapter: str
    alias: str
    generation: int
    arms: tuple[Arm, ...]
    split_salt: bytes


class Refusal(Enum):
    """Why a reference has no resolution."""

    NOT_FOUND = "not found"
    ROLE = "role"
    BASE_MISMATCH = "base mismatch"
    RETIRED = "retired"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the control plane."""

    caller: Caller
    outcome: Resolution | Refusal
