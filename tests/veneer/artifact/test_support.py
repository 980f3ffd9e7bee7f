"""The table of what is served, and that the check does what it says."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from veneer.artifact import Limits
from veneer.artifact.config import read_config
from veneer.artifact.faults import Faults
from veneer.artifact.support import FEATURES, FIELDS, Verdict, refused_tensor


def _faults(**fields: object) -> list[str]:
    faults = Faults(64)
    config = json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16, **fields}).encode()
    read_config(config, limits=Limits(), faults=faults)
    return [str(violation) for violation in faults.violations]


@pytest.mark.parametrize("field", [name for name, feature in FIELDS.items() if feature.verdict is Verdict.REFUSED])
def test_a_field_of_what_is_refused_is_refused_with_its_hint_unless_it_is_off(field: str) -> None:
    feature = FIELDS[field]
    (fault,) = _faults(**{field: ["something"]})
    assert feature.name in fault
    assert feature.note in fault
    for off in (None, False, [], {}, "", *feature.off):
        assert _faults(**{field: off}) == []


@pytest.mark.parametrize("field", [name for name, feature in FIELDS.items() if feature.verdict is Verdict.NO_EFFECT])
def test_a_field_without_effect_is_accepted_whatever_it_says(field: str) -> None:
    assert _faults(**{field: ["something"]}) == []


def test_no_field_and_no_name_is_in_the_table_twice_and_everything_is_explained() -> None:
    assert max(Counter(name for feature in FEATURES for name in feature.fields).values()) == 1
    assert max(Counter(feature.name for feature in FEATURES).values()) == 1
    assert all(feature.note for feature in FEATURES)
    assert all(feature.fields or feature.tensors for feature in FEATURES if feature.verdict is not Verdict.EXACT)


def test_only_what_is_refused_is_known_by_names_that_stop_a_file() -> None:
    assert all(feature.verdict is Verdict.REFUSED for feature in FEATURES if feature.tensors)
    assert refused_tensor("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight") is None


def test_the_hint_of_a_base_changing_start_tells_how_to_convert() -> None:
    for start in ("pissa", "pissa_niter_4", "olora", "corda", "lora_ga"):
        (fault,) = _faults(init_lora_weights=start)
        assert "path_initial_model_for_weight_conversion" in fault
    (fault,) = _faults(init_lora_weights="loftq")
    assert "PEFT converts none of it; train with plain LoRA" in fault


@pytest.mark.parametrize(
    ("start", "field"),
    [("corda", "corda_config"), ("lora_ga", "lora_ga_config"), ("loftq", "loftq_config"), ("eva", "eva_config")],
)
def test_the_settings_of_a_start_count_only_with_their_own_start(start: str, field: str) -> None:
    for other in (True, False, None, "gaussian"):
        assert _faults(init_lora_weights=other, **{field: {"some": "thing"}}) == []
    assert len(_faults(init_lora_weights=start, **{field: {"some": "thing"}})) == (start != "eva")


@pytest.mark.parametrize("value", [True, False, None])
def test_merge_weights_of_old_files_says_nothing_of_the_weights(value: object) -> None:
    assert _faults(merge_weights=value, enable_lora=None) == []
    (fault,) = _faults(enable_lora=[True, False, True])
    assert "LoRA on parts of a fused projection" in fault
