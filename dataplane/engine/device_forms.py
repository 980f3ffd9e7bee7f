"""The form of a device: Triton kernels for adapters and what lies between the products, the library's base products."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import Tensor

from dataplane.engine.config import EngineConfig
from dataplane.engine.forms import Forms
from dataplane.engine.graphs import Capture, Captures, CudaCapture, row_buckets
from dataplane.lora.arena import ARENA_DTYPES, Arena
from dataplane.model.architecture import Architecture
from dataplane.model.attention import PagedKv
from dataplane.model.decoder import Decoder
from dataplane.model.linear import PlainLinear
from dataplane.model.projected_stack import ProjectedStack
from dataplane.model.stack import PieceStack
from dataplane.model.triton_attention import TritonAttention
from dataplane.model.triton_pieces import TritonPieces
from kernels.descriptors import Descriptors
from kernels.gpu.device import Gpu
from kernels.gpu.low_rank import TritonLowRank, Variant
from kernels.gpu.paths import Paths
from kernels.gpu.trial import Trial, device_clock
from kernels.sites import Site

_TRIAL_LAYERS = 8  # whose weights follow each other, so that none stays in a cache
_log = logging.getLogger(__name__)
_ASSUMED_GRAPH_BYTES = 4 << 20  # of one captured step beside its tensors; `graph_mib` of benchmarks.gpu_check measures it


def device_forms(
    config: EngineConfig,
    model: Architecture,
    *,
    kv: PagedKv,
    arena: Arena,
    sites: tuple[Site, ...],
    gpu: Gpu,
    max_context: int,
) -> Forms:
    """Builds the form of a device; `max_context` is of one sequence.

    Raises:
        UnsupportedSitesError: A width of the model is not a multiple of 16.
        UnsupportedAttentionError: Head dimension or page size.
    """
    low_rank = _low_rank(config, arena.tensor, arena.descriptors, sites=sites, gpu=gpu, dtype=kv.data.dtype)
    attention = _attention(config, model, kv, gpu=gpu, max_context=max_context)
    capture = capture_on(gpu, arena.tensor.device)
    captures = None if capture is None else Captures(capture, low_rank, _variants(config))

    def fit(decoder: Decoder) -> Decoder:
        stack = decoder.stack
        assert isinstance(stack, PieceStack), "Triton's pieces have no stack of their own"
        if not gpu.is_interpreted:
            attention.try_library(device_clock)
        if config.arena_bytes and not gpu.is_interpreted:
            paths = _measured(stack, sites, gpu=gpu, most_rows=config.max_step_tokens, is_fp8=low_rank.launches.is_fp8)
            _log.info("paths around base products", extra={"paths": str(paths)})
            low_rank.use(paths)
        return replace(decoder, stack=ProjectedStack(stack.form, stack.layers, stack.rotaries, stack.pieces))

    return Forms(f"triton, {gpu.name}", attention, low_rank, TritonPieces(), captures, fit=fit)


def _measured(stack: PieceStack, sites: tuple[Site, ...], *, gpu: Gpu, most_rows: int, is_fp8: bool) -> Paths:
    """Takes the times of every path at every site, with the model's own weights, for the buckets that steps reach."""
    weights = {
        site.name: [
            linear.weight
            for layer in stack.layers[:_TRIAL_LAYERS]
            if isinstance(linear := getattr(layer, site.name), PlainLinear)
        ]
        for site in sites
    }
    return Trial(sites, weights, gpu=gpu, clock=device_clock, is_fp8=is_fp8).paths(most_rows)


def capture_on(gpu: Gpu, device: torch.device) -> Capture | None:
    """Returns how steps are captured; the interpreter has nothing to capture."""
    return None if gpu.is_interpreted else CudaCapture(device)


def scratch_bytes(
    config: EngineConfig, model: Architecture, *, sites: tuple[Site, ...], gpu: Gpu, dtype: torch.dtype, max_context: int
) -> int:
    """Returns what the form will hold beside weights, pages and arena: it is built where tensors have sizes and no memory.

    Raises:
        UnsupportedSitesError: See `device_forms`.
        UnsupportedAttentionError: Likewise.
    """
    nowhere = torch.device("meta")
    kv = PagedKv(model, num_pages=1, page_size=config.page_size, dtype=dtype, device=nowhere)
    attention = _attention(config, model, kv, gpu=gpu, max_context=max_context)
    arena = torch.empty(0, dtype=ARENA_DTYPES[config.arena_dtype], device=nowhere)
    low_rank = _low_rank(config, arena, Descriptors(1, 1, 1), sites=sites, gpu=gpu, dtype=dtype)
    return attention.scratch_bytes + low_rank.scratch_bytes


def graph_bytes(config: EngineConfig, *, vocab_size: int, row_bytes: int, dtype: torch.dtype) -> int:
    """Returns what captured steps will hold: activations of the largest, since they share them, logits, and the graphs."""
    if config.device == "cpu":
        return 0
    buckets = row_buckets(config.max_sequences)
    num_graphs = len(buckets) * len(_variants(config))
    return buckets[-1] * (row_bytes + 2 * vocab_size * dtype.itemsize) + num_graphs * _ASSUMED_GRAPH_BYTES


def _variants(config: EngineConfig) -> tuple[Variant, ...]:
    return tuple(Variant) if config.arena_bytes else (Variant.NONE,)


def _attention(config: EngineConfig, model: Architecture, kv: PagedKv, *, gpu: Gpu, max_context: int) -> TritonAttention:
    return TritonAttention(
        model,
        kv,
        gpu=gpu,
        max_rows=config.max_step_tokens,
        max_sequences=config.max_sequences,
        max_context=max_context,
    )


def _low_rank(
    config: EngineConfig, arena: Tensor, descriptors: Descriptors, *, sites: tuple[Site, ...], gpu: Gpu, dtype: torch.dtype
) -> TritonLowRank:
    return TritonLowRank(
        arena,
        descriptors,
        gpu=gpu,
        sites=sites,
        max_rows=config.max_step_tokens,
        max_list=config.max_step_rank_rows if config.arena_bytes else 0,
        dtype=dtype,
    )
