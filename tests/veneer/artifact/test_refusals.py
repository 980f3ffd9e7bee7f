"""The check as a whole, against files that cannot be served and files that an attacker would send."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fixtures.adapters import Tensors, describe_llama, encode, make_adapter_folder
from tests.veneer.artifact.checking import ALL, STEM, checked, faults_of
from veneer.artifact import BaseDescription
from veneer.errors import DataLossError


def _drop(suffix: str) -> Callable[[Tensors], None]:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith(suffix)] and None


def _set(name: str, dtype: str, values: np.ndarray) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: (dtype, values.shape, encode(values, dtype))})


def _poison(value: float, part: str = "A") -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        name = f"{STEM}.lora_{part}.weight"
        dtype, shape, data = tensors[name]
        values = np.frombuffer(data, dtype="<f4").copy()
        values[5] = value
        tensors[name] = (dtype, shape, values.tobytes())

    return edit


def _spell(tensors: Tensors) -> None:
    tensors[f"{STEM}.lora_typo.weight"] = tensors.pop(f"{STEM}.lora_A.weight")


def _double(tensors: Tensors) -> None:
    tensors[f"{STEM}.lora_A.other.weight"] = tensors[f"{STEM}.lora_A.weight"]


def _mix_prefixes(tensors: Tensors) -> None:
    for part in "AB":
        tensors[f"base_model.model.layers.0.self_attn.q_proj.lora_{part}.weight"] = tensors.pop(f"{STEM}.lora_{part}.weight")


@pytest.mark.parametrize(
    ("options", "faults"),
    [
        ({"edit": _drop("layers.0.self_attn.q_proj.lora_B.weight")}, [f"'{STEM}.lora_A.weight': has no matching lora_B"]),
        ({"edit": _drop("layers.0.self_attn.q_proj.lora_A.weight")}, [f"'{STEM}.lora_B.weight': has no matching lora_A"]),
        ({"edit": _spell}, ["is not an A or B of a LoRA pair", "has no matching lora_A"]),
        ({"edit": lambda tensors: tensors.clear()}, ["has no LoRA pair; nothing would be applied"]),
        ({"edit": _double}, ["keys name several adapters: '', 'other'", "is the same A as"]),
        ({"edit": _mix_prefixes}, ["one form must be used"]),
        ({"edit": _set(f"{STEM}.lora_A.weight", "F32", np.ones((8, 15)))}, ["has shape [8, 15]; this base needs [rank, 16]"]),
        ({"edit": _set(f"{STEM}.lora_B.weight", "F32", np.ones((17, 8)))}, ["has shape [17, 8]; this base needs [16, rank]"]),
        ({"edit": _set(f"{STEM}.lora_B.weight", "F32", np.ones((16, 7)))}, ["has 7 columns, but its lora_A has 8 rows"]),
        ({"edit": _set(f"{STEM}.lora_A.weight", "F32", np.ones(16))}, ["has shape [16]; this base needs [rank, 16]"]),
        ({"edit": _set(f"{STEM}.lora_A.weight", "F32", np.ones((8, 4, 4)))}, ["has shape [8, 4, 4]"]),
        ({"edit": _set(f"{STEM}.lora_A.weight", "F32", np.ones((0, 16)))}, ["has a dimension of 0"]),
        ({"edit": _poison(np.nan)}, ["has 1 elements that are NaN or infinite"]),
        ({"edit": _poison(np.inf, "B")}, ["has 1 elements that are NaN or infinite"]),
        ({"edit": _poison(70000.0)}, ["has an element of magnitude 70000; at most 65504 is allowed"]),
        ({"edit": _poison(-3e38)}, ["has an element of magnitude 3e+38"]),
        ({"edit": _poison(3.4e38)}, ["has 1 elements that become infinite in bfloat16", "has an element of magnitude 3.4e+38"]),
        ({"ranks": 257}, ["r: must be a whole number from 1 to 256", "has rank 257; at most 256 is allowed"]),
        ({"config": {"r": 4}}, ["has rank 8, but adapter_config.json gives 4"]),
        ({"config": {"rank_pattern": {"q_proj": 4}}}, ["has rank 8, but adapter_config.json gives 4"]),
        ({"config": {"rank_pattern": {"^q_proj": 8}}}, ["rank_pattern['^q_proj']: matches no module of the base"]),
        ({"config": {"alpha_pattern": {"proj": 8}}}, ["alpha_pattern['proj']: matches no module of the base"]),
        ({"alpha": 1e6, "config": {"alpha_pattern": {"v_proj": 1}}}, ["has scaling 125000; at most 65536 in magnitude"]),
        ({"config": {"peft_type": "IA3"}}, ["peft_type: must be LORA, not 'IA3'"]),
        (
            {
                "edit": _set("base_model.model.lm_head.weight", "F32", np.ones((32, 16))),
                "config": {"modules_to_save": ["lm_head"]},
            },
            [
                "modules_to_save: ['lm_head'] is not supported",
                "is a full copy of lm_head, and full copies of modules (modules_to_save) are not supported",
            ],
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_every_fault(
    options: dict[str, Any], faults: list[str], tmp_path: Path, tiny_base: BaseDescription
) -> None:
    found = faults_of(make_adapter_folder(tmp_path, tiny_base, **options), tiny_base)
    for fault in faults:
        assert any(fault in text for text in found), found


def _vector(name: str, width: int = 16) -> Callable[[Tensors], None]:
    return _set(f"{STEM}.{name}", "F32", np.ones(width))


def _magnitudes(tensors: Tensors) -> None:
    for name in [name for name in tensors if "lora_A" in name]:
        width = 16 if "q_proj" in name else 8
        _set(name.replace("lora_A.weight", "lora_magnitude_vector"), "F32", np.ones(width))(tensors)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"edit": _vector("lora_magnitude_vector")}, "is a magnitude, but adapter_config.json does not say use_dora"),
        ({"edit": _vector("lora_B.bias")}, "is a lora_bias, but adapter_config.json does not say lora_bias"),
        ({"edit": _vector("base_layer.bias")}, "is a trained bias, but adapter_config.json does not say so in bias"),
        ({"config": {"use_dora": True}}, "has no magnitude beside it, but adapter_config.json says use_dora"),
        ({"config": {"lora_bias": True}}, "has no lora_bias beside it, but adapter_config.json says lora_bias"),
        ({"edit": _vector("lora_magnitude_vector", 15)}, "has shape [15]; this base needs [16]"),
        ({"edit": _vector("base_layer.bias", 17), "config": {"bias": "all"}}, "has shape [17]; this base needs [16]"),
        (
            {"edit": _set("base_model.model.model.layers.0.self_attn.k_proj.lora_magnitude_vector", "F32", np.ones(8))},
            "k_proj.lora_magnitude_vector': has no matching lora_A",
        ),
        (
            {
                "edit": _set("base_model.model.model.layers.0.self_attn.o_proj.bias", "F32", np.ones(16)),
                "config": {"bias": "all"},
            },
            "this base has no bias at 'model.layers.0.self_attn.o_proj'",
        ),
        ({"edit": _vector("lora_magnitude_vector.other")}, "keys name several adapters: '', 'other'"),
    ],
)
def test_vectors_that_do_not_fit_the_pairs_the_configuration_or_the_base_are_refused(
    options: dict[str, Any], fault: str, tmp_path: Path, tiny_base: BaseDescription
) -> None:
    base = replace(tiny_base, family="qwen2")
    found = faults_of(make_adapter_folder(tmp_path, base, **options), base)
    assert any(fault in text for text in found), found


def test_vectors_are_read_beside_the_pairs(tmp_path: Path, tiny_base: BaseDescription) -> None:
    def add(tensors: Tensors) -> None:
        _magnitudes(tensors)
        _vector("base_layer.bias")(tensors)
        _set("base_model.model.model.layers.1.self_attn.k_proj.bias", "BF16", np.full(8, 0.5))(tensors)

    base = replace(tiny_base, family="qwen2")
    folder = make_adapter_folder(tmp_path, base, edit=add, config={"use_dora": True, "bias": "all"})
    vectors = checked(folder, base).read_vectors(folder / "adapter_model.safetensors")
    assert {place: len(vector) for place, vector in vectors.magnitudes.items()} == {(0, 0): 16, (0, 2): 8, (1, 0): 16, (1, 2): 8}
    assert vectors.lora_biases == {}
    assert vectors.biases.keys() == {(0, 0), (1, 1)}
    assert vectors.biases[1, 1].tolist() == [0.5] * 8


def test_faults_of_config_keys_shapes_and_values_come_together(tmp_path: Path, tiny_base: BaseDescription) -> None:
    def spoil(tensors: Tensors) -> None:
        _poison(np.nan)(tensors)
        _drop("layers.1.self_attn.q_proj.lora_B.weight")(tensors)
        _set("base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight", "F32", np.ones((8, 3)))(tensors)
        _set("mystery", "F32", np.ones(3))(tensors)

    found = faults_of(
        make_adapter_folder(tmp_path, tiny_base, edit=spoil, config={"use_qalora": True, "lora_alpha": 0}), tiny_base
    )
    assert len(found) == 6


def test_a_wrong_base_is_refused_for_its_shapes(tmp_path: Path, tiny_base: BaseDescription) -> None:
    other = describe_llama(num_layers=1, hidden=32, heads=4, kv_heads=4)
    found = faults_of(make_adapter_folder(tmp_path, tiny_base), other)
    assert any("layers 0 to 0" in text for text in found)
    assert any("this base needs [rank, 32]" in text for text in found)


def test_an_adapter_of_a_vocabulary_that_was_extended_is_refused_for_its_added_tokens(
    tmp_path: Path, tiny_base: BaseDescription
) -> None:
    def extend(tensors: Tensors) -> None:
        rows = np.ones((tiny_base.vocab_size + 2, tiny_base.modules[0].in_features))
        for name in ("model.embed_tokens", "lm_head"):
            _set(f"base_model.model.{name}.weight", "F32", rows)(tensors)

    found = faults_of(make_adapter_folder(tmp_path, tiny_base, edit=extend), tiny_base)
    assert len(found) == 2
    assert all("added tokens" in text for text in found)


def test_long_lists_of_faults_are_cut_and_counted(tmp_path: Path, tiny_base: BaseDescription) -> None:
    def rename(tensors: Tensors) -> None:
        for number, name in enumerate(list(tensors)):
            tensors[f"mystery{number}"] = tensors.pop(name)

    found = faults_of(make_adapter_folder(tmp_path, tiny_base, modules=ALL, edit=rename), tiny_base, max_faults=5)
    assert len(found) == 6
    assert found[-1] == "adapter: and 23 more faults like these"


def test_expressions_that_would_take_long_to_match_are_refused_or_left_out(tmp_path: Path, tiny_base: BaseDescription) -> None:
    slow = "a?" * 100 + ".*" * 20 + "q_proj"
    patterns = {f"{slow}|{number}": 2 for number in range(400)}
    folder = make_adapter_folder(tmp_path / "rank", tiny_base, config={"rank_pattern": patterns})
    assert "expressions may take" in " ".join(faults_of(folder, tiny_base))
    folder = make_adapter_folder(tmp_path / "few", tiny_base, config={"target_modules": r".*\.(q|v)_proj"})
    assert checked(folder, tiny_base).report.warnings == ()
    assert "not compared" in checked(folder, tiny_base, max_pattern_steps=1).report.warnings[0]


def test_long_lists_of_warnings_are_cut_and_counted(tmp_path: Path, tiny_base: BaseDescription) -> None:
    folder = make_adapter_folder(
        tmp_path, tiny_base, config={"target_modules": ["q_proj", "v_proj", *(f"m{n}" for n in range(9))]}
    )
    assert checked(folder, tiny_base, max_faults=5).report.warnings[5:] == ("and 4 more warnings",)


@pytest.mark.parametrize("cut", [0, 4, 8, 100, -1])
def test_a_truncated_file_is_refused(cut: int, tmp_path: Path, tiny_base: BaseDescription) -> None:
    path = make_adapter_folder(tmp_path, tiny_base) / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    assert len(faults_of(tmp_path, tiny_base)) >= 1


def test_missing_weights_are_a_refusal_beside_the_faults_of_the_config(tmp_path: Path, tiny_base: BaseDescription) -> None:
    (make_adapter_folder(tmp_path, tiny_base, config={"r": 0}) / "adapter_model.safetensors").unlink()
    assert [text.partition(" ")[0] for text in faults_of(tmp_path, tiny_base)] == [
        "adapter_config.json:",
        "adapter_model.safetensors:",
    ]


def test_a_pickle_under_the_right_name_is_refused_and_not_run(tmp_path: Path, tiny_base: BaseDescription) -> None:
    canary = tmp_path / "canary"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return canary.touch, ()

    path = make_adapter_folder(tmp_path, tiny_base) / "adapter_model.safetensors"
    path.write_bytes(pickle.dumps(Evil()))
    assert faults_of(tmp_path, tiny_base) == ["adapter_model.safetensors: is a Python pickle; only safetensors files are read"]
    assert not canary.exists()


def test_a_file_over_the_size_limit_is_not_read(tmp_path: Path, tiny_base: BaseDescription) -> None:
    assert "at most 100 are allowed" in faults_of(make_adapter_folder(tmp_path, tiny_base), tiny_base, max_weights_bytes=100)[0]


def test_a_wider_limit_lets_large_finite_values_through(tmp_path: Path, tiny_base: BaseDescription) -> None:
    assert checked(
        make_adapter_folder(tmp_path, tiny_base, edit=_poison(3e38)), tiny_base, max_abs=3.4e38
    ).report.max_abs == pytest.approx(3e38)


def test_hostile_names_are_shown_short_and_in_ascii(tmp_path: Path, tiny_base: BaseDescription) -> None:
    config = {"base_model_name_or_path": "\x1b[31mé" + "x" * 10_000}
    (warning,) = checked(make_adapter_folder(tmp_path, tiny_base, config=config), tiny_base).report.warnings
    assert warning.isascii()
    assert warning.isprintable()
    assert len(warning) < 300


def test_another_file_than_the_checked_one_is_not_read(tmp_path: Path, tiny_base: BaseDescription) -> None:
    artifact = checked(make_adapter_folder(tmp_path / "a", tiny_base), tiny_base)
    other = make_adapter_folder(tmp_path / "b", tiny_base, ranks=4)
    with pytest.raises(DataLossError, match="the file that was checked had"):
        next(artifact.read(other / "adapter_model.safetensors"))
