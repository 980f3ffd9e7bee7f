"""What a residency tells: leases, loads to carry out, what is where, what happened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dataplane.lora.units import Extent
from veneer.errors import TENANT_LIMIT, FailedPreconditionError

Place = Literal["host", "loading", "device"]


Reason = Literal["room", "yield", "unload"]
"""Why a device copy went: for another's room, since its tenant gave way, or since the version was taken away."""


class TenantLimitError(FailedPreconditionError):
    """An adapter is larger than a limit of the tenant that asks for it allows: nothing is wrong with it, others may have it."""

    kind = TENANT_LIMIT


@dataclass(frozen=True, slots=True)
class Evicted:
    """A version that lost its device copy, the slot that it had, and why."""

    version: str
    slot: int
    reason: Reason = "room"


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A load to carry out: copy the image to the extents, publish the slot, then `commit`; or `fail`.

    Attributes:
        version: What to load.
        slot: Where it will be found.
        extents: Which units take it.
        evicted: What made room. Its slots and units count as free already, and some of them are in this plan.
    """

    version: str
    slot: int
    extents: tuple[Extent, ...]
    evicted: tuple[Evicted, ...]


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to use one version's device copy, for one sequence from its first step to its last.

    Attributes:
        lease_id: Number of this lease.
        version: The version.
        slot: Its slot in the descriptor table, valid until `release`.
        rank: Its largest rank.
        epoch: Number of the load that put it there; no two loads share one, so it may be part of a cache key.
    """

    lease_id: int
    version: str
    slot: int
    rank: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Loss:
    """What a version's pair loses that loses most by being held in fp8.

    Attributes:
        error: `‖B A − B' A'‖ / ‖B A‖`, in Frobenius norms.
        layer: Layer of the pair.
        slice: Its slice.
    """

    error: float
    layer: int
    slice: int


@dataclass(frozen=True, slots=True)
class Budget:
    """What a tenant's limit of the arena leaves for one version more, in bytes of whole units.

    Attributes:
        needed: What its copy takes.
        used: What the copies charged to the tenant take.
        busy: Of these, what cannot make room: leased, loading or pinned.
        allowed: The limit.
    """

    needed: int
    used: int
    busy: int
    allowed: int

    @property
    def is_hopeless(self) -> bool:
        """Whether it can never be loaded for the tenant."""
        return self.needed > self.allowed

    @property
    def is_spent(self) -> bool:
        """Whether it cannot be loaded for the tenant now."""
        return self.busy + self.needed > self.allowed


@dataclass(frozen=True, slots=True)
class Holding:
    """One version in memory.

    Attributes:
        version: The version.
        place: `host` (image in host memory only), `loading`, or `device`.
        rank: Largest rank.
        size_bytes: Bytes of the image.
        leases: Leases held.
        epoch: Number of its last load; 0 before the first.
        uses: Leases given since it came to be held.
        loss: What it loses in fp8; None in the model's dtype.
    """

    version: str
    place: Place
    rank: int
    size_bytes: int
    leases: int
    epoch: int
    uses: int = 0
    loss: Loss | None = None


@dataclass(frozen=True, slots=True)
class Counters:
    """What happened since the start.

    Attributes:
        hits: Leases given.
        misses: Versions that became wanted.
        loads: Loads committed.
        failures: Loads failed.
        evictions: Device copies that made room for others.
    """

    hits: int = 0
    misses: int = 0
    loads: int = 0
    failures: int = 0
    evictions: int = 0
