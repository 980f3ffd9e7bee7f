"""Attention over pages against the reference, in the interpreter."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from kernels.gpu.attention import UnsupportedAttentionError
from tests.kernels.gpu.paging import Part, Sequences, attend_in_nan, heads_of
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
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("step", STEPS)
def test_every_combination_equals_the_reference(step, head_dim):
    """Of all axes but the dtype, which takes turns."""
    others = itertools.product(*(AXES[name] for name in ("group", "page_size", "window", "softcap", "batch_invariant")))
    for (*case, batch_invariant), dtype in zip(others, itertools.cycle(AXES["dtype"]), strict=False):
        run_case((step, head_dim, *case, dtype, batch_invariant))


NARROW = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", NARROW)
def test_a_row_keeps_its_bits_whatever_its_neighbours_are(dtype):
    """Rows of one split and of several, and rows of a chunk, beside other rows, in another order, and alone."""
    sequences = Sequences(heads_of(64, 3, num_kv_heads=1), [200, 200, 60, 200, 90, 90], dtype=dtype)
    mine = [Part(0, 150), Part(2, 40), Part(4, 16, 30)]
    kept = []
    for others in ([Part(1, 10), Part(3, 199), Part(5, 0, 17)], [Part(3, 64), Part(5, 60, 30)], [], [Part(1, 130), Part(5, 1)]):
        parts = [*others, *mine] if len(kept) % 2 else [*reversed(mine), *others]
        parts.sort(key=lambda part: part.count > 1)
        out = sequences.run(sequences.attention(), parts, window=100)
        firsts = {part.sequence: sum(before.count for before in parts[:index]) for index, part in enumerate(parts)}
        kept.append(torch.cat([out[firsts[part.sequence] :][: part.count] for part in mine]))
    assert bool(kept[0].isfinite().all())
    assert all(torch.equal(kept[0], other) for other in kept[1:])


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", NARROW)
def test_a_row_keeps_its_bits_wherever_its_prompt_is_cut(dtype, batch_invariant):
    """Under `batch_invariant` cuts of one row, which decode, and decoding after the prompt give the same too."""
    sequences = Sequences(heads_of(64, 3, softcap=2.0, num_kv_heads=1), [70], dtype=dtype)
    cuts = [[70], [16, 44, 10], [33, 2, 35], [5, 60, 5]]
    cuts += [[40, *[1] * 4, 26], [1, 68, 1]] if batch_invariant else []
    kept = []
    for cut in cuts:
        sequences.cache.fill_(torch.nan)
        attention = sequences.attention(batch_invariant=batch_invariant)
        starts = np.cumsum([0, *cut[:-1]]).tolist()
        outs = [sequences.run(attention, [Part(0, start, count)], window=40) for start, count in zip(starts, cut, strict=True)]
        kept.append(torch.cat(outs))
    assert all(torch.equal(kept[0], other) for other in kept[1:])


def test_what_lies_before_the_window_and_behind_the_end_is_not_read():
    sequences = Sequences(heads_of(64, 4), [150, 150], dtype=torch.float32)
    parts, window = [Part(0, 140), Part(1, 100, 20)], 30
    attention = sequences.attention()
    expected = sequences.run(attention, parts, window=window)
    for sequence, first, end in ((0, 141 - window, 141), (1, 101 - window, 120)):
        kept = sequences.cache.clone()
        sequences.cache[sequences.pages[sequence]] = torch.nan
        for token in range(first, end):
            at = (sequences.pages[sequence][token // 16], slice(None), slice(None), token % 16)
            sequences.cache[at] = kept[at]
    attention.begin_step(sequences.step(parts))
    out = attend_in_nan(attention, *sequences.batch(parts), layer=1, window=window)
    assert torch.equal(out.view(expected.shape), expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_sequence_that_is_not_finite_harms_no_other():
    sequences = Sequences(heads_of(64, 4), [100] * 4, dtype=torch.bfloat16)
    parts = [Part(0, 90), Part(1, 5), Part(2, 0, 9), Part(3, 20, 9)]
    expected = sequences.run(sequences.attention(), parts)
    sequences.rows[0][:] = torch.nan
    sequences.rows[2][:] = torch.inf
    out = sequences.run(sequences.attention(), parts)
    assert torch.equal(out[1], expected[1])
    assert torch.equal(out[11:], expected[11:])
    assert not bool(out[0].isfinite().any())


def test_a_long_row_has_longer_splits_and_no_more_of_them():
    heads = heads_of(16, 2, num_kv_heads=1)
    sequences = Sequences(heads, [2100], dtype=torch.float32)
    sequences.check(sequences.attention(), [Part(0, 2099)])
    sequences.check(sequences.attention(), [Part(0, 2099)], window=1900)


def test_splits_are_merged_in_their_order():
    merged_in_order(Sequences(heads_of(64, 3), [200], dtype=torch.float32))


def merged_in_order(sequences):
    """Bits that no other order gives: what the splits left, merged here one after the other in float32."""
    attention = sequences.attention()
    out = sequences.run(attention, [Part(0, 199)])
    kept = [scratch.reshape(-1, 2, 16, *width) for scratch, width in zip(scratch_of(attention), ([64], [], []), strict=True)]
    sums, bests, totals = (each[:4, :, :3].numpy() for each in kept)
    acc, best, total = sums[0], bests[0], totals[0]
    for other_acc, other_best, other_total in zip(sums[1:], bests[1:], totals[1:], strict=True):
        highest = np.maximum(best, other_best)
        kept_share, added = np.exp2(best - highest), np.exp2(other_best - highest)
        acc = acc * kept_share[..., None] + other_acc * added[..., None]
        total, best = total * kept_share + other_total * added, highest
    assert np.array_equal(out.view(2, 3, 64).numpy(), acc / total[..., None])


def scratch_of(attention):
    return attention._parts, attention._best, attention._totals


def test_rows_that_pad_get_zeros_and_are_not_appended():
    sequences = Sequences(heads_of(64, 4), [40, 16], dtype=torch.float32)
    attention = sequences.attention()
    sequences.write(0, 0, 30, layer=1)
    step = sequences.step([Part(0, 30), Part(1, 0)])
    step.lengths[1], step.kv_rows[1] = 0, -1
    attention.begin_step(step)
    out = attend_in_nan(attention, *sequences.batch([Part(0, 30), Part(1, 0)]), layer=1, window=None)
    assert bool(out[0].isfinite().all())
    assert bool((out[1] == 0).all())
    assert bool(sequences.cache[sequences.pages[1]].isnan().all())


def test_offsets_past_32_bits_are_reached():
    """8 GiB of addresses lie in front of the pages in use, of which only the first pages are touched."""
    far_pages(Sequences(heads_of(64, 1, num_kv_heads=1), [70, 70], dtype=torch.bfloat16))


def far_pages(sequences):
    used, front = sequences.cache.shape[0], (1 << 32) // sequences.cache[0].numel()
    sequences.cache = torch.empty(front + used, *sequences.cache.shape[1:], dtype=sequences.dtype)
    sequences.cache[:used] = torch.nan  # where an offset cut to 32 bits leads
    sequences.cache[front:] = torch.nan
    sequences.pages = [pages + front for pages in sequences.pages]
    out = sequences.run(sequences.attention(), [Part(0, 69), Part(1, 20, 30)])
    assert bool(out.isfinite().all())


@pytest.mark.parametrize(
    ("head_dim", "group", "page_size", "message"),
    [(40, 1, 16, "not 40"), (272, 1, 16, "not 272"), (64, 1, 8, "not 8"), (64, 64, 16, "not 64")],
)
def test_shapes_that_the_kernels_do_not_attend_to_are_refused(head_dim, group, page_size, message):
    with pytest.raises(UnsupportedAttentionError, match=message):
        Sequences(heads_of(head_dim, group), [1], dtype=torch.float32, page_size=page_size).attention()
