"""Checks of an adapter in a folder, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.adapters import AdapterFiles
from veneer.artifact import Artifact, ArtifactError, BaseDescription, Limits, check
from veneer.errors import InvalidArgumentError

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STEM = "base_model.model.model.layers.0.self_attn.q_proj"


def checked(folder: Path, base: BaseDescription, **limits: Any) -> Artifact:
    """Checks the adapter in a folder."""
    files = AdapterFiles.of(folder)
    return check(files.config, files.weights, base, Limits(**limits))


def faults_of(folder: Path, base: BaseDescription, **limits: Any) -> list[str]:
    """Every fault of the adapter in a folder, which is refused."""
    with pytest.raises(ArtifactError) as error:
        checked(folder, base, **limits)
    assert isinstance(error.value, InvalidArgumentError)
    assert all(str(violation) in error.value.message for violation in error.value.violations)
    return [str(violation) for violation in error.value.violations]
