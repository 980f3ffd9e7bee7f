"""The check's parts around the whole engine, on tiny shapes in the interpreter: figures, and what they are made of."""

from __future__ import annotations

import threading

import pytest
import torch

import dataplane.engine.device_forms
from benchmarks.gpu_engine import Marks, Memory, engine, fields_of, random_decoder
from benchmarks.gpu_load import arena_copies
from benchmarks.roofline import Shapes, floor_ratio
from dataplane.model.config import parse_config
from dataplane.model.decoder import weight_bytes
from dataplane.model.pieces import TorchPieces

TINY = Shapes(num_layers=1, hidden=32, kv=16, mlp=48, vocab=64)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("adapter_dtype", ["model", "fp8"])
def test_the_engine_part_times_the_schedulers_steps_and_bare_replays(monkeypatch, adapter_dtype):
    monkeypatch.setattr(dataplane.engine.device_forms, "capture_on", lambda *_: lambda run: (run(), run)[1])
    figures = {
        figure.id: figure
        for figure in engine(
            shapes=TINY, head_dim=16, num_rows=2, num_adapters=2, rank=1, num_steps=3, repeats=2, contexts=(17,), device="cpu",
            cpu_form="triton", dtype="float32", kv_bytes=1 << 16, arena_bytes=1 << 16, arena_unit_bytes=4096,
            adapter_dtype=adapter_dtype,
        )
    }  # fmt: skip
    values = {name: figure.value for name, figure in figures.items()}
    assert values["engine_vs_graph"] == pytest.approx(values["bare_replay_ms"] / values["step_ms"])
    assert values["decode_tokens_per_s"] == pytest.approx(2e3 / values["step_ms"])
    assert 0 < values["host_work_us"] <= 1e3 * values["step_ms"] * 1.001
    assert values["device_idle_us"] >= 0
    suffix, part = ("", 1) if adapter_dtype == "model" else ("_fp8", 0.5)
    ratio = figures[f"2_adapters_rank_1{suffix}_context_17"]
    assert ratio.value > 0
    floor = floor_ratio(TINY, num_adapters=2, rank=1, num_rows=2, context=17)
    assert ratio.floor - 1 == pytest.approx(part * (floor - 1))


def test_copies_into_the_arena_are_timed_alone_and_beside_steps():
    beside = []

    def step():
        beside.append(any(thread.name == "loads" for thread in threading.enumerate()))

    figures = list(arena_copies(shapes=TINY, rank=1, device="cpu", dtype="float32", plain_s=1.0, step=step, num_steps=3))
    assert [figure.id for figure in figures] == [
        "arena_copy_of_pinned_copy",
        "step_p99_alone_ms",
        "step_p99_beside_loads_ms",
    ]
    assert beside == [False] * 3 + [True] * 3


def test_random_weights_have_the_sizes_of_a_folders():
    form = parse_config(fields_of(TINY, head_dim=16))
    packed = []

    class Pieces(TorchPieces):
        def pack(self, weight, bias=None):
            packed.append(weight.numel())
            return super().pack(weight, bias)

    model = random_decoder(None, form, max_context=32, dtype=torch.float32, device=torch.device("cpu"), pieces=Pieces())
    norms = (2 * form.num_layers + 1) * form.hidden
    assert 4 * (sum(packed) + model.embedding.numel() + norms) == weight_bytes(form, torch.float32)


def test_memory_beside_tensors_is_that_of_captured_steps_and_of_libraries():
    mib, free, reserved = 1 << 20, [1000], [0]

    def add(name, *, graph, tensors, library=0):
        free[0] -= graph + tensors + library
        reserved[0] += tensors

    memory = Memory(lambda: free[0] * mib, lambda: reserved[0] * mib)
    add("weights", graph=0, tensors=500, library=0)
    counted = memory.counted(add)
    counted("first", graph=3, tensors=7, library=40)
    for name in ("second", "third"):
        counted(name, graph=3, tensors=0)
    assert {figure.id: figure.value for figure in memory.figures()} == {"graph_mib": 3, "libraries_mib": 40}


def test_marks_on_the_cpu_are_moments_of_the_clock():
    marks = Marks("cpu")
    start = marks.mark()
    assert marks.ms(start, start + 0.5) == pytest.approx(500)
