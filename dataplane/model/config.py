"""What a Llama-family `config.json` says, checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from veneer.errors import InvalidArgumentError, Violation

_FAMILY = "LlamaForCausalLM"
_REFUSED_FLAGS = ("attention_bias", "mlp_bias")


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Parameters of the `llama3` rotary type: long wavelengths are stretched, short ones kept, those between are blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Shapes and constants of one Llama-family model.

    Attributes:
        num_layers: Decoder layers.
        hidden: Width of the residual stream.
        intermediate: Width of the MLP.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; divides `num_heads`.
        head_dim: Width of a head.
        vocab_size: Rows of the embedding.
        max_context: Positions the model was trained for.
        norm_eps: Epsilon of the RMS norms.
        rope_theta: Base of the rotary frequencies.
        rope_llama3: Set when the rotary type is `llama3`.
        tied: The head is the embedding.
    """

    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    norm_eps: float
    rope_theta: float
    rope_llama3: Llama3Rope | None
    tied: bool

    @property
    def q_size(self) -> int:
        """Columns of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim


def read_config(model_dir: Path) -> LlamaConfig:
    """Reads `config.json` of a Hugging Face folder.

    Raises:
        InvalidArgumentError: The file is missing or no JSON, or says something that this model code does not compute; every
            fault is listed.
    """
    try:
        fields = json.loads((model_dir / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidArgumentError.of([Violation("config.json", f"cannot be read: {error}")]) from error
    if not isinstance(fields, dict):
        raise InvalidArgumentError.of([Violation("config.json", "must be a JSON object")])
    return parse_config(fields)


def parse_config(fields: dict[str, Any]) -> LlamaConfig:
    """Checks the fields of a `config.json`; see `read_config`."""
    faults: list[Violation] = []

    def fault(field: str, description: str) -> None:
        faults.append(Violation(f"config.json: {field}", description))

    def integer(field: str, default: int | None = None) -> int:
        value = fields.get(field)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            fault(field, f"must be a positive integer, is {value!r}")
            return 1
        return value

    if fields.get("architectures") != [_FAMILY]:
        fault("architectures", f"must be [{_FAMILY!r}], is {fields.get('architectures')!r}")
    if fields.get("hidden_act", "silu") != "silu":
        fault("hidden_act", f"must be 'silu', is {fields['hidden_act']!r}")
    for flag in _REFUSED_FLAGS:
        if fields.get(flag):
            fault(flag, "biased projections are not supported")
    hidden, num_heads = integer("hidden_size"), integer("num_attention_heads")
    num_kv_heads = integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        fault("num_key_value_heads", f"must divide num_attention_heads = {num_heads}, is {num_kv_heads}")
    head_dim = integer("head_dim", max(1, hidden // num_heads))
    if head_dim % 2:
        fault("head_dim", f"must be even for rotary positions, is {head_dim}")
    theta, llama3 = _rope(fields, fault)
    config = LlamaConfig(
        num_layers=integer("num_hidden_layers"),
        hidden=hidden,
        intermediate=integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=integer("vocab_size"),
        max_context=integer("max_position_embeddings", 2048),
        norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_llama3=llama3,
        tied=bool(fields.get("tie_word_embeddings", False)),
    )
    if faults:
        raise InvalidArgumentError.of(faults)
    return config


def _rope(fields: dict[str, Any], fault: Any) -> tuple[float, Llama3Rope | None]:
    """Reads both spellings: `rope_theta` + `rope_scaling`, and the newer `rope_parameters`."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta", fields.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        fault("rope_scaling.rope_type", f"must be 'default' or 'llama3', is {kind!r}")
        return theta, None
    try:
        return theta, Llama3Rope(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position=int(rope["original_max_position_embeddings"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        fault("rope_scaling", f"llama3 parameters are incomplete: {error}")
        return theta, None
