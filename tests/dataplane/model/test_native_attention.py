"""The native form of attention against plain attention over each sequence alone, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dataplane.model.architecture import Architecture
from dataplane.model.attention import PagedKv
from dataplane.model.batch import Batch, Chunk
from dataplane.model.config import parse_config
from dataplane.model.native_attention import NativeAttention
from kernels.native import INSTRUCTION_SETS, InstructionSet, Native, NativeFormError, load_native, processor_features

AVAILABLE = [one for one in INSTRUCTION_SETS if one.needs <= processor_features()]
CPU = torch.device("cpu")
LAYER = 1
MIX = [(20, 1), (2, 1), (0, 1), (31, 1), (0, 6), (0, 37), (9, 8), (15, 3)]
LONG = [(511, 1), (512, 1), (1300, 1), (500, 40)]
# Scores, weights and outputs are rounded to the dtype; the scores' roundings are in the exponent.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def config_of(head_dim: int, group: int, *, window: int | None = None, cap: float | None = None) -> Architecture:
    plain = parse_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 2 * group,
            "num_key_value_heads": 2,
            "head_dim": head_dim,
            "num_hidden_layers": 2,
            "vocab_size": 10,
            "max_position_embeddings": 4096,
        }
    )
    layers = (plain.layers[0], replace(plain.layers[LAYER], window=window))
    scale = plain.attention_scale if cap is None else 0.25
    return replace(plain, layers=layers, attention_softcap=cap, attention_scale=scale)


class Sequences:
    """Random queries, keys and values of sequences, their pages, and the batches that compute parts of them."""

    def __init__(self, config: Architecture, lengths: list[int], dtype: torch.dtype, *, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.config, self.dtype = config, dtype
        heads = config.num_heads + 2 * config.num_kv_heads
        self.rows = [torch.randn(length, heads, config.head_dim, generator=generator).to(dtype) for length in lengths]
        counts = [-(-length // 16) for length in lengths]
        self.pages = list((torch.randperm(sum(counts), generator=generator) + 1).split(counts))
        self.kv = PagedKv(config, num_pages=sum(counts) + 1, page_size=16, dtype=dtype, device=CPU)
        self.kv.data[1:] = torch.nan  # what others left; only handing out would clear it

    def run(self, attention: NativeAttention, parts: list[tuple[int, int, int]]) -> torch.Tensor:
        """Computes rows [start, start + count) of sequences: parts are (sequence, start, count), single rows first."""
        num = sum(count == 1 for _, _, count in parts)
        width = max((start // 16 + 1 for _, start, _ in parts[:num]), default=0)
        table = torch.zeros(num, width, dtype=torch.int64)
        rows, positions, kv_rows, chunks, first = [], [], [], [], 0
        for index, (sequence, start, count) in enumerate(parts):
            pages, here = self.pages[sequence], torch.arange(start, start + count)
            rows.append(self.rows[sequence][start : start + count])
            positions.append(here)
            kv_rows.append(pages[here // 16] * self.kv.rows_per_page + here % 16)
            used = pages[: (start + count - 1) // 16 + 1].clone()
            if count == 1:
                table[index, : len(used)] = used
            else:
                chunks.append(Chunk(first, count, start, used))
            first += count
        lengths = torch.tensor([start + 1 for _, start, _ in parts[:num]], dtype=torch.int64)
        batch = Batch(
            ids=torch.cat(positions), positions=torch.cat(positions), kv_rows=torch.cat(kv_rows), num_decode=num,
            decode_lengths=lengths, decode_pages=table, chunks=tuple(chunks), sample_rows=None,
        )  # fmt: skip
        attention.begin_step(batch)
        fused, turned = torch.cat(rows), self.config.num_heads + self.config.num_kv_heads
        return attention(fused[:, :turned], fused[:, turned:], layer=LAYER)

    def plain(self, sequence: int, start: int, count: int) -> torch.Tensor:
        config = self.config
        group = config.num_heads // config.num_kv_heads
        rows = self.rows[sequence][: start + count].double()
        q, k, v = rows.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], 1)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[start:], k) * config.attention_scale
        if config.attention_softcap is not None:
            scores = config.attention_softcap * (scores / config.attention_softcap).tanh()
        hidden = torch.ones(count, start + count).triu(start + 1).bool()
        if (window := config.layers[LAYER].window) is not None:
            hidden |= torch.ones(count, start + count).tril(start - window).bool()
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v).flatten(1)


@pytest.fixture(scope="module")
def native() -> Native:
    return load_native()


def check(native: Native, config: Architecture, parts: list[tuple[int, int]], dtype: torch.dtype) -> None:
    parts = sorted(parts, key=lambda part: part[1] > 1)
    sequences = Sequences(config, [context + rows for context, rows in parts], dtype)
    attention = NativeAttention(config, sequences.kv, native=native)
    before = [(i, 0, context) for i, (context, _) in enumerate(parts) if context]
    sequences.run(attention, sorted(before, key=lambda part: part[2] > 1))
    now = [(i, context, rows) for i, (context, rows) in enumerate(parts)]
    out = sequences.run(attention, now)
    want = torch.cat([sequences.plain(*part) for part in now])
    torch.testing.assert_close(out.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 256])
def test_every_row_sees_its_own_sequence_and_no_more(native: Native, head_dim: int, group: int, dtype: torch.dtype) -> None:
    check(native, config_of(head_dim, group), MIX, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("threads_filled", [True, False])
def test_long_contexts_are_attended_to_in_splits(native: Native, dtype: torch.dtype, threads_filled: bool) -> None:
    check(native, config_of(64, 3), LONG * (6 if threads_filled else 1), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [1, 7, 16, 33, 511, 600])
def test_a_windowed_layer_sees_the_last_tokens_only(native: Native, window: int, dtype: torch.dtype) -> None:
    check(native, config_of(32, 3, window=window), [*MIX, *LONG], dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_scores_are_scaled_and_capped(native: Native, dtype: torch.dtype) -> None:
    check(native, config_of(64, 2, cap=5.0), [*MIX, *LONG], dtype)
    check(native, config_of(256, 2, cap=5.0, window=20), [*MIX, *LONG], dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("instruction_set", AVAILABLE, ids=lambda one: one.name)
def test_every_instruction_set_computes_the_same(instruction_set: InstructionSet, dtype: torch.dtype) -> None:
    check(load_native(instruction_set), config_of(48, 3), [*MIX, (600, 1)], dtype)
    check(load_native(instruction_set), config_of(48, 3, window=9, cap=5.0), [*MIX, (600, 1)], dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 40, 700])
def test_a_row_keeps_its_bits_whatever_is_computed_beside_it(native: Native, window: int | None, dtype: torch.dtype) -> None:
    config = config_of(64, 3, window=window)
    sequences = Sequences(config, [1200, 90, 30], dtype)
    attention = NativeAttention(config, sequences.kv, native=native)
    whole = sequences.run(attention, [(0, 0, 1200), (1, 0, 90), (2, 0, 30)])
    alone = sequences.run(attention, [(0, 1199, 1)])
    beside = sequences.run(attention, [(2, 29, 1), (0, 1199, 1), (1, 40, 50)])
    crowd = sequences.run(attention, [(2, i, 1) for i in range(29)] + [(0, 1150, 50)])
    assert torch.equal(alone[0], whole[1199])
    assert torch.equal(beside[1], whole[1199])
    assert torch.equal(crowd[-1], whole[1199])
    assert torch.equal(beside[2:], whole[1240:1290])


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_do_not_change_bits(native: Native, threads: int) -> None:
    config = config_of(64, 2)
    sequences = Sequences(config, [1200, 40], torch.bfloat16)
    attention = NativeAttention(config, sequences.kv, native=native)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = sequences.run(attention, [(0, 0, 1200), (1, 0, 40)])
        torch.set_num_threads(threads)
        got = sequences.run(attention, [(0, 1199, 1), (1, 0, 40)])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(got[0], want[1199])
    assert torch.equal(got[1:], want[1200:])


def test_shapes_that_it_does_not_have_are_refused(native: Native) -> None:
    config = config_of(64, 1)

    def build(config: Architecture, page_size: int, dtype: torch.dtype) -> NativeAttention:
        return NativeAttention(config, PagedKv(config, num_pages=2, page_size=page_size, dtype=dtype, device=CPU), native=native)

    with pytest.raises(NativeFormError, match="pages of 16 tokens"):
        build(config, 8, torch.float32)
    with pytest.raises(NativeFormError, match="head dimensions"):
        build(config_of(24, 1), 16, torch.float32)
    with pytest.raises(NativeFormError, match="float16"):
        build(config, 16, torch.float16)
