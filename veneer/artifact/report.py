"""What the check of an adapter finds: the report, in whole and by module, and the limits that it was held against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from veneer.artifact.config import Config
from veneer.artifact.description import BaseDescription, TargetModule
from veneer.artifact.header import TensorRef
from veneer.artifact.limits import Limits
from veneer.artifact.pairs import Pair
from veneer.artifact.source import Source
from veneer.artifact.values import Statistics, read_matrix

BaseMatch = Literal["", "NAMED", "OTHER_NAME", "NOT_NAMED"]
"""Whether the configuration names the base: by a name of it, by another, or not at all; empty in reports of earlier releases."""

MAX_NORM_ELEMENTS = 1 << 22
"""Elements of a matrix above which no norm is computed of its pair: both are held in memory for it."""

_MAX_BASE_NAME = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleReport:
    """The pairs of one module over all layers; mirrors the message of this name.

    Attributes:
        module: Name of the module, e.g. `q_proj`.
        site: Fused projection that it is computed in.
        num_pairs: Layers in which it is adapted.
        num_layers: Layers that have it.
        min_rank: Smallest rank.
        max_rank: Largest rank.
        min_scaling: Smallest scaling factor.
        max_scaling: Largest scaling factor.
        max_abs_a: Largest magnitude of any element of A.
        max_abs_b: Likewise of B.
        min_norm: Smallest spectral norm of `scaling · B A`, to six digits; None where none was computed.
        max_norm: Largest; layers whose matrices are too large for it are left out.
    """

    module: str
    site: str
    num_pairs: int
    num_layers: int
    min_rank: int
    max_rank: int
    min_scaling: float
    max_scaling: float
    max_abs_a: float
    max_abs_b: float
    min_norm: float | None = None
    max_norm: float | None = None


@dataclass(frozen=True, slots=True)
class LimitUse:
    """How much of a limit an adapter takes.

    Attributes:
        name: Of the limit, as a field of `Limits` without `max_`.
        value: What the adapter has.
        limit: What is allowed.
    """

    name: str
    value: float
    limit: float


@dataclass(frozen=True, slots=True)
class Report:
    """What the check found; mirrors the message ArtifactReport.

    Attributes:
        num_pairs: A/B pairs in the file; all of them are applied.
        min_rank: Smallest rank.
        max_rank: Largest rank; the rank rows that the adapter takes in a step.
        total_rank_rows: Sum of all ranks.
        dtype: Element type in the file; the commonest one when there are several.
        modules: Names of the adapted modules, in slice order.
        num_layers: Layers in which at least one module is adapted.
        min_scaling: Smallest scaling factor.
        max_scaling: Largest scaling factor.
        max_abs: Largest magnitude of any element.
        warnings: Things worth a look that do not stop the version.
        invocation_tokens: Token ids that activate the adapter, from where they last stand in a prompt on; empty: it is active
            from the first token.
        by_module: The pairs by module, in the order of `modules`.
        num_possible_pairs: Pairs that an adapter of every module of every layer would have; embedding and head not counted.
        base_match: Whether the configuration names the base.
        base_name: The name that it gives, in printable ASCII with the rest escaped, cut to 200 characters.
        limits: What it was held against.
    """

    num_pairs: int
    min_rank: int
    max_rank: int
    total_rank_rows: int
    dtype: str
    modules: tuple[str, ...]
    num_layers: int
    min_scaling: float
    max_scaling: float
    max_abs: float
    warnings: tuple[str, ...]
    invocation_tokens: tuple[int, ...] = ()
    by_module: tuple[ModuleReport, ...] = ()
    num_possible_pairs: int = 0
    base_match: BaseMatch = ""
    base_name: str = ""
    limits: tuple[LimitUse, ...] = ()

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Report:
        """Reads what `dataclasses.asdict` gave after a way through JSON."""
        lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        by_module = tuple(ModuleReport(**one) for one in fields.get("by_module", ()))
        limits = tuple(LimitUse(**one) for one in fields.get("limits", ()))
        return cls(**{**fields, **lists, "by_module": by_module, "limits": limits})


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a report is made of; all of it passed.

    Attributes:
        settings: The configuration.
        config_bytes: Size of its file.
        tensors: All tensors of the weights.
        weights_bytes: Size of their file.
        pairs: The pairs.
        statistics: Of every tensor, by name.
        norms: Spectral norm of each pair's `scaling · B A` by (layer, slice), where it was computed.
    """

    settings: Config
    config_bytes: int
    tensors: Sequence[TensorRef]
    weights_bytes: int
    pairs: Sequence[Pair]
    statistics: Mapping[str, Statistics]
    norms: Mapping[tuple[int, int], float] = field(default_factory=dict)


def measure_norms(source: Source, pairs: Iterable[Pair], statistics: Mapping[str, Statistics]) -> dict[tuple[int, int], float]:
    """Computes the spectral norm of `scaling · B A` of each pair whose matrices are not too large for it."""
    norms = {}
    for pair in pairs:
        if max(prod(pair.a.shape), prod(pair.b.shape)) > MAX_NORM_ELEMENTS:
            continue
        scale = statistics[pair.a.name].max_abs, statistics[pair.b.name].max_abs
        if 0.0 in scale:
            norms[pair.layer, pair.slice] = 0.0
            continue
        a, b = (read_matrix(source, ref) / np.float64(most) for ref, most in zip((pair.a, pair.b), scale, strict=True))
        norm = abs(pair.scaling) * scale[0] * scale[1] * product_norm(a, b)
        norms[pair.layer, pair.slice] = float(f"{norm:.6g}")  # the last digits depend on where the matrices lie in memory
    return norms


