"""What the engine tells of itself when it is asked, as a part of its messages: its counters, and the versions that it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Holding:
    """One version that the engine holds; see `veneer.dataplane.v1.ResidentVersion`."""

    version: str
    place: Literal["host", "loading", "device"]
    rank: int
    size_bytes: int
    leases: int
    epoch: int
    uses: int = 0
    loss: float = 0.0
    loss_at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Counters of the engine; names as in `veneer.dataplane.v1.EngineState`.

    `waiting_by_reason` tells how many of those that wait lack a seat (`capacity`), `pages`, `rank_rows` or room in the `arena`,
    wait for their tenant's `budget`, for their `image`, for their reader, which is slow (`paused`), or for their `turn`.
    `queue_counts` are requests that ran for the first time, by how long they had waited (see `queue_times`), `queue_seconds` the
    sum of that; `rank_row_counts` are steps by how many rank rows they walked (see `step_rows`), `rank_rows` the sum of those.

    `device_hits`, `host_hits`, `disk_hits` and `store_loads` are requests by where they found their version: on the device,
    mapped in host memory, as an image file that was not opened yet, or nowhere here. `host_bytes` are those of mapped images.
    `kv_pages_kept` are free pages whose contents can be shared, `kv_page_bytes` the bytes of one; `prefix_queries` and
    `prefix_hits` count prompt tokens that were looked up, and found, in the prefix cache.
    `seconds` says where the loop's time went since start: to `receive` commands, `schedule`, `run` (of which `fill`, `forward`
    and `sample` are parts), `commit` and `emit`.
    """

    token: int
    running: int
    waiting: int
    kv_pages_used: int
    kv_pages_total: int
    arena_bytes_used: int
    arena_bytes_total: int
    leases: int
    steps: int
    max_adapters_in_step: int
    max_rows_in_step: int
    mixed_steps: int
    generated_tokens: int
    device_hits: int
    host_hits: int
    store_loads: int
    evictions: int
    holdings: tuple[Holding, ...]
    kv_pages_kept: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    seconds: tuple[tuple[str, float], ...] = ()
    waiting_by_reason: dict[str, int] = field(default_factory=dict)
    queue_counts: tuple[int, ...] = ()
    queue_seconds: float = 0.0
    rank_row_counts: tuple[int, ...] = ()
    rank_rows: int = 0
    kv_page_bytes: int = 0
    host_bytes: int = 0
    disk_hits: int = 0
