"""Weights of a model folder, a part at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

import veneer.artifact.base_weights
from tests.veneer.artifact.conftest import MakeBase
from veneer.artifact import BaseWeights
from veneer.errors import VeneerError

NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("elements", [1, 24, 100, 1 << 20])
def test_parts_of_a_matrix_are_its_rows_and_the_callers_to_change(
    make_base: MakeBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elements: int
) -> None:
    folder = make_base(tmp_path, shards=3)
    monkeypatch.setattr(veneer.artifact.base_weights, "_PART_ELEMENTS", elements)
    parts = list(BaseWeights(folder).rows(NAME))
    expected = next(tensors[NAME] for path in folder.glob("*.safetensors") if NAME in (tensors := load_file(path)))
    assert np.array_equal(np.concatenate(parts), expected.float().numpy())
    assert len(parts) == (16 if elements <= 24 else 4 if elements == 100 else 1)
    for part in parts:
        part += 1


def test_what_is_not_there_is_none_or_an_error_and_nothing_is_read_before(make_base: MakeBase, tmp_path: Path) -> None:
    weights = BaseWeights(make_base(tmp_path / "base"))
    assert weights.vector("model.layers.0.self_attn.q_proj.bias") is None
    assert weights.vector("model.norm.weight") is not None
    nowhere = BaseWeights(tmp_path / "nowhere")
    with pytest.raises(VeneerError, match="missing"):
        nowhere.vector("model.norm.weight")
