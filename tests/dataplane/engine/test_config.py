"""Settings of an engine."""

from __future__ import annotations

import pytest

from dataplane.engine.config import EngineConfig
from veneer.errors import InvalidArgumentError


def test_settings_survive_json() -> None:
    config = EngineConfig(model_dir="/m", dtype="float32", max_sequences=3, eos_ids=(2, 0))
    assert EngineConfig.from_json(config.to_json()) == config


def test_every_bad_setting_is_named() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        EngineConfig(
            model_dir="/m", dtype="int8", device="tpu", max_sequences=64, max_step_tokens=8, max_step_rank_rows=20, page_size=0
        )
    fields = {violation.field for violation in caught.value.violations}
    assert fields == {"dtype", "device", "max_step_tokens", "max_step_rank_rows", "page_size"}


@pytest.mark.parametrize("cpu_form", ["auto", "native", "torch"])
def test_fp8_is_refused_where_no_form_computes_it(cpu_form: str) -> None:
    with pytest.raises(InvalidArgumentError, match="adapter_dtype: fp8 is computed on a device only"):
        EngineConfig(model_dir="/m", adapter_dtype="fp8", cpu_form=cpu_form)


def test_adapters_are_of_the_models_dtype_unless_the_settings_say_fp8() -> None:
    assert EngineConfig(model_dir="/m", dtype="float16").arena_dtype == "float16"
    assert EngineConfig(model_dir="/m", dtype="float16", adapter_dtype="fp8", device="cuda").arena_dtype == "fp8"
