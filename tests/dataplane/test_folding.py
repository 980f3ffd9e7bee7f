"""Gain and shift against the formula that PEFT computes."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from dataplane import folding
from dataplane.folding import fold, image_pairs
from dataplane.lora.image import build_image
from tests.fixtures.adapters import AdapterFiles, Tensors, encode, make_adapter_folder
from veneer.artifact import BaseDescription, BaseWeights, check


@pytest.mark.parametrize("present", list(itertools.product((False, True), repeat=4)))
def test_the_fold_is_what_the_formula_says(present: tuple[bool, ...]) -> None:
    random = np.random.default_rng(0)
    drawn = [random.standard_normal(6).astype(np.float32) for _ in range(4)]
    gain, scaled, old, new = (vector if there else None for vector, there in zip(drawn, present, strict=True))
    base, low_rank = random.standard_normal((2, 6)).astype(np.float32)
    zero, one = np.zeros(6, np.float32), np.ones(6, np.float32)
    was = zero if old is None else old
    inner = base + low_rank + (zero if scaled is None else scaled)
    wanted = (one if gain is None else gain) * inner + (was if new is None else new)
    shift = fold(gain=gain, scaled=scaled, old=old, new=new)
    got = (one if gain is None else gain) * (base + was + low_rank) + (zero if shift is None else shift)
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert (shift is None) == (scaled is None and new is None and (old is None or gain is None))
    assert shift is None or shift.dtype == np.float32


def test_rows_of_zeros_have_no_gain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_base: BaseDescription) -> None:
    def magnitudes(tensors: Tensors) -> None:
        for name in [name for name in tensors if "lora_A" in name]:
            tensors[name.replace("lora_A.weight", "lora_magnitude_vector")] = ("F32", (16,), encode(np.full(16, 3.0), "F32"))

    norms = np.where(np.arange(16) % 2, 2.0, 0.0).astype(np.float32)
    monkeypatch.setattr(folding, "_norms", lambda *arguments: norms)
    monkeypatch.setattr(BaseWeights, "vector", lambda self, name: None)
    files = AdapterFiles.of(
        make_adapter_folder(tmp_path, tiny_base, modules=["q_proj"], edit=magnitudes, config={"use_dora": True})
    )
    artifact = check(files.config, files.weights, tiny_base)
    for pair in image_pairs(artifact, files.weights, base=tiny_base, base_weights=BaseWeights(tmp_path)):
        assert pair.gain is not None
        assert pair.gain.tolist() == [0.0, 1.5] * 8


def test_a_plain_adapter_reads_nothing_of_the_base(tmp_path: Path, tiny_base: BaseDescription) -> None:
    files = AdapterFiles.of(make_adapter_folder(tmp_path / "adapter", tiny_base))
    artifact = check(files.config, files.weights, tiny_base)
    pairs = list(image_pairs(artifact, files.weights, base=tiny_base, base_weights=BaseWeights(tmp_path / "nowhere")))
    assert [(pair.gain, pair.shift) for pair in pairs] == [(None, None)] * len(artifact.pairs)
    sizes = {"num_layers": tiny_base.num_layers, "num_slices": len(tiny_base.modules)}
    image = build_image(pairs, version="v", base_digest="b", dtype="float32", **sizes)
    assert [(block.gain_offset, block.shift_offset) for block in image.blocks] == [(-1, -1)] * len(pairs)


@pytest.mark.parametrize(("stored", "dtype"), [("BF16", "bfloat16"), ("F16", "float16"), ("F32", "float32"), ("BF16", "float32")])
def test_what_is_left_as_it_is_makes_the_same_image_as_what_is_widened(
    tmp_path: Path, tiny_base: BaseDescription, stored: str, dtype: str
) -> None:
    files = AdapterFiles.of(make_adapter_folder(tmp_path, tiny_base, dtype=stored))
    artifact = check(files.config, files.weights, tiny_base)
    sizes = {"num_layers": tiny_base.num_layers, "num_slices": len(tiny_base.modules)}
    kept, widened = (
        build_image(
            image_pairs(artifact, files.weights, base=tiny_base, base_weights=BaseWeights(tmp_path), dtype=asked),
            version="v", base_digest="b", dtype=dtype, **sizes,
        )
        for asked in (dtype, "")
    )  # fmt: skip
    assert kept.payload.tobytes() == widened.payload.tobytes()
    assert kept.blocks == widened.blocks
