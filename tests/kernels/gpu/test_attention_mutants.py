"""Faults planted in the text of attention, each of which the tests of it have to see."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.attention_metadata import AttentionMetadata
from tests.kernels.gpu.paging import Part, Sequences, heads_of
from tests.kernels.gpu.planting import Mutant, all_are_caught, faults_of, stale_metadata
from tests.kernels.gpu.test_attention import far_pages, merged_in_order
from tests.kernels.gpu.test_attention_launches import replays_follow_the_metadata

SEEN = 'scores = tl.where(seen[None, :], scores, float("-inf"))'
DISTANCE = "(distance >= 0) & (distance < window)"
MUTANTS = (
    Mutant("decode: mask dropped", "decode_attention", SEEN, "scores = scores"),
    Mutant("decode: mask multiplied", "decode_attention", SEEN, "scores = scores * seen[None, :].to(tl.float32)"),
    Mutant(
        "decode: window ignored",
        "decode_attention",
        "first = tl.maximum(length - window, 0)",
        "first = tl.maximum(length - length, 0)",
    ),
    Mutant("decode: window one too long", "decode_attention", "length - window, 0", "length - window - 1, 0"),
    Mutant("decode: window one too short", "decode_attention", "length - window, 0", "length - window + 1, 0"),
    Mutant("decode: wrong page", "decode_attention", "+ n // PAGE_SIZE", "+ n // (2 * PAGE_SIZE)"),
    Mutant("decode: pages of the first row", "decode_attention", "tl.load(row_ptr + row * 4 + 2)", "tl.load(row_ptr + 2)"),
    Mutant("decode: one token missing", "decode_attention", "end = tl.minimum(length,", "end = tl.minimum(length - 1,"),
    Mutant("decode: one token too many", "decode_attention", "end = tl.minimum(length,", "end = tl.minimum(length + 1,"),
    Mutant("decode: tail of a page read", "decode_attention", "(tokens >= first) & (tokens < end)", "tokens >= first"),
    Mutant("decode: another layer", "decode_attention", "layer.to(tl.int64) * (2", "(1 - layer).to(tl.int64) * (2"),
    Mutant("decode: another key head", "decode_attention", "layer_offset + head * HEAD_DIM", "layer_offset"),
    Mutant("decode: keys for values", "decode_attention", "values = keys + PAGE_SIZE * KV_HEADS * HEAD_DIM", "values = keys"),
    Mutant("decode: queries of another head", "decode_attention", "(head * GROUP + offs_g)[:, None]", "offs_g[:, None]"),
    Mutant("decode: output of another head", "decode_attention", "* KV_HEADS + head) * GROUP", "* KV_HEADS) * GROUP"),
    Mutant(
        "decode: page offset in 32 bits",
        "decode_attention",
        "places = page * page_stride",
        "places = page.to(tl.int32) * page_stride",
    ),
    Mutant(
        "merge: order of the splits",
        "decode_attention",
        "place = home + split * KV_HEADS",
        "place = home + (num_splits - 1 - split) * KV_HEADS",
    ),
    Mutant("merge: scale of what was merged", "decode_attention", "acc = acc * kept[:, None] + part", "acc = acc + part"),
    Mutant("merge: scale of what is added", "decode_attention", "part * added[:, None]", "part"),
    Mutant("merge: scale of the weights", "decode_attention", "part_total * added", "part_total"),
    Mutant(
        "merge: last split left out", "decode_attention", "for split in range(num_splits):", "for split in range(num_splits - 1):"
    ),
    Mutant("merge: before all arrived", "decode_attention", "== num_splits - 1", "== num_splits - 2"),
    Mutant(
        "merge: arrivals not counted down",
        "decode_attention",
        "tl.atomic_xchg(arrived_ptr + home, 0,",
        "tl.atomic_xchg(arrived_ptr + home, 1,",
    ),
    Mutant("merge: dead splits counted", "decode_attention", "split_tokens) - first_split", "split_tokens)"),
    Mutant("softmax: softcap dropped", "online_softmax", "if SOFTCAP == 0:", "if SOFTCAP >= 0:"),
    Mutant("softmax: softcap without sign", "online_softmax", "tl.where(x < 0, -bent, bent)", "bent"),
    Mutant("softmax: scale dropped", "online_softmax", "products * (SCALE * LOG2_E)", "products * LOG2_E"),
    Mutant("softmax: sums not rescaled", "online_softmax", "acc * kept[:, None]", "acc"),
    Mutant("softmax: weights not rescaled", "online_softmax", "total * kept +", "total +"),
    Mutant(
        "softmax: a tile that is not seen spoils", "online_softmax", 'tl.where(highest == float("-inf"), 0.0, highest)', "highest"
    ),
    Mutant("prefill: mask dropped", "prefill_attention", DISTANCE, "tokens[None, :] < end"),
    Mutant("prefill: causality off by one", "prefill_attention", "distance >= 0", "distance >= 1"),
    Mutant("prefill: sees the next token", "prefill_attention", "distance >= 0", "distance >= -1"),
    Mutant("prefill: window ignored", "prefill_attention", DISTANCE, "distance >= 0"),
    Mutant("prefill: window one too long", "prefill_attention", "distance < window", "distance <= window"),
    Mutant("prefill: first token of the window unread", "prefill_attention", "position + 1 - window", "position + 2 - window"),
    Mutant("prefill: tail of a page read", "prefill_attention", "(tokens >= first) & (tokens < end)", "tokens >= first"),
    Mutant("prefill: wrong page", "prefill_attention", "+ n // PAGE_SIZE", "+ n // (2 * PAGE_SIZE)"),
    Mutant("prefill: pages of the first chunk", "prefill_attention", "page_ptr + tl.load(tile + 3)", "page_ptr"),
    Mutant("prefill: context forgotten", "prefill_attention", "tl.load(tile + 2)", "tl.load(tile + 2) * 0"),
    Mutant(
        "prefill: heads and rows mixed up",
        "prefill_attention",
        "heads = (first_row + offs_m // GROUP)",
        "heads = (first_row + offs_m % GROUP)",
    ),
    Mutant("prefill: rows past the tile written", "prefill_attention", "offs_m < num_rows * GROUP", "offs_m < BLOCK_M"),
    Mutant(
        "prefill: page offset in 32 bits",
        "prefill_attention",
        "places = page * page_stride",
        "places = page.to(tl.int32) * page_stride",
    ),
    Mutant(
        "append: keys for values",
        "kv_append",
        "value = tl.load(v_ptr + far * v_stride",
        "value = tl.load(qk_ptr + far * qk_stride + FIRST",
    ),
    Mutant("append: queries for keys", "kv_append", "far * qk_stride + FIRST", "far * qk_stride"),
    Mutant("append: another layer", "kv_append", "2 * layer * PAGE_SIZE", "2 * (1 - layer) * PAGE_SIZE"),
    Mutant("append: rows past the step", "kv_append", "if row >= tl.load(count_ptr):", "if row < 0:"),
    Mutant(
        "append: offset in 32 bits",
        "kv_append",
        "(place + 2 * layer * PAGE_SIZE) * WIDTH",
        "((place + 2 * layer * PAGE_SIZE) * WIDTH).to(tl.int32)",
    ),
    Mutant("lists: splits of the neighbour", "attention_items", "* MAX_SPLITS - firsts", "* MAX_SPLITS - firsts * 0"),
    Mutant(
        "lists: a tile too short",
        "attention_items",
        "chunk.num_rows - offsets, tile_rows",
        "chunk.num_rows - offsets - 1, tile_rows",
    ),
    Mutant("lists: pages of the chunk before", "attention_items", "start += chunk.pages.size", "pass"),
)


def trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few small comparisons, as in test_attention.py; raises where attention is wrong."""
    plain = Sequences(heads_of(64, 3), [140] * 4, dtype=torch.float32, seed=1)
    attention = plain.attention()
    plain.check(attention, [Part(0, 130), Part(1, 63), Part(2, 17, 20), Part(3, 0, 5)], layer=0)
    plain.check(attention, [Part(3, 30), Part(2, 99), Part(0, 131, 3), Part(1, 64, 9)], window=20)
    plain.check(attention, [Part(0, 134), Part(1, 90, 15)], window=70)
    capped = Sequences(heads_of(64, 2, softcap=1.0), [70] * 2, dtype=torch.float32, seed=2)
    capped.check(capped.attention(), [Part(0, 69), Part(1, 2, 30)])
    merged_in_order(Sequences(heads_of(64, 3), [200], dtype=torch.float32))
    replays_follow_the_metadata(monkeypatch)
    far = Sequences(heads_of(64, 1, num_kv_heads=1), [70, 70], dtype=torch.bfloat16)
    far_pages(far)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_planted_fault_is_caught(tmp_path, record_property):
    faults = faults_of(MUTANTS, tmp_path, trial)
    all_are_caught("attention", [*faults, stale_metadata(AttentionMetadata, replays_follow_the_metadata)], record_property)


def test_every_mutant_still_fits_the_text():
    assert all(mutant.text() for mutant in MUTANTS)
