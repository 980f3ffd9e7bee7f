"""The families that this code computes: each is Llama, but for what its function here replaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dataplane.model.architecture import Architecture, LayerForm
from dataplane.model.fields import Fields
from dataplane.model.rope import read_rope

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class Family:
    """One entry of `FAMILIES`.

    Attributes:
        name: As the catalogue calls it.
        read: Makes the record of a configuration, whose faults are noted in it.
        defaults: What transformers takes for fields that a configuration leaves out.
    """

    name: str
    read: Callable[[Fields], Architecture]
    defaults: Mapping[str, Any] = field(default_factory=dict)


def _llama(
    fields: Fields, *, name: str = "llama", activation: str = "hidden_act", rope: Fields | None = None, partial: bool = False
) -> Architecture:
    """Reads what all families share.

    Args:
        fields: The configuration.
        name: Name of the family.
        activation: The field that names the MLP's activation.
        rope: The rotary parameters; by default `rope_parameters`, or `rope_scaling`, its older name.
        partial: Rotary positions may turn a share of a head's dimensions.
    """
    for flag in ("attention_bias", "mlp_bias"):
        if fields.get(flag):
            fields.refuse(flag, "these biases are not supported")
    hidden, num_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    num_kv_heads = fields.whole("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        fields.refuse("num_key_value_heads", f"must divide num_attention_heads = {num_heads}, is {num_kv_heads}")
    head_dim = fields.whole("head_dim", max(1, hidden // num_heads))
    rope = rope or _rope_fields(fields)
    share = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if share > 1 or (share != 1 and not partial):
        fields.refuse("partial_rotary_factor", f"must be 1 in this family, is {share:g}")
    width = int(head_dim * share)
    if width % 2 or not width:
        fields.refuse("head_dim", f"must be even for rotary positions, is {head_dim}, of which {width} turn")
    positions = read_rope(rope, fields, theta=fields.number("rope_theta"), width=max(width, 2))
    return Architecture(
        family=name,
        hidden=hidden,
        intermediate=fields.whole("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=fields.whole("vocab_size"),
        max_context=positions.max_context,
        norm_eps=fields.number("rms_norm_eps"),
        layers=(LayerForm(positions),) * fields.whole("num_hidden_layers"),
        tied=bool(fields.get("tie_word_embeddings")),
        activation=fields.choice(activation, _ACTIVATIONS),
        attention_scale=head_dim**-0.5,
    )


def _mistral(fields: Fields) -> Architecture:
    return _with_one_window(_llama(fields, name="mistral"), fields)


def _qwen2(fields: Fields) -> Architecture:
    return replace(_qwen(fields, "qwen2"), qkv_bias=True)


def _qwen3(fields: Fields) -> Architecture:
    return replace(_qwen(fields, "qwen3"), qk_norm=True)


def _qwen(fields: Fields, name: str) -> Architecture:
    plain = _llama(fields, name=name)
    window = _window(fields) if fields.get("use_sliding_window") else None
    first = fields.get("max_window_layers")
    if window is not None and (type(first) is not int or first < 0):
        fields.refuse("max_window_layers", f"must be a whole number, is {first!r}")
        first = 0
    return _with_windows(plain, fields, window, [window is not None and i >= first for i in range(plain.num_layers)])


def _smollm3(fields: Fields) -> Architecture:
    plain = _llama(fields, name="smollm3")
    every = fields.whole("no_rope_layer_interval", 4)
    turns = fields.sequence("no_rope_layers", plain.num_layers)  # 1 where a layer has positions
    if turns is None:
        turns = [(i + 1) % every for i in range(plain.num_layers)]
    layers = tuple(layer if turn else replace(layer, rope=None) for layer, turn in zip(plain.layers, turns, strict=True))
    window = _window(fields) if fields.get("use_sliding_window") else None
    slides = [window is not None and layer.rope is None for layer in layers]
    return _with_windows(replace(plain, layers=layers), fields, window, slides)


def _phi3(fields: Fields) -> Architecture:
    rope = _rope_fields(fields)
    if "yarn" in (rope.get("rope_type"), rope.get("type")):
        rope.refuse("rope_type", "'yarn' is not supported in this family: transformers reads it as longrope")
    plain = _llama(fields, name="phi3", rope=rope, partial=True)
    return _with_one_window(replace(plain, fused_weights=True), fields)


def _gemma2(fields: Fields) -> Architecture:
    plain = _gemma(fields, "gemma2")
    windowed = _with_windows(plain, fields, _window(fields), [i % 2 == 0 for i in range(plain.num_layers)])
    cap = fields.number("attn_logit_softcapping") if "attn_logit_softcapping" in fields else None
    return replace(windowed, attention_softcap=cap)


def _gemma3(fields: Fields) -> Architecture:
    ropes = fields.part("rope_parameters")
    if "rope_parameters" in fields and not all(kind in ropes for kind in _LAYER_TYPES):
        fields.refuse("rope_parameters", f"must hold one set for {' and one for '.join(_LAYER_TYPES)}")
    rope = ropes.part("full_attention") if "rope_parameters" in fields else fields.part("rope_scaling")
    plain = replace(_gemma(fields, "gemma3", rope=rope), qk_norm=True)
    if "attn_logit_softcapping" in fields:
        fields.refuse("attn_logit_softcapping", "is not supported in this family: transformers leaves it out")
    every = fields.whole("sliding_window_pattern", 6)
    windowed = _with_windows(plain, fields, _window(fields), [(i + 1) % every != 0 for i in range(plain.num_layers)])
    theta = fields.number("rope_local_base_freq")
    local = read_rope(ropes.part("sliding_attention"), fields, theta=theta, width=plain.head_dim)
    layers = tuple(layer if layer.window is None else replace(layer, rope=local) for layer in windowed.layers)
    return replace(windowed, layers=layers, max_context=min(plain.max_context, local.max_context))


def _gemma(fields: Fields, name: str, *, rope: Fields | None = None) -> Architecture:
    if fields.get("use_bidirectional_attention"):
        fields.refuse("use_bidirectional_attention", "a token sees only what lies before it")
    plain = _llama(fields, name=name, activation="hidden_activation", rope=rope)
    return replace(
        plain,
        norm_offset=1.0,
        post_norms=True,
        embedding_scale=plain.hidden**0.5,
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        logit_softcap=fields.number("final_logit_softcapping") if "final_logit_softcapping" in fields else None,
    )


def _rope_fields(fields: Fields) -> Fields:
    """Returns the rotary parameters under either name."""
    rope = fields.part("rope_parameters" if "rope_parameters" in fields else "rope_scaling")
    if any(kind in rope for kind in _LAYER_TYPES):
        fields.refuse("rope_parameters", "must be one set for all layers")
    return rope


def _with_one_window(plain: Architecture, fields: Fields) -> Architecture:
    if "layer_types" in fields:
        fields.refuse("layer_types", "is not supported in this family: all its layers see alike")
    window = _window(fields)
    return replace(plain, layers=tuple(replace(layer, window=window) for layer in plain.layers))


def _window(fields: Fields) -> int | None:
    return fields.whole("sliding_window") if "sliding_window" in fields else None


def _with_windows(plain: Architecture, fields: Fields, window: int | None, slides: Sequence[bool]) -> Architecture:
    """Gives a window to the layers that `layer_types` names; without such a list, to those that `slides` says."""
    kinds = fields.sequence("layer_types", plain.num_layers)
    if kinds is not None:
        if not all(kind in _LAYER_TYPES for kind in kinds):
            fields.refuse("layer_types", f"must hold {' and '.join(_LAYER_TYPES)} only")
        slides = [kind == "sliding_attention" for kind in kinds]
    if window is None and any(slides):
        fields.refuse("sliding_window", "must be given, since layers slide")
    layers = tuple(replace(layer, window=window if slide else None) for layer, slide in zip(plain.layers, slides, strict=True))
    return replace(plain, layers=layers)


_COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu"}
_QWEN = _COMMON | {"sliding_window": 4096, "max_window_layers": 28}
_GEMMA = _COMMON | {
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}  # fmt: skip

FAMILIES = {
    "LlamaForCausalLM": Family("llama", _llama, _COMMON),
    "MistralForCausalLM": Family("mistral", _mistral, _COMMON | {"sliding_window": 4096}),
    "Qwen2ForCausalLM": Family("qwen2", _qwen2, _QWEN),
    "Qwen3ForCausalLM": Family("qwen3", _qwen3, _QWEN | {"head_dim": 128}),
    "SmolLM3ForCausalLM": Family("smollm3", _smollm3, _COMMON | {"rope_theta": 2e6, "tie_word_embeddings": True}),
    "Phi3ForCausalLM": Family("phi3", _phi3, _COMMON | {"rms_norm_eps": 1e-5}),
    "Gemma2ForCausalLM": Family("gemma2", _gemma2, _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    "Gemma3ForCausalLM": Family("gemma3", _gemma3, _GEMMA | {"rope_theta": 1e6, "rope_local_base_freq": 1e4}),
}
"""Families by the name that `config.json` gives in `architectures`."""
