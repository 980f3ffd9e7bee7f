"""What is served of what PEFT writes: one table, read by publish, load, `veneer check` and docs/adapters.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Verdict(Enum):
    """What becomes of a feature."""

    EXACT = "exact"
    NO_EFFECT = "no effect on serving"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that an adapter may have.

    Attributes:
        name: As an error names it.
        verdict: What becomes of it.
        note: Of what is served, how; of what is refused, what the sender can do.
        fields: Fields of `adapter_config.json` that ask for it.
        off: Values, beside null, false and empty ones, with which such a field asks for nothing.
        tensors: Expression that names of its tensors match, where the name alone tells.
    """

    name: str
    verdict: Verdict
    note: str
    fields: tuple[str, ...] = ()
    off: tuple[Any, ...] = ()
    tensors: re.Pattern[str] | None = field(default=None)

    def is_off(self, value: Any) -> bool:
        """Whether a field with this value asks for nothing."""
        return value is None or any(type(value) is type(off) and value == off for off in (False, [], {}, "", *self.off))


def _exact(name: str, note: str, *fields: str) -> Feature:
    return Feature(name, Verdict.EXACT, note, fields)


def _no_effect(name: str, note: str, *fields: str) -> Feature:
    return Feature(name, Verdict.NO_EFFECT, note, fields)


def _refused(name: str, hint: str, *fields: str, off: tuple[Any, ...] = (), tensors: str | None = None) -> Feature:
    return Feature(name, Verdict.REFUSED, hint, fields, off, None if tensors is None else re.compile(tensors))


PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica")
"""Values of `init_lora_weights`, beside true and false, that leave the base as it is."""

_RETRAIN = "train with plain LoRA"
CONVERT = "its training changed the base weights; save with path_initial_model_for_weight_conversion to get a plain LoRA"
QUANTIZED = "LoftQ: its training changed the base weights, and PEFT converts none of it; train with plain LoRA"
_PROJECTIONS = "train LoRA on the projections of the layers only"

