"""The report of an adapter that passed: by module, with norms, and beside the limits."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import pytest

from tests.fixtures.adapters import AdapterFiles, Tensors, make_adapter_folder
from veneer.artifact import BaseDescription, Limits, Report, check
from veneer.artifact.report import product_norm
from veneer.controlplane.v1 import catalog_pb2
from veneer.reports import report_message


def report_of(folder: Path, base: BaseDescription, *, limits: Limits | None = None) -> Report:
    files = AdapterFiles.of(folder)
    return check(files.config, files.weights, base, limits or Limits(), norms=True).report


def test_each_module_is_reported_with_its_pairs_ranks_and_scaling(tmp_path: Path, tiny_base: BaseDescription) -> None:
    folder = make_adapter_folder(
        tmp_path, tiny_base, modules=("down_proj", "q_proj"), ranks={"q_proj": 2, "down_proj": 5}, layers=[1], alpha=10
    )
    report = report_of(folder, tiny_base)
    found = [(one.module, one.site, one.num_pairs, one.num_layers, one.max_rank, one.min_scaling) for one in report.by_module]
    assert found == [("q_proj", "qkv", 1, 2, 2, 5.0), ("down_proj", "down", 1, 2, 5, 2.0)]
    assert report.num_possible_pairs == tiny_base.num_layers * 7
    assert max(max(one.max_abs_a, one.max_abs_b) for one in report.by_module) == report.max_abs


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_the_norm_is_that_of_what_is_added_to_the_base(
    dtype: str, size: float, tmp_path: Path, tiny_base: BaseDescription
) -> None:
    folder = make_adapter_folder(tmp_path, tiny_base, modules=("q_proj",), ranks=3, alpha=6, dtype=dtype, scale=size)
    files = AdapterFiles.of(folder)
    artifact = check(files.config, files.weights, tiny_base, norms=True)
    norms = [np.linalg.norm(pair.scaling * b.astype(float) @ a.astype(float), 2) for pair, a, b in artifact.read(files.weights)]
    [module] = artifact.report.by_module
    assert module.min_norm == pytest.approx(min(norms), rel=1e-5)
    assert module.max_norm == pytest.approx(max(norms), rel=1e-5)
    assert check(files.config, files.weights, tiny_base).report.by_module[0].max_norm is None, "a load does not pay for it"


def test_a_norm_of_rank_rows_that_repeat_is_right() -> None:
    a, b = np.ones((4, 9)), np.ones((7, 4))
    assert product_norm(a, b) == pytest.approx(np.linalg.norm(b @ a, 2), rel=1e-6)


def test_matrices_too_large_for_it_have_no_norm(
    tmp_path: Path, tiny_base: BaseDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("veneer.artifact.report.MAX_NORM_ELEMENTS", 4 * 16)
    folder = make_adapter_folder(tmp_path, tiny_base, modules=("q_proj", "down_proj"), ranks=4)
    assert [one.max_norm is None for one in report_of(folder, tiny_base).by_module] == [False, True]


def test_an_adapter_without_effect_has_norm_zero_and_a_warning(tmp_path: Path, tiny_base: BaseDescription) -> None:
    def zero(tensors: Tensors) -> None:
        for name, (dtype, shape, data) in tensors.items():
            if "lora_B" in name:
                tensors[name] = (dtype, shape, bytes(len(data)))

    report = report_of(make_adapter_folder(tmp_path, tiny_base, edit=zero), tiny_base)
    assert {one.max_norm for one in report.by_module} == {0.0}
    assert "every B is zero: the adapter has no effect" in report.warnings


@pytest.mark.parametrize(
    ("name", "match", "shown"),
    [
        ("tiny", "NAMED", "tiny"),
        ("another", "OTHER_NAME", "another"),
        (None, "NOT_NAMED", ""),
        ("a\x00\ud800b", "OTHER_NAME", "a\\x00\\ud800b"),
        ("n" * 500, "OTHER_NAME", "n" * 200),
    ],
)
def test_whether_the_base_is_named_is_reported(
    name: str | None, match: str, shown: str, tmp_path: Path, tiny_base: BaseDescription
) -> None:
    report = report_of(make_adapter_folder(tmp_path, tiny_base, config={"base_model_name_or_path": name}), tiny_base)
    assert (report.base_match, report.base_name) == (match, shown)
    report_message(report).SerializeToString()


def test_every_limit_is_reported_beside_what_the_adapter_takes_of_it(tmp_path: Path, tiny_base: BaseDescription) -> None:
    limits = Limits(max_rank=9, max_tensors=20)
    report = report_of(make_adapter_folder(tmp_path, tiny_base, ranks=4, alpha=8), tiny_base, limits=limits)
    used = {one.name: (one.value, one.limit) for one in report.limits}
    assert (used["rank"], used["tensors"], used["scaling"]) == ((4, 9), (8, 20), (2.0, 65536.0))
    assert used["weights_bytes"][0] == (tmp_path / "adapter_model.safetensors").stat().st_size
    assert all(value <= limit for value, limit in used.values())
    known = {field.name.removeprefix("max_") for field in fields(Limits)}
    assert set(used) == known - {"pattern_chars", "pattern_steps", "faults"}


def test_the_report_is_the_same_after_a_way_through_json_and_as_a_message(tmp_path: Path, tiny_base: BaseDescription) -> None:
    report = report_of(make_adapter_folder(tmp_path, tiny_base), tiny_base)
    assert Report.from_fields(json.loads(json.dumps(asdict(report)))) == report
    message = report_message(report)
    assert [one.module for one in message.by_module] == list(report.modules)
    assert message.base_match == catalog_pb2.BASE_MATCH_NAMED
    assert {one.name for one in message.limits} == {one.name for one in report.limits}


def test_a_report_of_an_earlier_release_is_read(tmp_path: Path, tiny_base: BaseDescription) -> None:
    report = asdict(report_of(make_adapter_folder(tmp_path, tiny_base), tiny_base))
    for later in ("by_module", "num_possible_pairs", "base_match", "base_name", "limits"):
        del report[later]
    message = report_message(Report.from_fields(report))
    assert (message.num_pairs, len(message.by_module)) == (4, 0)
    assert message.base_match == catalog_pb2.BASE_MATCH_UNSPECIFIED
