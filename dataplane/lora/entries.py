"""What a residency knows of a version. Integers only."""

from __future__ import annotations

from dataclasses import dataclass, field

from dataplane.lora.holdings import Holding, Loss, Place
from dataplane.lora.units import Extent


@dataclass(slots=True)
class Entry:
    """One version in host memory or on the device. Owned by a `Residency`.

    Attributes:
        version: Its digest.
        rank: Its largest rank.
        blocks: Bytes of each block of its image.
        needed: Units that its copy takes in one piece.
        loss: What it loses in fp8; None in the model's dtype.
        in_host: Whether its image lies in host memory.
        place: Where it is.
        slot: Its slot; -1 when it is not on the device.
        extents: Units of its copy.
        epoch: Number of its last load.
        leases: Tenants by the number of their lease.
        tenant: Who pays for the copy: the tenant that asked for it, then whoever used it last.
        used_at: When it was used last, by the residency's count of uses.
        uses: Leases given.
        served: Tokens served since it was loaded.
        awaited: Requests that have no lease yet wait for it.
        owed: Loaded because it was due, and not leased since.
        dropped: To be freed as soon as nobody needs it.
        leaving: The same, but it may be loaded again.
    """

    version: str
    rank: int = 0
    blocks: tuple[int, ...] = ()
    needed: int = 0
    loss: Loss | None = None
    in_host: bool = False
    place: Place = "host"
    slot: int = -1
    extents: tuple[Extent, ...] = ()
    epoch: int = 0
    leases: dict[int, str] = field(default_factory=dict)
    tenant: str = ""
    used_at: int = 0
    uses: int = 0
    served: int = 0
    awaited: bool = False
    owed: bool = False
    dropped: bool = False
    leaving: bool = False

    @property
    def num_units(self) -> int:
        """Units that its copy takes."""
        return sum(extent.num_units for extent in self.extents)

    def holding(self) -> Holding:
        """Returns it as others see it."""
        size_bytes, num_leases = sum(self.blocks), len(self.leases)
        return Holding(self.version, self.place, self.rank, size_bytes, num_leases, self.epoch, self.uses, self.loss)
