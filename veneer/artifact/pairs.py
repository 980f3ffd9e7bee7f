"""Pairs of A and B: completeness, shapes, rank and scaling of each, and agreement with the configuration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from veneer.artifact.config import WHERE, Config, PatternValue
from veneer.artifact.description import BaseDescription
from veneer.artifact.faults import Faults, quote
from veneer.artifact.header import TensorRef
from veneer.artifact.keys import Key, KeyMap
from veneer.artifact.limits import Limits
from veneer.artifact.patterns import Pattern, PatternError

WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Pair:
    """A low-rank update of one module: `y += scaling · (x Aᵀ) Bᵀ`.

    Attributes:
        layer: Decoder layer.
        slice: Index into the base's modules.
        rank: Rows of A and columns of B.
        scaling: alpha / rank, or alpha / sqrt(rank) with rsLoRA.
        a: A, `[rank, in_features]`.
        b: B, `[out_features, rank]`.
    """

    layer: int
    slice: int
    rank: int
    scaling: float
    a: TensorRef
    b: TensorRef


@dataclass(slots=True)
class _Half:
    path: str
    a: TensorRef | None = None
    b: TensorRef | None = None


def pair_up(
    tensors: Iterable[TensorRef], config: Config, base: BaseDescription, *, limits: Limits, faults: Faults
) -> tuple[Pair, ...]:
    """Makes pairs of a file's tensors and checks them against the base and the configuration.

    Args:
        tensors: All tensors of the file.
        config: Its configuration; differences that do no harm are added to its warnings.
        base: The base.
        limits: What is allowed.
        faults: Receives everything that is wrong.

    Raises:
        ArtifactError: The configuration's expressions would take too long to match.

    Returns:
        The sound pairs by layer, then slice; every tensor of the file is in one of them when no fault was noted.
    """
    _bound_matching(config, base, limits=limits, faults=faults)
    key_map = KeyMap(base)
    keys: list[tuple[Key, TensorRef]] = []
    for tensor in tensors:
        key = key_map.parse(tensor.name)
        if isinstance(key, Key):
            keys.append((key, tensor))
        else:
            faults.add(f"{WEIGHTS}: {quote(tensor.name)}", key)
    _check_one_writer(keys, faults=faults)
    halves = _gather(keys, faults=faults)
    pairs = []
    for (layer, index), half in sorted(halves.items()):
        pair = _check_pair(half, layer, index, config, base, limits=limits, faults=faults)
        if pair is not None:
            pairs.append(pair)
    adapted = [half.path for half in halves.values()]
    has_head = all(key.has_head for key, _ in keys)
    if adapted:
        _check_patterns(config, adapted, key_map.paths(has_head=has_head), faults=faults)
        _compare_targets(config, adapted, limits=limits)
    elif not len(faults):
        faults.add(WEIGHTS, "has no LoRA pair; nothing would be applied")
    return tuple(pairs)


def _bound_matching(config: Config, base: BaseDescription, *, limits: Limits, faults: Faults) -> None:
    """Refuses expressions that would take long to match; nothing can be said of the pairs then.

    Raises:
        ArtifactError: They would.
    """
    entries = (*config.rank_patterns, *config.alpha_patterns)
    num_steps = sum(entry.pattern.num_steps for entry in entries) * base.num_layers * len(base.modules)
    if num_steps > limits.max_pattern_steps:
        description = f"its expressions may take {num_steps} steps to match; at most {limits.max_pattern_steps} are allowed"
        faults.add(WHERE, f"{description}: name modules in place of expressions")
        faults.raise_if_any()


def _check_one_writer(keys: Sequence[tuple[Key, TensorRef]], *, faults: Faults) -> None:
    """Refuses files put together from several adapters or models."""
    adapters = sorted({key.adapter for key, _ in keys})
    if len(adapters) > 1:
        faults.add(WEIGHTS, f"keys name several adapters: {', '.join(quote(name) for name in adapters)}; save one of them")
    if len({key.has_head for key, _ in keys}) > 1:
        faults.add(
            WEIGHTS, "some keys have base_model.model.model.layers and others base_model.model.layers; one form must be used"
        )


def _gather(keys: Iterable[tuple[Key, TensorRef]], *, faults: Faults) -> dict[tuple[int, int], _Half]:
    halves: dict[tuple[int, int], _Half] = {}
    for key, tensor in keys:
        half = halves.setdefault((key.layer, key.slice), _Half(path=key.path))
        earlier = half.a if key.part == "A" else half.b
        if earlier is not None:
            faults.add(f"{WEIGHTS}: {quote(tensor.name)}", f"is the same {key.part} as {quote(earlier.name)}")
        elif key.part == "A":
            half.a = tensor
        else:
            half.b = tensor
    return halves


def _check_pair(
    half: _Half, layer: int, index: int, config: Config, base: BaseDescription, *, limits: Limits, faults: Faults
) -> Pair | None:
    a, b = half.a, half.b
    if a is None or b is None:
        missing, other = ("A", b) if a is None else ("B", a)
        faults.add(f"{WEIGHTS}: {quote(other.name if other else half.path)}", f"has no matching lora_{missing}")
        return None
    module = base.modules[index]
    known = len(faults)
    if len(a.shape) != 2 or a.shape[1] != module.in_features:
        faults.add(f"{WEIGHTS}: {quote(a.name)}", f"has shape {list(a.shape)}; this base needs [rank, {module.in_features}]")
    if len(b.shape) != 2 or b.shape[0] != module.out_features:
        faults.add(f"{WEIGHTS}: {quote(b.name)}", f"has shape {list(b.shape)}; this base needs [{module.out_features}, rank]")
    if len(faults) > known:
        return None
    rank = a.shape[0]
    if b.shape[1] != rank:
        faults.add(f"{WEIGHTS}: {quote(b.name)}", f"has {b.shape[1]} columns, but its lora_A has {rank} rows; both are the rank")
    elif rank > limits.max_rank:
        faults.add(f"{WEIGHTS}: {quote(a.name)}", f"has rank {rank}; at most {limits.max_rank} is allowed")
    expected = _first_match(config.rank_patterns, half.path, config.rank)
    if expected and expected != rank:
        faults.add(f"{WEIGHTS}: {quote(a.name)}", f"has rank {rank}, but {WHERE} gives {int(expected)}")
    alpha = _first_match(config.alpha_patterns, half.path, config.alpha)
    scaling = alpha / math.sqrt(rank) if config.use_rslora else alpha / rank
    if abs(scaling) > limits.max_scaling:
        faults.add(
            f"{WEIGHTS}: {quote(a.name)}", f"has scaling {scaling:g}; at most {limits.max_scaling:g} in magnitude is allowed"
        )
    if len(faults) > known:
        return None
    return Pair(layer=layer, slice=index, rank=rank, scaling=scaling, a=a, b=b)


def _first_match(patterns: Iterable[PatternValue], path: str, default: float) -> float:
    return next((entry.value for entry in patterns if entry.pattern.matches_tail(path)), default)


def _check_patterns(config: Config, adapted: Sequence[str], all_paths: Sequence[str], *, faults: Faults) -> None:
    """Refuses patterns that name no module of the base; PEFT would ignore them in silence."""
    for name, entries in (("rank_pattern", config.rank_patterns), ("alpha_pattern", config.alpha_patterns)):
        for entry in entries:
            if any(entry.pattern.matches_tail(path) for path in adapted):
                continue
            shown = quote(entry.pattern.text)
            if any(entry.pattern.matches_tail(path) for path in all_paths):
                config.warnings.append(f"{name} names {shown}, but the file has no such module")
            else:
                faults.add(f"{WHERE}: {name}[{shown}]", "matches no module of the base")


def _compare_targets(config: Config, adapted: Sequence[str], *, limits: Limits) -> None:
    """Reports differences between target_modules and the tensors; the tensors decide."""
    targets = config.target_modules
    if targets is None or (isinstance(targets, str) and targets.lower() == "all-linear"):
        return
    if isinstance(targets, str):
        try:
            pattern = Pattern(targets)
        except PatternError as error:
            config.warnings.append(f"target_modules was not compared with the tensors: {error}")
            return
        if pattern.num_steps * len(adapted) > limits.max_pattern_steps:
            config.warnings.append("target_modules was not compared with the tensors: its expression takes too long to match")
            return
        unnamed = [path for path in adapted if not pattern.matches_whole(path)]
    else:
        ends = {ending for path in adapted for ending in _endings(path)}
        for target in targets:
            if target not in ends:
                config.warnings.append(f"target_modules names {quote(target)}, but the file has no such module")
        names = set(targets)
        unnamed = [path for path in adapted if names.isdisjoint(_endings(path))]
    if unnamed:
        config.warnings.append(
            f"target_modules does not name {len(unnamed)} modules that the file has, e.g. {quote(unnamed[0])}; they are applied"
        )


def _endings(path: str) -> list[str]:
    """Lists a path and what is left of it after each dot."""
    segments = path.split(".")
    return [".".join(segments[start:]) for start in range(len(segments))]
