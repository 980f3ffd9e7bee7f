"""The check as a whole, against files that people really have."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fixtures.adapters import Tensors, encode, make_adapter_folder
from tests.veneer.artifact.checking import ALL, STEM, checked, faults_of
from veneer.artifact import BaseDescription, Report


def test_a_plain_adapter_is_accepted_and_reported(tmp_path: Path, tiny_base: BaseDescription) -> None:
    artifact = checked(make_adapter_folder(tmp_path, tiny_base, ranks=4, alpha=8), tiny_base)
    assert [(pair.layer, pair.slice, pair.rank, pair.scaling) for pair in artifact.pairs] == [
        (0, 0, 4, 2.0),
        (0, 2, 4, 2.0),
        (1, 0, 4, 2.0),
        (1, 2, 4, 2.0),
    ]
    report = replace(artifact.report, by_module=(), limits=())
    plain = Report(4, 4, 4, 16, "F32", ("q_proj", "v_proj"), 2, 2.0, 2.0, artifact.report.max_abs, ())
    assert report == replace(plain, num_possible_pairs=14, base_match="NAMED", base_name="tiny")
    assert (artifact.dtype, artifact.base_name) == ("F32", "tiny")
    assert Report.from_fields(json.loads(json.dumps(asdict(artifact.report)))) == artifact.report


def test_the_tokens_that_activate_an_adapter_are_reported(tmp_path: Path, tiny_base: BaseDescription) -> None:
    folder = make_adapter_folder(tmp_path, tiny_base, config={"alora_invocation_tokens": [0, tiny_base.vocab_size - 1]})
    report = checked(folder, tiny_base).report
    assert report.invocation_tokens == (0, tiny_base.vocab_size - 1)
    fields = json.loads(json.dumps(asdict(report)))
    assert Report.from_fields(fields) == report
    del fields["invocation_tokens"]
    assert Report.from_fields(fields) == replace(report, invocation_tokens=()), "a report that an earlier release stored"


def test_a_token_that_the_base_does_not_have_activates_nothing(tmp_path: Path, tiny_base: BaseDescription) -> None:
    size = tiny_base.vocab_size
    folder = make_adapter_folder(tmp_path, tiny_base, config={"alora_invocation_tokens": [1, size, size + 5]})
    fault = "adapter_config.json: alora_invocation_tokens[{}]: {} is not below the vocabulary's size, {}"
    assert faults_of(folder, tiny_base) == [fault.format(1, size, size), fault.format(2, size + 5, size)]


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_every_pair_is_read_with_the_values_that_were_written(dtype: str, tmp_path: Path, tiny_base: BaseDescription) -> None:
    written: Tensors = {}
    folder = make_adapter_folder(tmp_path, tiny_base, modules=ALL, ranks=3, dtype=dtype, edit=written.update)
    artifact = checked(folder, tiny_base)
    weights = (folder / "adapter_model.safetensors").read_bytes()
    largest = 0.0
    for source in (folder / "adapter_model.safetensors", io.BytesIO(weights)):
        read = list(artifact.read(source))
        assert [pair for pair, _, _ in read] == list(artifact.pairs)
        for pair, a, b in read:
            module = tiny_base.modules[pair.slice]
            assert (a.shape, b.shape) == ((3, module.in_features), (module.out_features, 3))
            for part, values in (("A", a), ("B", b)):
                stem = f"base_model.model.{module.path.format(layer=pair.layer)}.lora_{part}.weight"
                assert values.dtype == np.float32
                assert encode(values, dtype) == written[stem][2]
                largest = max(largest, float(np.abs(values).max()))
    assert len(artifact.pairs) == 14
    assert artifact.report.max_abs == largest


@pytest.mark.parametrize("rank", [1, 3, 8, 16, 64, 256])
def test_ranks_up_to_the_limit_are_accepted(rank: int, tmp_path: Path, tiny_base: BaseDescription) -> None:
    assert checked(make_adapter_folder(tmp_path, tiny_base, ranks=rank), tiny_base).report.max_rank == rank


def test_rslora_divides_alpha_by_the_root_of_the_rank(tmp_path: Path, tiny_base: BaseDescription) -> None:
    plain = checked(make_adapter_folder(tmp_path / "a", tiny_base, ranks=64, alpha=16), tiny_base)
    stable = checked(make_adapter_folder(tmp_path / "b", tiny_base, ranks=64, alpha=16, config={"use_rslora": True}), tiny_base)
    assert plain.pairs[0].scaling == 0.25
    assert stable.pairs[0].scaling == 2.0


def test_patterns_give_each_module_its_rank_and_alpha_by_the_first_match(tmp_path: Path, tiny_base: BaseDescription) -> None:
    config = {"alpha_pattern": {"layers.1.self_attn.q_proj": 1.5, "q_proj": 30, r".*\.v_proj": 5}}
    folder = make_adapter_folder(
        tmp_path, tiny_base, ranks={"q_proj": 3, "v_proj": 5, "o_proj": 4}, modules=ALL[:1] + ALL[2:4], config=config
    )
    scaling = {(pair.layer, pair.slice): pair.scaling for pair in checked(folder, tiny_base).pairs}
    assert scaling == {(0, 0): 10.0, (1, 0): 0.5, (0, 2): 1.0, (1, 2): 1.0, (0, 3): 4.0, (1, 3): 4.0}


@pytest.mark.parametrize(
    "targets",
    [
        "all-linear",
        r".*\.(q|v)_proj",
        ["model.layers.0.self_attn.q_proj", "q_proj", "self_attn.v_proj"],
        None,
        ["v_proj", "q_proj"],
    ],
)
def test_every_form_of_target_modules_is_accepted(targets: object, tmp_path: Path, tiny_base: BaseDescription) -> None:
    artifact = checked(make_adapter_folder(tmp_path, tiny_base, config={"target_modules": targets}), tiny_base)
    assert artifact.report.warnings == ()


@pytest.mark.parametrize("layers", [(0,), (1,)])
def test_some_layers_only_are_accepted(layers: tuple[int, ...], tmp_path: Path, tiny_base: BaseDescription) -> None:
    artifact = checked(make_adapter_folder(tmp_path, tiny_base, layers=layers, modules=("down_proj",)), tiny_base)
    assert [(pair.layer, pair.slice) for pair in artifact.pairs] == [(layers[0], 6)]


def test_the_adapters_own_name_in_the_keys_is_accepted(tmp_path: Path, tiny_base: BaseDescription) -> None:
    assert checked(make_adapter_folder(tmp_path, tiny_base, adapter_name="lora"), tiny_base).report.num_pairs == 4


def test_a_bare_models_keys_are_accepted_and_patterns_see_its_paths(tmp_path: Path, tiny_base: BaseDescription) -> None:
    def shorten(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.replace("base_model.model.model.", "base_model.model.")] = tensors.pop(name)

    folder = make_adapter_folder(tmp_path, tiny_base, edit=shorten, config={"alpha_pattern": {"^layers.0.self_attn.q_proj": 80}})
    assert [pair.scaling for pair in checked(folder, tiny_base).pairs] == [10.0, 2.0, 2.0, 2.0]


def _zero(part: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        for name, (dtype, shape, data) in tensors.items():
            if f"lora_{part}" in name:
                tensors[name] = (dtype, shape, bytes(len(data)))

    return edit


def _mix(tensors: Tensors) -> None:
    _, shape, data = tensors[f"{STEM}.lora_A.weight"]
    tensors[f"{STEM}.lora_A.weight"] = ("BF16", shape, bytes(len(data) // 2))


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        ({"edit": _zero("B")}, "every B is zero: the adapter has no effect"),
        ({"edit": _zero("A")}, "every A is zero: the adapter has no effect"),
        ({"edit": _mix}, "tensors have several element types: BF16, F32"),
        (
            {"config": {"base_model_name_or_path": "other/base"}},
            "adapter_config.json names the base 'other/base'; it is served on 'tiny'",
        ),
        ({"alpha": -16}, "alpha is negative"),
        (
            {"config": {"target_modules": ["q_proj", "v_proj", "lm_head"]}},
            "target_modules names 'lm_head', but the file has no such module",
        ),
        ({"config": {"target_modules": ["q_proj"]}}, "target_modules does not name 2 modules that the file has"),
        ({"config": {"target_modules": "(?!x).*proj"}}, "was not compared with the tensors"),
        ({"config": {"rank_pattern": {"o_proj": 4}}}, "rank_pattern names 'o_proj', but the file has no such module"),
    ],
)
def test_what_is_worth_a_look_is_a_warning(
    options: dict[str, Any], warning: str, tmp_path: Path, tiny_base: BaseDescription
) -> None:
    warnings = checked(make_adapter_folder(tmp_path, tiny_base, **options), tiny_base).report.warnings
    assert len(warnings) == 1
    assert warning in warnings[0]


def test_a_known_name_of_the_base_is_no_warning(tmp_path: Path, tiny_base: BaseDescription) -> None:
    folder = make_adapter_folder(tmp_path, tiny_base, config={"base_model_name_or_path": "org/tiny"})
    assert checked(folder, replace(tiny_base, known_names=("org/tiny",))).report.warnings == ()