def product_norm(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    """Returns the largest singular value of `B A`; its square is the largest eigenvalue of `A Aᵀ Bᵀ B`, a matrix of rank's size.

    Args:
        a: `[rank, in]`, of elements near 1, so that no square is lost.
        b: `[out, rank]`, likewise.
    """
    values, vectors = np.linalg.eigh(a @ a.T)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    largest = np.linalg.eigvalsh(root.T @ (b.T @ b) @ root)[-1]
    return float(np.sqrt(max(float(largest), 0.0)))


def make_report(found: Findings, base: BaseDescription, limits: Limits) -> Report:
    """Puts together what is worth knowing of an adapter that passed."""
    pairs, settings = found.pairs, found.settings
    dtypes = Counter(ref.dtype for pair in pairs for ref in (pair.a, pair.b))
    by_module: dict[TargetModule, list[Pair]] = {}
    for pair in sorted(pairs, key=lambda pair: (pair.layer == base.num_layers, pair.slice)):
        by_module.setdefault(base.module_at(pair.layer, pair.slice), []).append(pair)
    return Report(
        num_pairs=len(pairs),
        min_rank=min(pair.rank for pair in pairs),
        max_rank=max(pair.rank for pair in pairs),
        total_rank_rows=sum(pair.rank for pair in pairs),
        dtype=max(dtypes, key=dtypes.__getitem__),
        modules=tuple(dict.fromkeys(module.name for module in by_module)),
        num_layers=len({pair.layer for pair in pairs} - {base.num_layers}),
        min_scaling=min(pair.scaling for pair in pairs),
        max_scaling=max(pair.scaling for pair in pairs),
        max_abs=max(statistics.max_abs for statistics in found.statistics.values()),
        warnings=tuple(_shorten(settings.warnings, limits.max_faults)),
        invocation_tokens=settings.invocation_tokens,
        by_module=tuple(_of_module(module, theirs, found, base) for module, theirs in by_module.items()),
        num_possible_pairs=base.num_layers * len(base.modules),
        base_match=base_match(settings.base_name, base),
        base_name=ascii(settings.base_name[:_MAX_BASE_NAME])[1:-1][:_MAX_BASE_NAME],
        limits=tuple(_limits_used(found, limits)),
    )


def base_match(name: str, base: BaseDescription) -> BaseMatch:
    """Tells whether the name of a base in a configuration is one of this base."""
    if not name:
        return "NOT_NAMED"
    return "NAMED" if name in (base.name, *base.known_names) else "OTHER_NAME"


def _of_module(module: TargetModule, pairs: Sequence[Pair], found: Findings, base: BaseDescription) -> ModuleReport:
    norms = [found.norms[at] for pair in pairs if (at := (pair.layer, pair.slice)) in found.norms]
    return ModuleReport(
        module=module.name,
        site=module.site,
        num_pairs=len(pairs),
        num_layers=base.num_layers if pairs[0].layer < base.num_layers else 1,
        min_rank=min(pair.rank for pair in pairs),
        max_rank=max(pair.rank for pair in pairs),
        min_scaling=min(pair.scaling for pair in pairs),
        max_scaling=max(pair.scaling for pair in pairs),
        max_abs_a=max(found.statistics[pair.a.name].max_abs for pair in pairs),
        max_abs_b=max(found.statistics[pair.b.name].max_abs for pair in pairs),
        min_norm=min(norms, default=None),
        max_norm=max(norms, default=None),
    )


def _limits_used(found: Findings, limits: Limits) -> Iterable[LimitUse]:
    settings, tensors = found.settings, found.tensors
    yield LimitUse("config_bytes", found.config_bytes, limits.max_config_bytes)
    yield LimitUse("weights_bytes", found.weights_bytes, limits.max_weights_bytes)
    yield LimitUse("header_bytes", min(tensor.offset for tensor in tensors) - 8, limits.max_header_bytes)
    yield LimitUse("tensors", len(tensors), limits.max_tensors)
    yield LimitUse("name_chars", max(len(tensor.name) for tensor in tensors), limits.max_name_chars)
    yield LimitUse("dimension", max(max(tensor.shape) for tensor in tensors), limits.max_dimension)
    yield LimitUse("rank", max(pair.rank for pair in found.pairs), limits.max_rank)
    yield LimitUse("abs", max(statistics.max_abs for statistics in found.statistics.values()), limits.max_abs)
    yield LimitUse("scaling", max(abs(pair.scaling) for pair in found.pairs), limits.max_scaling)
    yield LimitUse("patterns", max(len(settings.rank_patterns), len(settings.alpha_patterns)), limits.max_patterns)
    yield LimitUse("invocation_tokens", len(settings.invocation_tokens), limits.max_invocation_tokens)


def _shorten(warnings: Sequence[str], max_warnings: int) -> list[str]:
    more = len(warnings) - max_warnings
    return list(warnings) if more <= 0 else [*warnings[:max_warnings], f"and {more} more warnings"]
