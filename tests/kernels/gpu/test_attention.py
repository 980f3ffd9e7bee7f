"""Attention over pages against the reference, in the interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch

from kernels.gpu.attention import Heads
from tests.kernels.gpu.paging import Part, Sequences
from tests.kernels.gpu.test_low_rank import pairwise

STEPS = {
    "one row": [Part(0, 0)],
    "rows of one split": [Part(0, 0), Part(1, 15), Part(2, 16), Part(3, 63)],
    "rows of several splits": [Part(0, 64), Part(1, 3), Part(2, 200), Part(3, 127)],
    "a chunk": [Part(0, 0, 21)],
    "chunks": [Part(0, 0, 2), Part(1, 0, 17), Part(2, 0, 33), Part(3, 0, 16)],
    "chunks over prefixes": [Part(0, 16, 5), Part(1, 63, 20), Part(2, 100, 11)],
    "everything": [Part(0, 130), Part(1, 31), Part(2, 0, 18), Part(3, 47, 14)],
}
AXES = {
    "step": list(STEPS),
    "head_dim": [64, 80, 96, 128, 256],
    "group": [1, 3, 4, 8],
    "page_size": [16, 32],
    "window": [None, 1, 20, 70],
    "softcap": [None, 1.5],
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "batch_invariant": [False, True],
}
CASES = pairwise(AXES)


def heads_of(head_dim, group, *, softcap=None, num_kv_heads=2):
    return Heads(group * num_kv_heads, num_kv_heads, head_dim, scale=1.3 * head_dim**-0.5, softcap=softcap)


def run_case(case):
    step, head_dim, group, page_size, window, softcap, dtype, batch_invariant = case
    heads = heads_of(head_dim, group, softcap=softcap, num_kv_heads=1 if head_dim > 128 else 2)
    sequences = Sequences(heads, [220] * 4, dtype=dtype, page_size=page_size, seed=head_dim + group)
    sequences.check(sequences.attention(batch_invariant=batch_invariant), STEPS[step], layer=group % 2, window=window)


def test_the_covering_set_is_small():
    assert len(CASES) <= 60


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_equals_the_reference_within_its_roundings(case):
    run_case(case)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", STEPS)
def test_every_combination_equals_the_reference(step):
    for case in itertools.product([step], [64, 96, 128, 256], *list(AXES.values())[2:]):
        run_case(case)
