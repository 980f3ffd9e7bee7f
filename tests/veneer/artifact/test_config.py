from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

import pytest

from veneer.artifact import ArtifactError, Limits
from veneer.artifact.config import Config, read_config
from veneer.artifact.faults import Faults
from veneer.artifact.support import FIELDS

PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 8, "lora_alpha": 16}


def _read(**config: Any) -> Config:
    faults = Faults(64)
    found = read_config(json.dumps({**PLAIN, **config}).encode(), limits=Limits(), faults=faults)
    faults.raise_if_any()
    assert found is not None
    return found


def test_what_matters_is_read() -> None:
    config = _read(
        lora_alpha=2.5, use_rslora=True, rank_pattern={"q_proj": 4}, target_modules=["q_proj"], base_model_name_or_path="org/base"
    )
    assert (config.rank, config.alpha, config.use_rslora, config.target_modules, config.base_name) == (
        8,
        2.5,
        True,
        ("q_proj",),
        "org/base",
    )
    assert [(entry.pattern.text, entry.value) for entry in config.rank_patterns] == [("q_proj", 4)]
    assert config.warnings == []


@pytest.mark.parametrize("tokens", [None, [], [0], [5, 6, 5], [1] * 256])
def test_the_tokens_that_activate_an_adapter_are_read(tokens: list[int] | None) -> None:
    config = _read(alora_invocation_tokens=tokens, task_type="CAUSAL_LM")
    assert config.invocation_tokens == tuple(tokens or ())
    assert config.warnings == []


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"peft_type": "IA3"}, "peft_type: must be LORA, not 'IA3'"),
        ({"peft_type": None}, "must be LORA"),
        ({"task_type": "SEQ_CLS"}, "task_type: 'SEQ_CLS' is not supported; other tasks: only adapters of causal language models"),
        ({"r": 0}, "r: must be a whole number from 1 to 256, not 0"),
        ({"r": 257}, "from 1 to 256, not 257"),
        ({"r": 8.0}, "not 8.0"),
        ({"r": True}, "not True"),
        ({"r": None}, "not None"),
        ({"r": "8"}, "not '8'"),
        ({"lora_alpha": 0}, "lora_alpha: must be a number other than 0"),
        ({"lora_alpha": 1e-40}, "must be a number other than 0"),
        ({"lora_alpha": None}, "not None"),
        ({"lora_alpha": 1e30}, "not 1e+30"),
        ({"lora_alpha": 10**40}, "must be a number"),
        ({"lora_alpha": "16"}, "not '16'"),
        ({"use_rslora": 1}, "use_rslora: must be true or false, not 1"),
        ({"bias": "some"}, "bias: must be none, all or lora_only, not 'some'"),
        ({"bias": ["all"]}, "bias: must be none, all or lora_only, not ['all']"),
        ({"use_dora": 1}, "use_dora: must be true or false, not 1"),
        ({"lora_bias": "yes"}, "lora_bias: must be true or false, not 'yes'"),
        ({"use_dora": True, "lora_bias": True}, "lora_bias: is not supported together with use_dora"),
        ({"use_dora": True, "alora_invocation_tokens": [1]}, "use_dora: is not supported together with alora_invocation_tokens"),
        ({"bias": "all", "alora_invocation_tokens": [1]}, "bias: is not supported together with alora_invocation_tokens"),
        ({"modules_to_save": ["lm_head"]}, "full copies of modules"),
        ({"trainable_token_indices": [1]}, "trained token rows"),
        ({"alora_invocation_tokens": [1, -2]}, "alora_invocation_tokens: must be a list of at most 256 token ids, not [1, -2]"),
        ({"alora_invocation_tokens": [1, 2.0]}, "not [1, 2.0]"),
        ({"alora_invocation_tokens": [1, True]}, "not [1, True]"),
        ({"alora_invocation_tokens": [[1]]}, "not [[1]]"),
        ({"alora_invocation_tokens": "1 2"}, "not '1 2'"),
        ({"alora_invocation_tokens": 1}, "not 1"),
        ({"alora_invocation_tokens": [1] * 257}, "must be a list of at most 256 token ids"),
        ({"layer_replication": [[0, 2]]}, "replicated layers"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out: True is not supported"),
        ({"target_parameters": ["x"]}, "only linear modules"),
        ({"use_qalora": True}, "QALoRA"),
        ({"init_lora_weights": "pissa"}, "its training changed the base weights"),
        ({"init_lora_weights": "pissa_niter_16"}, "its training changed the base weights"),
        ({"init_lora_weights": "olora"}, "its training changed the base weights"),
        ({"init_lora_weights": 3}, "is not supported"),
        ({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}, "LoftQ"),
        ({"init_lora_weights": "corda", "corda_config": {"x": 1}}, "'corda' is not supported"),
        ({"megatron_config": {"x": 1}}, "Megatron"),
        ({"new_trick": True}, "'new_trick': is unknown and set to True"),
        ({"new_trick": 0}, "is unknown and set to 0"),
        ({"base_model_name_or_path": 5}, "must be a string"),
        ({"target_modules": 5}, "must be a string or a list of names"),
        ({"target_modules": [5]}, "must be a string or a list of names"),
        ({"rank_pattern": [1]}, "must map at most"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern['q_proj']: must be a whole number from 1 to 256, not 0"),
        ({"alpha_pattern": {"q_proj": 0}}, "alpha_pattern['q_proj']: must be a number other than 0"),
        ({"alpha_pattern": {"(": 1}}, "is not an expression that can be used: a parenthesis is not closed"),
        ({"alpha_pattern": {"x" * 2000: 1}}, "is longer than 1024 characters"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: dict[str, Any], fault: str) -> None:
    with pytest.raises(ArtifactError) as error:
        _read(**config)
    assert fault in error.value.message
    assert len(error.value.violations) == 1


def test_every_fault_is_listed_once() -> None:
    with pytest.raises(ArtifactError) as error:
        _read(r=0, lora_alpha=0, use_dora=2, mystery=1, bias="some")
    assert sorted(violation.field.rpartition(": ")[2] for violation in error.value.violations) == [
        "'mystery'",
        "bias",
        "lora_alpha",
        "r",
        "use_dora",
    ]


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_an_unknown_field_that_is_off_is_a_warning(value: object) -> None:
    assert _read(mystery=value).warnings == ["adapter_config.json has the unknown field 'mystery'; it is off, so it is ignored"]


def test_what_only_concerns_training_is_ignored() -> None:
    config = _read(
        lora_dropout=0.1,
        inference_mode=True,
        eva_config={"rho": 2.0},
        init_lora_weights="gaussian",
        layers_to_transform=[0],
        revision="main",
    )
    assert config.warnings == []


def test_a_negative_alpha_is_kept() -> None:
    assert _read(lora_alpha=-4).alpha == -4


def test_an_unusable_alpha_leaves_no_number_behind() -> None:
    faults = Faults(64)
    config = read_config(json.dumps({**PLAIN, "lora_alpha": "x"}).encode(), limits=Limits(), faults=faults)
    assert config is not None
    assert math.isnan(config.alpha)


def test_a_file_that_is_too_large_is_not_parsed() -> None:
    faults = Faults(64)
    assert read_config(b"{" * 100, limits=Limits(max_config_bytes=99), faults=faults) is None
    assert "larger than the 99 bytes" in str(faults.violations[0])


@pytest.mark.oracle
def test_the_table_knows_every_field_of_peft_and_accepts_its_defaults() -> None:
    peft = pytest.importorskip("peft")
    names = {field.name for field in fields(peft.LoraConfig)}
    assert set(FIELDS) - names == {"merge_weights", "enable_lora"}  # of PEFT 0.2
    assert {name for name in names if name not in FIELDS} == set()
    defaults = json.loads(json.dumps(peft.LoraConfig(task_type="CAUSAL_LM").to_dict(), default=str))
    assert _read(**defaults).warnings == []


@pytest.mark.parametrize(
    ("targets", "warning"),
    [
        ("(" + "|".join(f"layers.{layer}.self_attn.q_proj" for layer in range(99)) + ")", "its expression has"),
        (["x" * 257, "q_proj"], "names of at most 256 characters"),
        ([f"layers.{layer}.q_proj" for layer in range(4097)], "at most 4096 names"),
    ],
)
def test_what_target_modules_says_at_length_refuses_nothing_that_the_tensors_decide(targets: object, warning: str) -> None:
    config = _read(target_modules=targets)
    assert config.target_modules is None
    assert [warning in one for one in config.warnings] == [True]
