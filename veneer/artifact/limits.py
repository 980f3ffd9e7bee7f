"""Bounds that an adapter file must keep."""

from __future__ import annotations

from dataclasses import dataclass

LARGEST_FLOAT16 = 65504.0
"""Largest finite float16 number."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the check allows. Every bound is inclusive.

    The magnitudes are bounded so that no product can overflow float32: with K inputs of magnitude x,
    `|y| <= K·x · max_abs · rank · max_abs · max_scaling <= 2^20·2^16 · 2^16 · 2^8 · 2^16 · 2^16 = 2^92`, and the largest float32
    is about 2^128. The default of `max_abs` is the largest float16, so an accepted adapter stays finite in every type that a base
    may run in.

    Attributes:
        max_config_bytes: Size of `adapter_config.json`.
        max_weights_bytes: Size of `adapter_model.safetensors`.
        max_header_bytes: Size of the JSON header inside the weights.
        max_tensors: Tensors in the weights.
        max_name_chars: Characters in a tensor's name.
        max_dimension: Each dimension of a tensor.
        max_rank: Rank of each pair.
        max_abs: Magnitude of each element of A and B.
        max_scaling: Magnitude of each pair's scaling factor.
        max_pattern_chars: Characters in each regular expression of the config.
        max_patterns: Entries in each of rank_pattern and alpha_pattern.
        max_pattern_steps: Steps of matching all expressions of the config with all modules of the base; each takes up to 0.3 µs,
            on the data plane too.
        max_invocation_tokens: Tokens that activate an adapter.
        max_faults: Faults that one error spells out, and warnings that one report does; the rest are counted.
    """

    max_config_bytes: int = 1 << 20
    max_weights_bytes: int = 4 << 30
    max_header_bytes: int = 4 << 20
    max_tensors: int = 4096
    max_name_chars: int = 256
    max_dimension: int = 1 << 20
    max_rank: int = 256
    max_abs: float = LARGEST_FLOAT16
    max_scaling: float = 65536.0
    max_pattern_chars: int = 1024
    max_patterns: int = 4096
    max_pattern_steps: int = 1 << 23
    max_invocation_tokens: int = 256
    max_faults: int = 64
