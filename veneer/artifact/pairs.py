"""Pairs of A and B: completeness, shapes, rank and scaling of each, and agreement with the configuration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from veneer.artifact.config import WHERE, Config, PatternValue
from veneer.artifact.description import BaseDescription, TargetModule
from veneer.artifact.faults import Faults, quote
from veneer.artifact.header import TensorRef
from veneer.artifact.keys import Key, KeyMap
from veneer.artifact.limits import Limits
from veneer.artifact.patterns import Names, Pattern, PatternError

WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Pair:
    """A low-rank update of one module: `y += scaling · ((x Aᵀ) Bᵀ + lora_bias)`, then perhaps DoRA's magnitude.

    Attributes:
        layer: Decoder layer; the number of layers for what is outside of them.
        slice: Index into the base's modules, or its edges outside of the layers.
        rank: Rows of A and columns of B.
        scaling: alpha / rank, or alpha / sqrt(rank) with rsLoRA.
        a: A, `[rank, in_features]`.
        b: B, `[out_features, rank]`.
        magnitude: DoRA's magnitude, `[out_features]`; None without.
        lora_bias: `[out_features]`; None without.
    """

    layer: int
    slice: int
    rank: int
    scaling: float
    a: TensorRef
    b: TensorRef
    magnitude: TensorRef | None = None
    lora_bias: TensorRef | None = None


@dataclass(frozen=True, slots=True)
class Bias:
    """A trained bias in place of the base's own.

    Attributes:
        layer: Decoder layer.
        slice: Index into the base's modules.
        ref: `[out_features]`.
    """

    layer: int
    slice: int
    ref: TensorRef


@dataclass(frozen=True, slots=True)
class Updates:
    """What a file does to the base: the sound pairs and biases, each by layer, then slice; and copies of what the base has."""

    pairs: tuple[Pair, ...]
    biases: tuple[Bias, ...]
    copies: tuple[tuple[Key, TensorRef], ...] = ()


@dataclass(frozen=True, slots=True)
class _Module:
    """The tensors of one module by what they are: `Key.part`."""

    path: str
    parts: dict[str, TensorRef] = field(default_factory=dict)


def pair_up(tensors: Iterable[TensorRef], config: Config, base: BaseDescription, *, limits: Limits, faults: Faults) -> Updates:
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
        The sound pairs, biases and copies; every tensor of the file is in one of them when no fault was noted. Whether copies are
        equal to the base is for the caller to look at.
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
    copies = tuple((key, tensor) for key, tensor in keys if key.part == "copy")
    modules = _gather([(key, tensor) for key, tensor in keys if key.part != "copy"], faults=faults)
    ranks, alphas = _Values(config.rank_patterns, config.rank), _Values(config.alpha_patterns, config.alpha)
    pairs, biases = [], []
    for (layer, index), found in sorted(modules.items()):
        if set(found.parts) - {"bias"}:
            expected, alpha = ranks.of(found.path), alphas.of(found.path)
            pair = _check_pair(found, layer, index, config, base, expected=expected, alpha=alpha, limits=limits, faults=faults)
            if pair is not None:
                pairs.append(pair)
        bias = _check_vector(found, "bias", base.module_at(layer, index), faults=faults)
        if bias is not None:
            biases.append(Bias(layer, index, bias))
            if config.bias == "none":
                faults.add(f"{WEIGHTS}: {quote(bias.name)}", f"is a trained bias, but {WHERE} does not say so in bias")
    if config.invocation_tokens and any(pair.layer == base.num_layers for pair in pairs):
        faults.add(WEIGHTS, "LoRA on embedding or head is not supported together with alora_invocation_tokens")
    if config.has_ties and any(pair.layer == base.num_layers for pair in pairs):
        faults.add(
            f"{WHERE}: ensure_weight_tying",
            "is not supported together with LoRA on embedding or head; adapt embed_tokens and lm_head each for itself",
        )
    adapted = [found.path for found in modules.values() if "A" in found.parts]
    has_head = all(key.has_head for key, _ in keys)
    if adapted:
        all_paths = key_map.paths(has_head=has_head)
        for name, values in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
            _check_patterns(name, values, adapted, all_paths, config, faults=faults)
        _compare_targets(config, adapted, limits=limits)
    elif not len(faults):
        faults.add(WEIGHTS, "has no LoRA pair; nothing would be applied")
    return Updates(tuple(pairs), tuple(biases), copies)


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
    adapters = sorted({key.adapter for key, _ in keys if key.part not in ("bias", "copy")})
    if len(adapters) > 1:
        faults.add(WEIGHTS, f"keys name several adapters: {', '.join(quote(name) for name in adapters)}; save one of them")
    if len({key.has_head for key, _ in keys}) > 1:
        faults.add(
            WEIGHTS, "some keys have base_model.model.model.layers and others base_model.model.layers; one form must be used"
        )


def _gather(keys: Iterable[tuple[Key, TensorRef]], *, faults: Faults) -> dict[tuple[int, int], _Module]:
    modules: dict[tuple[int, int], _Module] = {}
    for key, tensor in keys:
        parts = modules.setdefault((key.layer, key.slice), _Module(path=key.path)).parts
        earlier = parts.setdefault(key.part, tensor)
        if earlier is not tensor:
            faults.add(f"{WEIGHTS}: {quote(tensor.name)}", f"is the same {key.part} as {quote(earlier.name)}")
    return modules


def _check_pair(
    found: _Module,
    layer: int,
    index: int,
    config: Config,
    base: BaseDescription,
    *,
    expected: float,
    alpha: float,
    limits: Limits,
    faults: Faults,
) -> Pair | None:
    a, b = found.parts.get("A"), found.parts.get("B")
    if a is None or b is None:
        there = next(found.parts[part] for part in ("B", "A", "magnitude", "lora_bias") if part in found.parts)
        faults.add(f"{WEIGHTS}: {quote(there.name)}", f"has no matching lora_{'A' if a is None else 'B'}")
        return None
    module = base.module_at(layer, index)
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
    if expected and expected != rank:
        faults.add(f"{WEIGHTS}: {quote(a.name)}", f"has rank {rank}, but {WHERE} gives {int(expected)}")
    scaling = alpha / math.sqrt(rank) if config.use_rslora else alpha / rank
    if abs(scaling) > limits.max_scaling:
        faults.add(
            f"{WEIGHTS}: {quote(a.name)}", f"has scaling {scaling:g}; at most {limits.max_scaling:g} in magnitude is allowed"
        )
    vectors = {}
    for part, asked, where in (("magnitude", config.use_dora, "use_dora"), ("lora_bias", config.lora_bias, "lora_bias")):
        vector = vectors[part] = _check_vector(found, part, module, faults=faults)
        if asked and vector is None and layer == base.num_layers:
            faults.add(f"{WEIGHTS}: {quote(a.name)}", f"is not supported together with {where}")
        elif asked and vector is None:
            faults.add(f"{WEIGHTS}: {quote(a.name)}", f"has no {part} beside it, but {WHERE} says {where}")
        elif vector is not None and not asked:
            faults.add(f"{WEIGHTS}: {quote(vector.name)}", f"is a {part}, but {WHERE} does not say {where}")
    if len(faults) > known:
        return None
    return Pair(layer=layer, slice=index, rank=rank, scaling=scaling, a=a, b=b, **vectors)


def _check_vector(found: _Module, part: str, module: TargetModule, *, faults: Faults) -> TensorRef | None:
    vector, width = found.parts.get(part), module.out_features
    if vector is not None and vector.shape != (width,):
        faults.add(f"{WEIGHTS}: {quote(vector.name)}", f"has shape {list(vector.shape)}; this base needs [{width}]")
    return vector


class _Values:
    """What a pattern field gives each module: the first entry that matches decides.

    Args:
        entries: In the order of the file.
        default: For modules that none matches.
    """

    def __init__(self, entries: Sequence[PatternValue], default: float) -> None:
        self._entries, self._default = entries, default
        self._names = Names([entry.pattern for entry in entries])
        self._expressions = [(place, entry) for place, entry in enumerate(entries) if not entry.pattern.is_name]

    def of(self, path: str) -> float:
        """Returns the value for a module."""
        first = min(self._names.matching_tail(path), default=len(self._entries))
        for place, entry in self._expressions:
            if place > first:
                break
            if entry.pattern.matches_tail(path):
                return entry.value
        return self._entries[first].value if first < len(self._entries) else self._default

    def unused(self, paths: Sequence[str]) -> list[PatternValue]:
        """Returns the entries that match none of these modules."""
        used = {place for path in paths for place in self._names.matching_tail(path)}
        used |= {place for place, entry in self._expressions if any(entry.pattern.matches_tail(path) for path in paths)}
        return [entry for place, entry in enumerate(self._entries) if place not in used]


def _check_patterns(
    name: str, values: _Values, adapted: Sequence[str], all_paths: Sequence[str], config: Config, *, faults: Faults
) -> None:
    """Refuses patterns that name no module of the base; PEFT would ignore them in silence."""
    for entry in values.unused(adapted):
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
