"""What a tenant may use at most on one data plane, as the catalogue holds it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """Absolute limits, whatever the tenant's share. 0 leaves one to the settings of the data plane.

    Attributes:
        max_rank_rows: Rank rows of the distinct adapters of its running requests.
        max_arena_bytes: Bytes of its adapters on the device.
        max_host_bytes: Bytes of its adapters in host memory.
    """

    max_rank_rows: int = 0
    max_arena_bytes: int = 0
    max_host_bytes: int = 0
