"""What the scheduler may not exceed, and what it charges."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What work costs, in units of one prefilled token. Cached and recomputed tokens are free.

    The defaults are those of SmolLM2-135M in bfloat16 at 64 rows on 2 cores with AVX-512 (`python -m benchmarks.prices`).

    Attributes:
        prefill_token: A prompt token that is computed.
        decode_token: A generated token that is fed back; its row shares the reading of the weights with fewer others.
        rank_row: A rank row of an adapter in one step, split among the requests that use it.
        load_mib: A MiB of an adapter that was copied to the device.
        grammar_ms: A millisecond of a core that compiling a grammar, or finding its masks, took.
    """

    prefill_token: float = 1.0
    decode_token: float = 1.4
    rank_row: float = 0.07
    load_mib: float = 1.9
    grammar_ms: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of the scheduler; see `EngineConfig`.

    Attributes:
        max_waiting_per_tenant: Requests of one tenant that wait at most; 0 for no limit of its own.
        max_passes: Steps that may admit others before a waiting request that lacks pages, rank rows or a slot; then they wait
            too.
        max_scan: Waiting requests considered in one step.
        patience: Steps that a tenant waits below its share until others give way.
        max_step_ms: Milliseconds that a step should take at most in which sequences decode: it holds fewer rows of prompts then,
            but a page of them in any case; 0 for no such limit.
        max_mask_wait_s: How long a sequence may be out of the steps since its grammar's mask is not there; then it ends.
        prices: What work costs.
    """

    max_sequences: int
    max_step_tokens: int
    max_step_rank_rows: int
    max_context: int
    max_waiting: int
    max_waiting_per_tenant: int = 0
    max_passes: int = 64
    max_scan: int = 512
    patience: int = 2
    max_step_ms: int = 0
    max_mask_wait_s: float = 10.0
    prices: Prices = Prices()
