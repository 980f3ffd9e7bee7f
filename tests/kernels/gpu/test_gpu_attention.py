"""What of the check of attention on a GPU can be tried without one."""

from __future__ import annotations

import torch

from benchmarks.gpu_attention import Part, World, right
from kernels.gpu.attention import Heads

HEADS = Heads(num_heads=4, num_kv_heads=2, head_dim=32, scale=32**-0.5, softcap=20.0)


def test_the_comparison_runs_in_the_interpreter():
    found = right(forms=(HEADS,), device="cpu", contexts=(1, 40, 300), chunk=9, repeats=1)
    figures = {figure.id: figure.value for figure in found}
    assert 0 < figures["error_over_bound"] <= 1
    assert figures["different_of_1_repeats"] == 0
    assert figures["rows_changed_by_neighbours"] == 0


def test_the_comparison_sees_an_error():
    world = World(HEADS, [Part(20), Part(3, 4)], device="cpu")
    out = world.run()
    judged = {"window": None, "roundoff": 2.0**-7}
    assert world.error_over_bound(out, [0, 1, 4], **judged) <= 1
    assert world.error_over_bound(out * 1.1, [0, 1, 4], **judged) > 1
    out[4, 1, 2] = torch.nan
    assert world.error_over_bound(out, [0, 1, 4], **judged) > 1
