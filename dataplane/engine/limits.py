"""What the scheduler may not exceed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of the scheduler; see `EngineConfig`.

    Attributes:
        max_passes: Steps that may admit others before a waiting request that lacks pages, rank rows or a slot; then they wait
            too.
        max_scan: Waiting requests considered in one step.
    """

    max_sequences: int
    max_step_tokens: int
    max_step_rank_rows: int
    max_context: int
    max_waiting: int
    max_passes: int = 64
    max_scan: int = 1024
