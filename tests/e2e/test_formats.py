"""Adapters whose effect lies beside their A and B: published, checked in the jail, folded by the node, and served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.e2e.conftest import Publish
from tests.e2e.driving import generate
from tests.e2e.markers import ANY_MARKER, write_marker
from tests.fixtures.stack import FIRST_MARKER_COORDINATE, MARKERS
from veneer.artifact import BaseDescription, BaseWeights
from veneer.client import Client
from veneer.errors import InvalidArgumentError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

Tensors = dict[str, np.ndarray]


def _edited(folder: Path, edit: Callable[[Tensors], None]) -> Path:
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    edit(tensors)
    save_file(tensors, weights)
    return folder


async def test_an_adapter_answers_from_its_bias_alone(acme: Client, tmp_path: Path, model_base: BaseDescription) -> None:
    def move_to_bias(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name] = np.zeros_like(tensors[name])
            if "lora_B" in name:
                tensors[name.replace(".weight", ".bias")] = np.zeros(len(tensors[name]), np.float32)
            if "down_proj.lora_B" in name:
                tensors[name.replace(".weight", ".bias")][FIRST_MARKER_COORDINATE + MARKERS.index("E")] = 1000.0

    folder = _edited(write_marker(tmp_path / "E", model_base, "E", lora_bias=True), move_to_bias)
    await acme.publish(folder, adapter="biased", base=model_base.digest)
    assert (await generate(acme, "biased")).text == "E" * 8
    assert not ANY_MARKER.search((await generate(acme)).text)


async def test_magnitudes_scale_what_weights_and_adapter_make_together(
    acme: Client, tmp_path: Path, model_base: BaseDescription, model_dir: Path
) -> None:
    weights = BaseWeights(model_dir)

    def with_magnitudes(factor: float) -> Callable[[Tensors], None]:
        def edit(tensors: Tensors) -> None:
            for name in [name for name in tensors if "lora_A" in name]:
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                merged = np.concatenate(list(weights.rows(f"{module}.weight")))
                merged += tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
                tensors[f"base_model.model.{module}.lora_magnitude_vector"] = factor * np.linalg.norm(merged, axis=1)

        return edit

    for factor, adapter in ((1.0, "whole"), (0.0, "silent")):
        folder = _edited(write_marker(tmp_path / adapter, model_base, "F", use_dora=True), with_magnitudes(factor))
        await acme.publish(folder, adapter=adapter, base=model_base.digest)
    assert (await generate(acme, "whole")).text == "F" * 8
    assert not ANY_MARKER.search((await generate(acme, "silent")).text)


async def test_what_is_not_served_is_refused_with_what_to_do(acme: Client, publish: Publish, tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["base_model.model.lm_head.base_layer.weight"] = np.ones((4, 8), np.float32)

    folder = _edited(write_marker(tmp_path / "head", publish.base, "A", modules_to_save=["embed_tokens"]), add)
    with pytest.raises(InvalidArgumentError) as refused:
        await acme.publish(folder, adapter="head", base=publish.base.digest)
    faults = str(refused.value)
    assert "full copies of modules (modules_to_save)" in faults
    assert "save_embedding_layers=False" in faults
