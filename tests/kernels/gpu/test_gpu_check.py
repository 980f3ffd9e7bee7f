"""What of the check for a GPU can be tried without one: its runner, its floors, and its comparisons in the interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import gpu_parts
from benchmarks.gpu_check import NO_DEVICE, PARTS, Figure, Outcome, Part, check, lines, run_part
from benchmarks.gpu_correct import correct, error_over_bound
from benchmarks.gpu_world import BaseModel, build_adapters
from benchmarks.roofline import LLAMA_7B, Shapes, floor_ratio
from kernels.gpu.paths import Path
from tests.test_layers import DEVICE_LIBRARIES, DEVICE_PACKAGES, import_watched

TINY = Shapes(num_layers=1, hidden=64, kv=32, mlp=96, vocab=48)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_gpu_it_says_so_and_ends_with_a_status_of_its_own():
    result = subprocess.run([sys.executable, "-m", "benchmarks.gpu_check"], capture_output=True, text=True, check=False)
    assert result.returncode == NO_DEVICE
    assert "no GPU" in result.stderr
    assert result.stdout == ""


BARE = {
    "allowed": tuple(library for library in DEVICE_LIBRARIES if library != "tokenizers"),
    "packages": ("benchmarks", *DEVICE_PACKAGES, "veneer.errors"),
}


def test_it_needs_no_library_that_a_bare_gpu_machine_lacks():
    result = import_watched(["benchmarks.gpu_check", "benchmarks.gpu_parts"], **BARE)
    assert result.returncode == 0, result.stderr


ENGINE = """
import os, sys

os.environ["TRITON_INTERPRET"] = "1"
sys.modules["llguidance"] = None  # as where it is not installed; the watch refuses to look for it

import benchmarks.gpu_engine, dataplane.engine.device_forms
from benchmarks.roofline import Shapes