FEATURES = (
    _exact("LoRA", "ranks 1 to 256, alpha any number other than 0; scaled by alpha / r", "peft_type", "r", "lora_alpha"),
    _exact("rsLoRA", "scaled by alpha / sqrt(r)", "use_rslora"),
    _exact(
        "rank and alpha patterns",
        "PEFT's own rule: the first that matches the end of a module's path; one that matches no module of the base is refused",
        "rank_pattern",
        "alpha_pattern",
    ),
    _exact(
        "any subset of layers and projections",
        "the tensors in the file decide; where `target_modules` (list, name, expression, `all-linear`) differs, it warns",
        "target_modules",
    ),
    _exact(
        "LoRA on `embed_tokens` and `lm_head`",
        "not by nodes that hold adapters in fp8; copies of the base's embedding and head, which PEFT adds by default, are taken "
        "where they equal the base's in the copy's element type; together with DoRA, `lora_bias`, an aLoRA or "
        "`ensure_weight_tying` refused",
    ),
    _exact("fused projections", "on bases whose files hold q, k, v or gate, up as one tensor (Phi-3), under that tensor's name"),
    _exact("names", "with the prefix of a model with its head or without, with one adapter name in the keys or without"),
    _exact("element types", "fp32, fp16 and bf16, mixed too; rounded once to the type that the base is served in"),
    _exact(
        "DoRA",
        "a gain for each column, made when a node first loads the version; together with `lora_bias` or an aLoRA refused",
        "use_dora",
    ),
    _exact("bias inside LoRA layers", "added with the pair's scaling", "lora_bias"),
    _exact(
        "trained biases",
        "`all` and `lora_only` replace the base's own biases, where it has any (Qwen2: q, k, v); together with an aLoRA refused",
        "bias",
    ),
    _exact("aLoRA", "active from the last occurrence of its tokens in the prompt on", "alora_invocation_tokens"),
    _exact(
        "starts of training",
        f"`true`, `false`, {', '.join(f'`{start}`' for start in PLAIN_STARTS)}. Others change the base: PiSSA, OLoRA and "
        "CorDA are served as PEFT converts them with `path_initial_model_for_weight_conversion`",
        "init_lora_weights",
    ),
    _exact("name of the base", "a name that the base does not have is a warning", "base_model_name_or_path"),
    _no_effect(
        "choice of modules while training",
        "what came of it is in the file",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
    ),
    _no_effect(
        "settings of starts of training",
        "they count only with their own start in `init_lora_weights`, which is then refused",
        "loftq_config",
        "lora_ga_config",
        "corda_config",
    ),
    _no_effect(
        "ties of adapted embeddings",
        "without LoRA on `embed_tokens` or `lm_head` there is nothing to tie; with it refused",
        "ensure_weight_tying",
    ),
    _no_effect(
        "merge_weights of PEFT 0.2",
        "it merged the weights into the base while serving, with the same result; the file is the same either way",
        "merge_weights",
    ),
    _no_effect(
        "dropout and notes of training", "they are past", "lora_dropout", "inference_mode", "eva_config", "runtime_config"
    ),
    _no_effect(
        "notes of PEFT",
        "they say nothing of the weights",
        "auto_mapping",
        "peft_version",
        "revision",
        "megatron_core",
        "qalora_group_size",
    ),
    _refused("other tasks", "only adapters of causal language models are served", "task_type", off=("CAUSAL_LM",)),
    _refused(
        "trained token rows (trainable_token_indices)",
        "train without added tokens",
        "trainable_token_indices",
        tensors=r"trainable_tokens",
    ),
    _refused(
        "full copies of modules (modules_to_save), as for added tokens",
        f"{_PROJECTIONS}, or leave embeddings as they are",
        "modules_to_save",
        tensors=r"modules_to_save|(embed_tokens|lm_head|norm|layernorm)(\.(?!lora_)[^.]+)?\.weight$",
    ),
    _refused("LoRA on parts of a fused projection (enable_lora of PEFT 0.2)", _RETRAIN, "enable_lora"),
    _refused("LoRA on single parameters", "only linear modules may be targeted", "target_parameters"),
    _refused("replicated layers", "they change the base", "layer_replication"),
    _refused("fan_in_fan_out", "weights are stored (out, in) in this family", "fan_in_fan_out"),
    _refused("KaSA", _RETRAIN, "kasa_config"),
    _refused("QALoRA", _RETRAIN, "use_qalora"),
    _refused("BD-LoRA", _RETRAIN, "use_bdlora"),
    _refused("VeLoRA", _RETRAIN, "velora_config"),
    _refused("MonteCLoRA", _RETRAIN, "monteclora_config"),
    _refused("Arrow routing", _RETRAIN, "arrow_config"),
    _refused("Megatron layers", "they are another model family", "megatron_config"),
    _refused("AdaLoRA", _RETRAIN, tensors=r"\.lora_E|ranknum"),
    _refused("IA3", _RETRAIN, tensors=r"\.ia3_l"),
    _refused("LoHa", _RETRAIN, tensors=r"\.hada_"),
    _refused("LoKr", _RETRAIN, tensors=r"\.lokr_"),
    _refused("VeRA", _RETRAIN, tensors=r"vera_"),
    _refused("prompt tuning", _RETRAIN, tensors=r"prompt_embeddings"),
)
"""Everything that PEFT 0.21's LoRA can write, and its other methods as far as the names of their tensors tell them."""

FIELDS: Mapping[str, Feature] = {name: feature for feature in FEATURES for name in feature.fields}
"""Every field of PEFT 0.21's LoraConfig, and those of PEFT 0.2 that are gone."""

_REFUSED_TENSORS = re.compile("|".join(f"(?:{one.tensors.pattern})" for one in FEATURES if one.tensors is not None))


def refused_tensor(name: str) -> Feature | None:
    """Returns the feature that is refused and that a tensor of this name belongs to."""
    if not _REFUSED_TENSORS.search(name):
        return None
    return next((feature for feature in FEATURES if feature.tensors is not None and feature.tensors.search(name)), None)
