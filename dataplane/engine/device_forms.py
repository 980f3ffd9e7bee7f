"""The form of a device: Triton kernels for adapters and what lies between the products, the library's base products."""

from __future__ import annotations

import torch
from torch import Tensor

from dataplane.engine.config import EngineConfig
from dataplane.engine.forms import Forms
from dataplane.lora.arena import Arena
from dataplane.model.architecture import Architecture
from dataplane.model.attention import PagedKv, TorchAttention
from dataplane.model.pieces import TorchPieces
from kernels.descriptors import Descriptors
from kernels.gpu.device import Gpu
from kernels.gpu.low_rank import TritonLowRank
from kernels.sites import Site


def device_forms(
    config: EngineConfig, model: Architecture, *, kv: PagedKv, arena: Arena, sites: tuple[Site, ...], gpu: Gpu
) -> Forms:
    """Builds the form of a device.

    Raises:
        UnsupportedSitesError: A width of the model is not a multiple of 16.
    """
    low_rank = _low_rank(config, arena.tensor, arena.descriptors, sites=sites, gpu=gpu)
    return Forms(f"triton, {gpu.name}", TorchAttention(model, kv), low_rank, TorchPieces())


def scratch_bytes(config: EngineConfig, *, sites: tuple[Site, ...], gpu: Gpu, dtype: torch.dtype) -> int:
    """Returns what the low-rank product will hold beside the arena: it is built where tensors have sizes and no memory."""
    arena = torch.empty(0, dtype=dtype, device="meta")
    return _low_rank(config, arena, Descriptors(1, 1, 1), sites=sites, gpu=gpu).scratch_bytes


def _low_rank(
    config: EngineConfig, arena: Tensor, descriptors: Descriptors, *, sites: tuple[Site, ...], gpu: Gpu
) -> TritonLowRank:
    return TritonLowRank(
        arena,
        descriptors,
        gpu=gpu,
        sites=sites,
        max_rows=config.max_step_tokens,
        max_list=config.max_step_rank_rows if config.arena_bytes else 0,
    )
