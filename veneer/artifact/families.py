"""Model families as adapters see them: which projections a layer has, of which shapes, and how far its positions reach."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from veneer.artifact.description import FUSED_MODULE_SITES, MODULE_SITES, TargetModule
from veneer.artifact.faults import Faults, quote


@dataclass(frozen=True, slots=True)
class Family:
    """A family that the data plane runs.

    Attributes:
        name: As the catalogue calls it.
        sites: Projections of a layer in slice order, with the fused product that computes each.
        head_dim: Width of a head where the configuration does not give it; None for hidden size / heads.
        biased_sites: Fused products whose projections have a bias.
    """

    name: str
    sites: dict[str, str]
    head_dim: int | None = None
    biased_sites: frozenset[str] = frozenset()


FAMILIES = {
    "LlamaForCausalLM": Family("llama", MODULE_SITES),
    "MistralForCausalLM": Family("mistral", MODULE_SITES),
    "Qwen2ForCausalLM": Family("qwen2", MODULE_SITES, biased_sites=frozenset({"qkv"})),
    "Qwen3ForCausalLM": Family("qwen3", MODULE_SITES, head_dim=128),
    "SmolLM3ForCausalLM": Family("smollm3", MODULE_SITES),
    "Phi3ForCausalLM": Family("phi3", FUSED_MODULE_SITES),
    "Gemma2ForCausalLM": Family("gemma2", MODULE_SITES, head_dim=256),
    "Gemma3ForCausalLM": Family("gemma3", MODULE_SITES, head_dim=256),
}
"""Families by architecture name."""


def has_bias(family: str, site: str) -> bool:
    """Whether the projections of a fused product have a bias in a family, given by its name in the catalogue."""
    return any(one.name == family and site in one.biased_sites for one in FAMILIES.values())


def read_family(config: dict[str, Any], *, faults: Faults) -> Family | None:
    """Finds the family that a configuration names."""
    names = config.get("architectures") or []
    found = [FAMILIES[name] for name in names if isinstance(name, str) and name in FAMILIES] if isinstance(names, list) else []
    if len(found) != 1 or len(names) != 1:
        faults.add(
            "config.json: architectures",
            f"{quote(names)} (model_type {quote(config.get('model_type'))}) is not supported; {', '.join(FAMILIES)} are",
        )
        return None
    if config.get("quantization_config"):
        faults.add("config.json: quantization_config", "quantised bases are not supported; convert the weights to bf16")
    return found[0]


def read_modules(config: dict[str, Any], family: Family, *, faults: Faults) -> tuple[TargetModule, ...]:
    """Gives the projections of a layer in slice order.

    Where the checkpoint holds several projections as one tensor, PEFT adapts that tensor: one A, and a B for all its rows. It is
    one slice, as wide as the whole product, so that nothing is cut or stored twice.
    """
    hidden = whole(config, "hidden_size", faults=faults)
    heads = whole(config, "num_attention_heads", faults=faults)
    inner = whole(config, "intermediate_size", faults=faults)
    kv_heads = heads if config.get("num_key_value_heads") is None else whole(config, "num_key_value_heads", faults=faults)
    head_dim = family.head_dim or hidden // heads
    if config.get("head_dim") is not None:
        head_dim = whole(config, "head_dim", faults=faults)
    features = {
        "self_attn.q_proj": (hidden, heads * head_dim),
        "self_attn.k_proj": (hidden, kv_heads * head_dim),
        "self_attn.v_proj": (hidden, kv_heads * head_dim),
        "self_attn.qkv_proj": (hidden, (heads + 2 * kv_heads) * head_dim),
        "self_attn.o_proj": (heads * head_dim, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.gate_up_proj": (hidden, 2 * inner),
        "mlp.down_proj": (inner, hidden),
    }
    return tuple(TargetModule("model.layers.{layer}." + path, site, *features[path]) for path, site in family.sites.items())


def read_max_context(config: dict[str, Any], *, faults: Faults) -> int:
    """Gives the longest context that the data plane serves.

    `yarn` reaches factor × original length, which often stands in `max_position_embeddings`. `longrope` is served within its
    original length: beyond it, every position changes with the length of the sequence.
    """
    written = whole(config, "max_position_embeddings", faults=faults, largest=1 << 30)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(rope, dict) and isinstance(rope.get("full_attention"), dict):
        rope = rope["full_attention"]
    if not isinstance(rope, dict):
        return written
    kind = rope.get("rope_type") or rope.get("type")
    outer, inner = (part.get("original_max_position_embeddings") for part in (config, rope))
    original, factor = outer or inner or written, rope.get("factor")
    if type(original) is not int or not 0 < original <= 1 << 30:
        return written  # the data plane refuses it
    if kind == "yarn" and inner is not None and isinstance(factor, int | float) and 0 < factor < 1 << 20:
        return max(written, int(factor * original))
    return min(written, original) if kind in ("longrope", "su") else written


def whole(config: dict[str, Any], key: str, *, faults: Faults, largest: int = 1 << 20) -> int:
    """Reads a positive whole number."""
    value = config.get(key)
    if type(value) is not int or not 0 < value <= largest:
        faults.add(f"config.json: {key}", f"must be a whole number from 1 to {largest}, not {quote(value)}")
        return 1
    return value
