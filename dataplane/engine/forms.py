"""Chooses the form in which a machine computes: that of a device, the native CPU form, or PyTorch's operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

import torch

from dataplane.engine.config import EngineConfig
from dataplane.engine.graphs import Captures
from dataplane.lora.arena import Arena
from dataplane.model.architecture import Architecture
from dataplane.model.attention import Attention, PagedKv, TorchAttention
from dataplane.model.decoder import Decoder
from dataplane.model.invariant import RowAttention, TiledPieces
from dataplane.model.native_attention import NativeAttention, check_shapes
from dataplane.model.pieces import NativePieces, Pieces, TorchPieces
from dataplane.model.stack import LowRank
from kernels.cpu import CpuLowRank
from kernels.native import Native, NativeFormError, load_native
from kernels.native_low_rank import NativeLowRank
from kernels.rows import RankRows
from kernels.sites import Site
from kernels.tiled_low_rank import TiledLowRank
from veneer.errors import FailedPreconditionError

if TYPE_CHECKING:
    from kernels.gpu.device import Gpu


class StepLowRank(LowRank, Protocol):
    """A low-rank product as the runner drives it."""

    def begin_step(self, rows: RankRows) -> None:
        """Prepares the step's rows."""

    def invalidate(self, slot: int) -> None:
        """Drops what is kept of a slot."""


class NoNativeFormError(FailedPreconditionError):
    """`cpu_form = native` asks for a form that this machine or these shapes do not have."""


class NoDeviceFormError(FailedPreconditionError):
    """The settings ask for a device that this machine does not have, or for what its form does not do."""


def _as_it_is(model: Decoder) -> Decoder:
    return model


@dataclass(frozen=True, slots=True)
class Forms:
    """One form of everything that has several.

    Attributes:
        name: For the printed plan.
        attention: Over the KV pages; it owns the order inside a block of the cache.
        low_rank: The adapters' part.
        pieces: What lies between.
        captures: How steps that decode are captured; None where they are computed anew each time.
        slower: Why they are slower than what the processor could run; empty where they are not, or the settings ask for them.
        fit: Takes the loaded model and returns it as the form runs it; may measure first.
    """

    name: str
    attention: Attention
    low_rank: StepLowRank
    pieces: Pieces
    captures: Captures[Any] | None = None
    slower: str = ""
    fit: Callable[[Decoder], Decoder] = _as_it_is


def model_sites(form: Architecture) -> tuple[Site, ...]:
    """Returns the fused products; their slices are the projections, in order."""
    sites = []
    for name in dict.fromkeys(part.site for part in form.projections):
        slices = [index for index, part in enumerate(form.projections) if part.site == name]
        parts = [form.projections[index] for index in slices]
        out_features = tuple(part.out_features for part in parts)
        sites.append(Site.fused(name, first_slice=slices[0], in_features=parts[0].in_features, out_features=out_features))
    return tuple(sites)


def find_native(config: EngineConfig, model: Architecture) -> Native | NativeFormError | None:
    """Returns the library that computes, or why it cannot, or None where the settings ask for PyTorch's operations."""
    if config.cpu_form == "torch" or config.has_device_form:
        return None
    try:
        return _native(config, model)
    except NativeFormError as error:
        return error


def _native(config: EngineConfig, model: Architecture) -> Native:
    dtype: torch.dtype = getattr(torch, config.dtype)
    native = load_native()
    native.function("linear", dtype)
    check_shapes(model, page_size=config.page_size)
    if config.batch_invariant and any(part.in_features * dtype.itemsize % 4 for part in model.projections):
        raise NativeFormError("the native CPU form multiplies inputs of an even width only")
    return native


def find_gpu(config: EngineConfig) -> Gpu | None:
    """Returns what the device can do; None where the CPU's own forms compute. Triton is imported only where it computes.

    Raises:
        NoDeviceFormError: Names the device and the limit.
    """
    if not config.has_device_form:
        return None
    asked = f"device = {config.device}" if config.device != "cpu" else f"cpu_form = {config.cpu_form}"
    if config.batch_invariant:
        raise NoDeviceFormError(f"{asked} has no batch-invariant form: the library's products add up by the number of rows")
    if find_spec("triton") is None:
        raise NoDeviceFormError(f"{asked} cannot be had: triton is not installed")
    from kernels.gpu.device import UnsupportedDeviceError, probe

    try:
        return probe(config.device)
    except UnsupportedDeviceError as error:
        raise NoDeviceFormError(f"{asked} cannot be had: {error}") from error


def choose_forms(
    config: EngineConfig, model: Architecture, *, kv: PagedKv, arena: Arena, sites: tuple[Site, ...], max_context: int
) -> Forms:
    """Returns the forms that `config.cpu_form` asks for; `auto` takes the native one where it can be had; `slower` says why not.

    Raises:
        NoNativeFormError: The native form is asked for by name and cannot be had.
        NoDeviceFormError: Likewise that of a device.
    """
    if (gpu := find_gpu(config)) is not None:
        from dataplane.engine.device_forms import device_forms

        return device_forms(config, model, kv=kv, arena=arena, sites=sites, gpu=gpu, max_context=max_context)
    native, suffix = find_native(config, model), ", batch-invariant" * config.batch_invariant
    if isinstance(native, Native):
        return Forms(
            f"native, {native.instruction_set.name}{suffix}",
            NativeAttention(model, kv, native=native),
            NativeLowRank(arena.tensor, arena.descriptors, native=native, sites=sites, max_rows=config.max_step_tokens),
            NativePieces(native, getattr(torch, config.dtype), invariant=config.batch_invariant),
            slower=native.slower,
        )
    slower = ""
    if native is not None:
        if config.cpu_form == "native":
            raise NoNativeFormError(f"cpu_form = native cannot be had: {native}") from native
        slower = f"PyTorch's operations serve in place of the native CPU form: {native}"
    if config.batch_invariant:
        tiled = TiledLowRank(arena.tensor, arena.descriptors, sites=sites)
        return Forms(f"torch{suffix}", RowAttention(model, kv), tiled, TiledPieces(), slower=slower)
    low_rank = CpuLowRank(
        arena.tensor,
        arena.descriptors,
        sites=sites,
        num_layers=model.num_layers,
        max_rows=config.max_step_tokens,
        max_list=config.max_step_rank_rows if config.arena_bytes else 0,
    )
    return Forms("torch", TorchAttention(model, kv), low_rank, TorchPieces(), slower=slower)
