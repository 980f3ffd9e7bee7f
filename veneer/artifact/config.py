"""`adapter_config.json`: which fields are read, which have no effect on serving, and which are refused unless they are off."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from veneer.artifact.faults import Faults, quote
from veneer.artifact.limits import Limits
from veneer.artifact.patterns import Pattern, PatternError
from veneer.artifact.strict_json import parse_object
from veneer.artifact.support import CONVERT, FIELDS, PLAIN_STARTS, QUANTIZED, Verdict

WHERE = "adapter_config.json"


_SMALLEST_ALPHA = 1e-30  # smaller ones would scale to 0 in float32, and the adapter would do nothing in silence


@dataclass(frozen=True, slots=True)
class PatternValue:
    """One entry of rank_pattern or alpha_pattern.

    Attributes:
        pattern: Which modules it is for.
        value: Their rank or alpha.
    """

    pattern: Pattern
    value: float


@dataclass(frozen=True, slots=True)
class Config:
    """The fields that matter.

    Attributes:
        rank: Rank of modules that no pattern names; 0 when the file's value is unusable.
        alpha: Alpha of modules that no pattern names.
        use_rslora: Scale by alpha / sqrt(r) in place of alpha / r.
        rank_patterns: In the file's order; the first that matches counts.
        alpha_patterns: Likewise.
        target_modules: Module names, an expression, or None when the file leaves it open.
        has_ties: What adapts the embedding is to adapt a head of the same weights too.
        use_dora: Every pair has a magnitude.
        lora_bias: Every pair has a bias.
        bias: `none`, or which of the base's biases the file may replace: `all` or `lora_only`.
        invocation_tokens: Token ids that activate the adapter from where they last stand in a prompt; empty when it is active
            from the first token.
        base_name: Name of the base that the adapter was trained on, empty when not given.
        warnings: What is worth a look.
    """

    rank: int = 0
    alpha: float = math.nan
    use_rslora: bool = False
    rank_patterns: tuple[PatternValue, ...] = ()
    alpha_patterns: tuple[PatternValue, ...] = ()
    target_modules: tuple[str, ...] | str | None = None
    has_ties: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    bias: str = "none"
    invocation_tokens: tuple[int, ...] = ()
    base_name: str = ""
    warnings: list[str] = field(default_factory=list)


def read_config(data: bytes, *, limits: Limits, faults: Faults) -> Config | None:
    """Reads and checks the configuration.

    Args:
        data: Bytes of the file.
        limits: What is allowed.
        faults: Receives everything that is wrong.

    Returns:
        What could be read, or None when the file is no JSON object.
    """
    if len(data) > limits.max_config_bytes:
        faults.add(WHERE, f"is larger than the {limits.max_config_bytes} bytes that are allowed")
        return None
    fields = parse_object(data, WHERE, max_depth=8, faults=faults)
    if fields is None:
        return None
    warnings: list[str] = []
    _check_support(fields, warnings, faults=faults)
    if fields.get("peft_type") != "LORA":
        faults.add(f"{WHERE}: peft_type", f"must be LORA, not {quote(fields.get('peft_type'))}")
    bias = fields.get("bias") or "none"
    if bias not in ("none", "all", "lora_only"):
        faults.add(f"{WHERE}: bias", f"must be none, all or lora_only, not {quote(bias)}")
    base_name = fields.get("base_model_name_or_path")
    if base_name is not None and not isinstance(base_name, str):
        faults.add(f"{WHERE}: base_model_name_or_path", f"must be a string, not {quote(base_name)}")
        base_name = None
    config = Config(
        rank=int(_read_rank(fields.get("r"), "r", limits=limits, faults=faults)),
        alpha=_read_alpha(fields.get("lora_alpha"), "lora_alpha", limits=limits, faults=faults),
        use_rslora=_read_flag(fields, "use_rslora", faults=faults),
        rank_patterns=_read_patterns(fields, "rank_pattern", limits=limits, faults=faults),
        alpha_patterns=_read_patterns(fields, "alpha_pattern", limits=limits, faults=faults),
        target_modules=_read_targets(fields.get("target_modules"), warnings, limits=limits, faults=faults),
        has_ties=bool(fields.get("ensure_weight_tying")),
        use_dora=_read_flag(fields, "use_dora", faults=faults),
        lora_bias=_read_flag(fields, "lora_bias", faults=faults),
        bias=bias if isinstance(bias, str) else "none",
        invocation_tokens=_read_invocation(fields.get("alora_invocation_tokens"), limits=limits, faults=faults),
        base_name=base_name or "",
        warnings=warnings,
    )
    _check_together(config, faults=faults)
    return config


def _check_together(config: Config, *, faults: Faults) -> None:
    """Refuses what PEFT refuses together, and what it would compute otherwise than its parts say."""
    if config.use_dora and config.lora_bias:
        faults.add(f"{WHERE}: lora_bias", "is not supported together with use_dora")
    if config.invocation_tokens and config.use_dora:
        faults.add(f"{WHERE}: use_dora", "is not supported together with alora_invocation_tokens")
    if config.invocation_tokens and config.bias != "none":
        faults.add(f"{WHERE}: bias", "is not supported together with alora_invocation_tokens, since it would act before them")


def _read_flag(fields: Mapping[str, Any], name: str, *, faults: Faults) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        faults.add(f"{WHERE}: {name}", f"must be true or false, not {quote(value)}")
    return value is True


def _check_support(fields: Mapping[str, Any], warnings: list[str], *, faults: Faults) -> None:
    for name, value in fields.items():
        known = FIELDS.get(name)
        if known is None:
            if value is None or value is False or value in ("", [], {}):
                warnings.append(f"{WHERE} has the unknown field {quote(name)}; it is off, so it is ignored")
            else:
                faults.add(
                    f"{WHERE}: {quote(name)}", f"is unknown and set to {quote(value)}; remove it, or save with PEFT 0.21 or older"
                )
        elif known.verdict is Verdict.REFUSED and not known.is_off(value):
            faults.add(f"{WHERE}: {name}", f"{quote(value)} is not supported; {known.name}: {known.note}")
    start = fields.get("init_lora_weights", True)
    if start is not None and not isinstance(start, bool) and start not in PLAIN_STARTS:
        faults.add(
            f"{WHERE}: init_lora_weights", f"{quote(start)} is not supported; {QUANTIZED if start == 'loftq' else CONVERT}"
        )


def _read_rank(value: Any, name: str, *, limits: Limits, faults: Faults) -> float:
    if type(value) is not int or not 1 <= value <= limits.max_rank:
        faults.add(f"{WHERE}: {name}", f"must be a whole number from 1 to {limits.max_rank}, not {quote(value)}")
        return 0
    return value


def _read_alpha(value: Any, name: str, *, limits: Limits, faults: Faults) -> float:
    largest = limits.max_scaling * limits.max_rank
    if type(value) not in (int, float) or not _SMALLEST_ALPHA <= abs(value) <= largest:
        allowed = f"a number other than 0, of magnitude {_SMALLEST_ALPHA:g} to {largest:g}"
        faults.add(f"{WHERE}: {name}", f"must be {allowed}, not {quote(value)}")
        return math.nan
    return float(value)


def _read_patterns(fields: Mapping[str, Any], name: str, *, limits: Limits, faults: Faults) -> tuple[PatternValue, ...]:
    entries = fields.get(name)
    if entries is None:
        return ()
    if not isinstance(entries, dict) or len(entries) > limits.max_patterns:
        faults.add(f"{WHERE}: {name}", f"must map at most {limits.max_patterns} patterns to numbers")
        return ()
    read = _read_rank if name == "rank_pattern" else _read_alpha
    values = []
    for text, value in entries.items():
        where = f"{name}[{quote(text)}]"
        number = read(value, where, limits=limits, faults=faults)
        if len(text) > limits.max_pattern_chars:
            faults.add(f"{WHERE}: {where}", f"is longer than {limits.max_pattern_chars} characters")
            continue
        try:
            values.append(PatternValue(pattern=Pattern(text), value=number))
        except PatternError as error:
            faults.add(f"{WHERE}: {where}", f"is not an expression that can be used: {error}")
    return tuple(values)


def _read_targets(value: Any, warnings: list[str], *, limits: Limits, faults: Faults) -> tuple[str, ...] | str | None:
    """Reads what the tensors are compared with. They decide, so that nothing is refused for its length."""
    where = f"{WHERE}: target_modules"
    if value is None:
        return None
    if isinstance(value, str):
        if len(value) > limits.max_pattern_chars:
            most = f"more than the {limits.max_pattern_chars} that are looked at"
            warnings.append(
                f"target_modules was not compared with the tensors: its expression has {len(value)} characters, {most}"
            )
            return None
        return value
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        faults.add(where, "must be a string or a list of names")
        return None
    names = [name for name in value if len(name) <= limits.max_name_chars]
    if len(names) < len(value) or len(names) > limits.max_tensors:
        most = f"at most {limits.max_tensors} names of at most {limits.max_name_chars} characters are looked at"
        warnings.append(f"target_modules was not compared with the tensors: {most}")
        return None
    return tuple(names)


def _read_invocation(value: Any, *, limits: Limits, faults: Faults) -> tuple[int, ...]:
    """Reads the tokens that activate the adapter; PEFT takes an empty list for none, and so does this."""
    if value is None or value == []:
        return ()
    most = limits.max_invocation_tokens
    if not isinstance(value, list) or len(value) > most or not all(type(token) is int and token >= 0 for token in value):
        faults.add(f"{WHERE}: alora_invocation_tokens", f"must be a list of at most {most} token ids, not {quote(value)}")
        return ()
    return tuple(value)
