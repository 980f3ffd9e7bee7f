"""Rotary positions as `config.json` describes them: a base, and how its frequencies are scaled for a longer context."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dataplane.model.fields import Fields


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Long wavelengths are stretched, short ones kept, those between are blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Dimensions that turn often within the original context are kept, those that turn seldom are stretched, with a ramp between.

    Attributes:
        factor: How much is stretched.
        original_max_position: Context before stretching.
        beta_fast: Turns within the original context from which on a dimension is kept.
        beta_slow: Turns up to which it is stretched.
        truncate: The ends of the ramp are whole dimensions.
    """

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class FreeScaling:
    """Each frequency is divided by a number of its own (`longrope`)."""

    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Rope:
    """One set of rotary angles; layers that have equal records share a table.

    Attributes:
        theta: Base of the frequencies.
        width: Dimensions of a head that turn, from the first; the others stay as they are.
        scaling: How frequencies differ from `theta ** (-2i / width)`.
        magnitude: Factor of cosines and sines.
        max_context: Positions for which this record is what the model computes.
    """

    theta: float
    width: int
    scaling: LinearScaling | Llama3Scaling | YarnScaling | FreeScaling | None
    magnitude: float
    max_context: int


def read_rope(rope: Fields, config: Fields, *, theta: float, width: int) -> Rope:
    """Reads one set of rotary parameters.

    The types `dynamic` and `longrope` take other frequencies for all positions, those in the cache included, as soon as a
    sequence outgrows the original context. No cache can follow that: with the keys of early tokens, all hidden states that were
    computed from them would change. Within the original context both are exact, and that is what they are served with.

    Args:
        rope: `rope_parameters`, or `rope_scaling`, or their part for one kind of layer.
        config: The whole configuration.
        theta: Base where `rope` has none.
        width: Dimensions of a head that turn.
    """
    max_position = config.whole("max_position_embeddings")
    own = Rope(rope.number("rope_theta", theta), width, None, 1.0, max_position)
    if own.theta <= 1:
        rope.refuse("rope_theta", f"must be more than 1, is {own.theta:g}")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    match kind:
        case "default":
            return own
        case "dynamic":
            rope.number("factor")
            return own
        case "linear":
            return replace(own, scaling=LinearScaling(rope.number("factor")))
        case "llama3":
            low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
            if high <= low:
                rope.refuse("high_freq_factor", f"must be more than low_freq_factor = {low:g}, is {high:g}")
            return replace(own, scaling=Llama3Scaling(rope.number("factor"), low, high, _original(rope, config)))
        case "yarn":
            return _yarn(own, rope, config)
        case "longrope" | "su":
            return _longrope(own, rope, config)
    rope.refuse("rope_type", f"must be 'default', 'linear', 'dynamic', 'llama3', 'yarn' or 'longrope', is {kind!r}")
    return own


def _original(rope: Fields, config: Fields) -> int:
    """Returns the context before scaling; a field beside `rope_scaling` goes before one inside, as in transformers."""
    name = "original_max_position_embeddings"
    return config.whole(name) if name in config else rope.whole(name, config.whole("max_position_embeddings"))


def _yarn(own: Rope, rope: Fields, config: Fields) -> Rope:
    original = _original(rope, config)
    factor = rope.number("factor", own.max_context / original)

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    written = magnitude(1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        written = magnitude(rope.number("mscale")) / magnitude(rope.number("mscale_all_dim"))
    scaling = YarnScaling(
        factor, original, rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0), rope.get("truncate") is not False
    )
    # Many configurations keep the original length in max_position_embeddings when they ask for stretching.
    context = max(own.max_context, int(factor * original)) if "original_max_position_embeddings" in rope else own.max_context
    return replace(own, scaling=scaling, magnitude=rope.number("attention_factor", written), max_context=context)


def _longrope(own: Rope, rope: Fields, config: Fields) -> Rope:
    original = _original(rope, config)
    factor = rope.number("factor", own.max_context / original)
    written = 1.0 if factor <= 1 or original < 2 else math.sqrt(1 + math.log(factor) / math.log(original))
    values = rope.sequence("short_factor", own.width // 2)
    if values is None or not all(isinstance(value, int | float) and value > 0 for value in values):
        rope.refuse("short_factor", f"must be {own.width // 2} positive numbers")
        return own
    scaling = FreeScaling(tuple(float(value) for value in values))
    context = min(original, own.max_context)
    return replace(own, scaling=scaling, magnitude=rope.number("attention_factor", written), max_context=context)