dataplane.engine.device_forms.capture_on = lambda *_: lambda run: (run(), run)[1]
figures = benchmarks.gpu_engine.engine(
    shapes=Shapes(num_layers=1, hidden=32, kv=16, mlp=48, vocab=64), head_dim=16, num_rows=2, num_adapters=2, rank=1, num_steps=3,
    repeats=2, contexts=(), device="cpu", cpu_form="triton", dtype="float32", kv_bytes=1 << 16, arena_bytes=1 << 16,
    arena_unit_bytes=4096,
)
assert "engine_vs_graph" in [figure.id for figure in figures]
"""


@pytest.mark.slow
def test_a_whole_engine_runs_with_those_libraries_too():
    result = import_watched([], then=ENGINE, **BARE)
    assert result.returncode == 0, result.stderr


def test_every_part_has_a_function_and_all_fit_in_six_minutes():
    assert [part.name for part in PARTS if not callable(getattr(gpu_parts, part.name, None))] == []
    assert sum(part.limit_s for part in PARTS) <= 360


def script(tmp_path, text):
    path = tmp_path / "part.py"
    path.write_text(text)
    return [sys.executable, str(path)]


FOUND = """print('noise'); print('{"id": "a", "value": 2.0, "unit": "us", "floor": null}', flush=True)\n"""


def test_a_part_gives_its_figures(tmp_path):
    outcome = run_part(Part("a", 30, ""), command=script(tmp_path, FOUND))
    assert (outcome.fault, outcome.figures) == ("", (Figure("a", 2.0, "us"),))


def test_a_part_that_fails_keeps_what_it_found_before_and_says_why(tmp_path):
    outcome = run_part(Part("a", 30, ""), command=script(tmp_path, FOUND + "assert False, 'an error is 3 times its bound'"))
    assert outcome.fault == "AssertionError: an error is 3 times its bound"
    assert len(outcome.figures) == 1


def test_a_part_that_hangs_is_ended_and_keeps_what_it_found_before(tmp_path):
    outcome = run_part(Part("a", 2, ""), command=script(tmp_path, FOUND + "import threading; threading.Event().wait()"))
    assert outcome.fault == "took more than 2 s"
    assert len(outcome.figures) == 1


def test_after_each_part_everything_so_far_is_written(tmp_path):
    path = tmp_path / "gpu.json"
    outcomes = {"a": Outcome("a", 1.0, "broken", ()), "b": Outcome("b", 1.0, "", (Figure("x", 1.2, "ratio", 1.1),))}
    parts = check([Part("a", 1, ""), Part("b", 1, "")], run=lambda part: outcomes[part.name], path=path)
    written = [[one["part"] for one in json.loads(path.read_text())["outcomes"]] for _ in parts]
    assert written == [["a"], ["a", "b"]]
    assert lines(outcomes["a"]) == ["| a | failed | broken | | |"]
    assert lines(outcomes["b"]) == ["| b | x | 1.2 | ratio | 1.100 |"]


def test_the_floors_are_those_of_the_bytes():
    assert LLAMA_7B.base_bytes == pytest.approx(13.21e9, rel=1e-3)
    assert 16 * LLAMA_7B.rank_row_bytes == pytest.approx(79.95e6, rel=1e-3)
    assert floor_ratio(LLAMA_7B, num_adapters=22, rank=16) == pytest.approx(1.133, abs=5e-4)
    assert floor_ratio(LLAMA_7B, num_adapters=22, rank=16, context=256) == pytest.approx(1.081, abs=5e-4)


def test_the_comparison_runs_in_the_interpreter():
    tiny = {"shapes": TINY, "device": "cpu", "count": 2, "row_counts": (1, 16), "paths": (Path.FIRST, Path.EXTENSION)}
    found = {figure.id: figure.value for figure in correct(**tiny, repeats=1)}
    for prefix in ("", "fp8_"):
        assert 0 < found.pop(f"{prefix}error_over_bound") <= 1
    others = ("different_of_2_repeats", "rows_changed_by_neighbours", "rows_changed_by_row_count")
    assert found == {f"{prefix}{name}": 0 for prefix in ("", "fp8_") for name in others}


@pytest.mark.parametrize("is_fp8", [False, True])
def test_the_comparison_sees_an_error(is_fp8):
    torch.manual_seed(0)
    adapters = build_adapters(TINY, count=2, rank=8, device="cpu", is_fp8=is_fp8, has_epilogue=True)
    rows, site = adapters.rows(4), TINY.sites[1]
    x, y = torch.randn(4, 64).bfloat16(), torch.randn(4, 64).bfloat16()
    low_rank = adapters.low_rank(max_rows=4)
    low_rank.begin_step(rows)
    out = y.clone()
    low_rank.add_(out, x, layer=0, site="o")
    judged = {"adapters": adapters, "layer": 0, "site": site, "rows": rows}
    assert error_over_bound(out, y, x, **judged) <= 1
    plain = torch.from_numpy(rows.row_slot == 1)[:, None]  # its adapter has neither a gain nor a shift
    assert error_over_bound(torch.where(plain, y, out), y, x, **judged) > 1
    assert error_over_bound(torch.where(plain, out, y), y, x, **judged) > 1
    out[2, 3] = torch.nan
    assert error_over_bound(out, y, x, **judged) > 1


@pytest.mark.parametrize("path", list(Path))
def test_a_step_by_every_path_gives_what_the_plain_one_gives(path):
    torch.manual_seed(1)
    adapters = build_adapters(TINY, count=2, rank=8, device="cpu")
    low_rank = adapters.low_rank(max_rows=3, path=path)
    low_rank.begin_step(adapters.rows(3))
    model = BaseModel(TINY, device="cpu")
    base = model.step("base", low_rank, num_rows=3)
    base()
    mixed = replace(base, form="adapters", y={site: torch.full_like(y, torch.nan) for site, y in base.y.items()})
    mixed()
    for site, y in base.y.items():
        expected = y.clone()
        low_rank.add_(expected, base.x[site], layer=0, site=site)
        torch.testing.assert_close(mixed.y[site], expected, rtol=2**-6, atol=2**-8)


@pytest.mark.parametrize("context", [0, 20])
def test_mixes_are_measured_by_their_paths_beside_the_floor_of_their_bytes(context):
    steps = []

    def time_ms(step):
        steps.append(step.form)
        step()
        return 2.0 if step.form == "base" else 3.0

    found = gpu_parts._mixes(
        BaseModel(TINY, device="cpu"),
        (gpu_parts.Mix(2, 8), gpu_parts.Mix(2, 8, is_fp8=True)),
        num_rows=4,
        paths=(Path.BESIDE, Path.EXTENSION),
        context=context,
        shapes=TINY,
        device="cpu",
        time_ms=time_ms,
        bandwidth=lambda: 1e9,
    )
    base, of_bandwidth, *rest = found
    at = f"4_rows_context_{context}" if context else "4_rows"
    assert (base.id, base.value) == (f"base_{at}_ms", 2.0)
    assert of_bandwidth.value == pytest.approx((TINY.base_bytes + 4 * context * TINY.kv_token_bytes) / 2e-3 / 1e9)
    assert steps == ["base", "base"] + 4 * ["adapters"]
    ratios, added = rest[::2], rest[1::2]
    names = [f"2_adapters_rank_8{suffix}_{at}_{path}" for suffix in ("", "_fp8") for path in ("beside", "extension")]
    assert [figure.id for figure in ratios] == names
    assert [figure.id for figure in added] == [f"{name}_added_over_bytes" for name in names]
    assert {figure.value for figure in ratios} == {1.5}
    assert ratios[0].floor == pytest.approx(floor_ratio(TINY, num_adapters=2, rank=8, num_rows=4, context=context))
    assert ratios[2].floor - 1 == pytest.approx((ratios[0].floor - 1) / 2)
    assert added[0].value == pytest.approx(1e-3 * 1e9 / (2 * 8 * TINY.rank_row_bytes))
    assert added[2].value == pytest.approx(2 * added[0].value)


def test_our_base_product_is_measured_with_an_empty_list():
    torch.manual_seed(2)
    site = TINY.sites[0]
    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(128, 64).bfloat16()
    y = torch.full((5, 128), torch.nan, dtype=torch.bfloat16)
    gpu_parts._our_products(y, x, [weight], site=site, shapes=TINY)()
    torch.testing.assert_close(y, x @ weight.t(), rtol=2**-6, atol=2**-6)
