"""The memory plan of an engine: what it will take, checked against what there is, before anything is loaded."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from dataplane.engine.config import EngineConfig
from dataplane.engine.forms import find_gpu, find_native, model_sites
from dataplane.engine.sequence import MAX_SCORED_ROWS
from dataplane.model.architecture import Architecture
from dataplane.model.decoder import weight_bytes
from kernels.native import Native
from veneer.errors import FailedPreconditionError

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_ROLLUP = Path("/proc/self/smaps_rollup")
_MIB = 1 << 20
# Workspaces of the device's libraries and what its allocator rounds up; `libraries_mib` of benchmarks.gpu_check measures it.
_ASSUMED_LIBRARY_BYTES = 256 << 20


class DoesNotFitError(FailedPreconditionError):
    """The settings ask for more memory than there is."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose.

    Attributes:
        weights: Base weights.
        workspace: Activations and logits of the largest step, and what its form gathers.
        arena: Adapters.
        kv: KV pages.
        graphs: Captured steps and the device's libraries; 0 on the CPU.
        page_bytes: Bytes of a KV page.
        num_pages: KV pages that can be handed out.
        arena_dtype: Dtype of the adapters.
        num_spare: Pages beside those: page 0, which is always zero, and for captured steps the page of rows that pad.
        max_context: Tokens of one sequence at most: the least of the model's, the setting's and what all pages hold.
    """

    weights: int
    workspace: int
    arena: int
    kv: int
    graphs: int
    page_bytes: int
    num_pages: int
    num_spare: int
    max_context: int
    arena_dtype: str

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.workspace + self.arena + self.kv + self.graphs

    def lines(self, available: int | None) -> tuple[str, ...]:
        """Returns the plan as a table to print."""
        table = [
            ("base weights", self.weights, ""),
            ("step workspace", self.workspace, ""),
            ("adapter arena", self.arena, self.arena_dtype),
            ("KV pages", self.kv, f"{self.num_pages} pages, context of {self.max_context} tokens"),
            *([("graphs", self.graphs, "captured steps, and the device's libraries")] if self.graphs else []),
            ("total", self.total, "" if available is None else f"of {available / _MIB:,.0f} MiB available"),
        ]
        return tuple(f"{name:<16}{size / _MIB:>10,.1f} MiB  {note}".rstrip() for name, size, note in table)


def plan_memory(config: EngineConfig, model: Architecture) -> MemoryPlan:
    """Computes the plan.

    Raises:
        DoesNotFitError: `kv_bytes` holds less than two pages.
    """
    dtype: torch.dtype = getattr(torch, config.dtype)
    page_bytes = model.num_layers * 2 * config.page_size * model.kv_size * dtype.itemsize
    num_spare = 2 if config.has_device_form else 1
    num_pages = config.kv_bytes // page_bytes - num_spare
    if num_pages < 1:
        raise DoesNotFitError(f"kv_bytes = {config.kv_bytes} is less than {num_spare + 1} KV pages of {page_bytes} bytes")
    limits = [model.max_context, num_pages * config.page_size]
    if config.max_context:
        limits.append(config.max_context)
    max_context = min(limits)
    per_row = 4 * model.hidden + 3 * (model.q_size + 2 * model.kv_size) + 3 * model.intermediate
    logits = (config.max_sequences + MAX_SCORED_ROWS) * model.vocab_size * (dtype.itemsize + 3 * 4)
    counts = config.max_sequences * model.vocab_size * 5  # of penalties: int32 and bool
    return MemoryPlan(
        weights=weight_bytes(model, dtype),
        workspace=config.max_step_tokens * per_row * dtype.itemsize
        + logits
        + counts
        + _form_bytes(config, model, page_bytes=page_bytes, max_context=max_context, dtype=dtype),
        arena=config.arena_bytes,
        kv=(num_pages + num_spare) * page_bytes,
        graphs=_graph_bytes(config, model, row_bytes=per_row * dtype.itemsize, dtype=dtype),
        page_bytes=page_bytes,
        num_pages=num_pages,
        num_spare=num_spare,
        max_context=max_context,
        arena_dtype=config.arena_dtype,
    )


def _graph_bytes(config: EngineConfig, model: Architecture, *, row_bytes: int, dtype: torch.dtype) -> int:
    if config.device == "cpu":
        return 0
    from dataplane.engine.device_forms import graph_bytes

    return _ASSUMED_LIBRARY_BYTES + graph_bytes(config, vocab_size=model.vocab_size, row_bytes=row_bytes, dtype=dtype)


def _form_bytes(config: EngineConfig, model: Architecture, *, page_bytes: int, max_context: int, dtype: torch.dtype) -> int:
    """Returns what the chosen form gathers or holds beside activations.

    The native form reads pages and rank rows in place and holds the shrunk rows of one site, in float32. PyTorch's gathers the
    pages of a layer, and keeps all rank rows of a step gathered, site by site; with `batch_invariant` the pages of one row only.
    A device's holds the shrunk rows of one site for every tile of a step, and attention's parts.
    """
    if isinstance(find_native(config, model), Native):
        most_slices = max(Counter(part.site for part in model.projections).values())
        return config.max_step_tokens * most_slices * config.max_rank * 4 if config.arena_bytes else 0
    if (gpu := find_gpu(config)) is not None:
        from dataplane.engine.device_forms import scratch_bytes

        return scratch_bytes(config, model, sites=model_sites(model), gpu=gpu, dtype=dtype, max_context=max_context)
    gathered = _gathered_bytes(config, model, page_bytes=page_bytes, max_context=max_context)
    rank_row = model.num_layers * sum(part.in_features + part.out_features for part in model.projections)
    keeps_rows = config.arena_bytes and not config.batch_invariant
    return gathered + (config.max_step_rank_rows * rank_row * dtype.itemsize if keeps_rows else 0)


def _gathered_bytes(config: EngineConfig, model: Architecture, *, page_bytes: int, max_context: int) -> int:
    """Returns the pages of one layer as PyTorch's attention gathers them."""
    sequences = 1 if config.batch_invariant else config.max_sequences
    pages = 2 * sequences * -(-max_context // config.page_size) * page_bytes // model.num_layers
    return min(pages, 2 * config.kv_bytes // model.num_layers)


def check_fits(plan: MemoryPlan, available: int | None) -> None:
    """Refuses a plan that is larger than the memory there is (None: unknown).

    Raises:
        DoesNotFitError: Carries the whole table.
    """
    if available is not None and plan.total > available:
        raise DoesNotFitError("the settings do not fit into memory:\n" + "\n".join(plan.lines(available)))


def available_bytes(device: torch.device) -> int | None:
    """Returns the free memory of the device; for the CPU the machine's, or what the control group leaves if that is less."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    limits = []
    if _MEMINFO.exists():
        lines = _MEMINFO.read_text().splitlines()
        limits += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError, ValueError):  # no control group, or "max"
        limits.append(int((_CGROUP / "memory.max").read_text()) - int((_CGROUP / "memory.current").read_text()))
    return min(limits, default=None)


def huge_pages_line() -> str:
    """Returns a line for the printed plan: how much of what this process holds by now lies in huge pages.

    Weights, rank rows and pages are read faster from them. Little here although the launcher asks for them means that the
    machine's memory is in pieces, or that `transparent_hugepage` is `never`.
    """
    held = {}
    with contextlib.suppress(OSError):
        for line in _ROLLUP.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in ("Anonymous", "AnonHugePages"):
                held[name] = int(rest.split()[0]) / 1024
    if len(held) < 2:
        return "huge pages      unknown"
    return f"{'huge pages':<16}{held['AnonHugePages']:>10,.1f} MiB  of {held['Anonymous']:,.1f} MiB held so far"
