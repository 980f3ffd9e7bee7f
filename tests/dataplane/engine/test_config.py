"""Settings of an engine."""

from __future__ import annotations

import pytest

from dataplane.engine.config import EngineConfig
from veneer.errors import InvalidArgumentError


def test_settings_survive_json() -> None:
    config = EngineConfig(model_dir="/m", dtype="float32", max_sequences=3)
    assert EngineConfig.from_json(config.to_json()) == config


def test_every_bad_setting_is_named() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        EngineConfig(
            model_dir="/m", dtype="int8", device="tpu", max_sequences=64, max_step_tokens=8, max_step_rank_rows=20, page_size=0
        )
    fields = {violation.field for violation in caught.value.violations}
    assert fields == {"dtype", "device", "max_step_tokens", "max_step_rank_rows", "page_size"}
