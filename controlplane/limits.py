"""What a tenant may use at most, on one data plane and in all, and what an organisation's tenants may have together."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantQuotas:
    """What it may use at most in all, over all data planes. 0 is no limit.

    Attributes:
        max_requests_per_minute: Requests in any 60 s.
        max_tokens_per_minute: Tokens of prompts and answers in any 60 s.
        max_streams: Streams at a time.
        max_adapters: Adapters that are not deleted.
        max_stored_bytes: Bytes of the files of its versions.
    """

    max_requests_per_minute: int = 0
    max_tokens_per_minute: int = 0
    max_streams: int = 0
    max_adapters: int = 0
    max_stored_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OrganizationQuotas:
    """What the tenants of an organisation may have at most together. 0 is no limit.

    Attributes:
        max_tenants: Tenants.
        max_adapters: Adapters that are not deleted.
        max_stored_bytes: Bytes of the files of their versions.
    """

    max_tenants: int = 0
    max_adapters: int = 0
    max_stored_bytes: int = 0
