from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.gpu.attention_items import AttentionRows, ChunkRows, build_attention_items, split_tokens
from kernels.gpu.attention_metadata import AttentionMetadata
from kernels.gpu.attention_tiles import (
    ATTENTION_TILES,
    MAX_HEAD_DIM,
    MAX_SPLITS,
    PAGE_SIZES,
    WIDE_ATTENTION_TILES,
    attention_tiles_for,
)

LENGTHS = st.lists(st.integers(0, 5000), max_size=6)
CHUNKS = st.lists(st.tuples(st.integers(0, 300), st.integers(2, 90)), max_size=4)
PAGE_SIZE = 16


def step_of(lengths, chunks):
    """A step whose pages are numbered by where they are used."""
    count = iter(range(1, 10**6))
    pages = [[next(count) for _ in range(-(-length // PAGE_SIZE))] for length in lengths]
    width = max(map(len, pages), default=0)
    table = np.array([row + [0] * (width - len(row)) for row in pages], dtype=np.int64).reshape(len(lengths), width)
    rows, first = [], len(lengths)
    for context, num_rows in chunks:
        own = np.array([next(count) for _ in range(-(-(context + num_rows) // PAGE_SIZE))])
        rows.append(ChunkRows(first, num_rows, context, own))
        first += num_rows
    return AttentionRows(np.arange(first), np.array(lengths, dtype=np.int64), table, rows)


@given(st.integers(0, 1 << 22), st.sampled_from([64, 256]))
def test_a_row_has_as_few_doublings_as_its_splits_allow(length, least):
    tokens = int(split_tokens(np.array([length]), least)[0])
    assert -(-length // tokens) <= MAX_SPLITS
    assert tokens == least or -(-length // (tokens // 2)) > MAX_SPLITS


@given(LENGTHS, CHUNKS, st.integers(1, 40))
def test_every_token_of_a_row_is_in_one_split_and_every_row_of_a_chunk_in_one_tile(lengths, chunks, tile_rows):
    step = step_of(lengths, chunks)
    items = build_attention_items(step, least_split=64, tile_rows=tile_rows)
    expected = []
    for row, length in enumerate(lengths):
        tokens = int(items.rows[row, 1])
        assert items.rows[row, 0] == length
        expected += [row * MAX_SPLITS + split for split in range(max(1, -(-length // tokens)))]
    assert items.items.tolist() == expected
    seen = {}
    for first_row, num_rows, position, start in items.tiles.tolist():
        assert 1 <= num_rows <= tile_rows
        for i in range(num_rows):
            assert first_row + i not in seen
            seen[first_row + i] = (position + i, items.pages[start : start + (position + i) // PAGE_SIZE + 1].tolist())
    for chunk in step.chunks:
        for i in range(chunk.num_rows):
            position = chunk.context + i
            assert seen.pop(chunk.first_row + i) == (position, chunk.pages[: position // PAGE_SIZE + 1].tolist())
    assert not seen
    for row, length in enumerate(lengths):
        start = items.rows[row, 2]
        count = -(-length // PAGE_SIZE)
        assert items.pages[start : start + count].tolist() == step.pages[row, :count].tolist()


def test_the_longest_tiles_come_first():
    items = build_attention_items(step_of([], [(0, 40), (200, 20), (90, 3)]), least_split=64, tile_rows=16)
    reach = (items.tiles[:, 1] + items.tiles[:, 2]).tolist()
    assert reach == sorted(reach, reverse=True)


def test_a_row_that_pads_has_no_place_among_chunks():
    step = step_of([5, 0, 20], [(3, 4)]).as_chunks()
    assert [(chunk.first_row, chunk.num_rows, chunk.context) for chunk in step.chunks] == [(0, 1, 4), (2, 1, 19), (3, 4, 3)]
    assert step.lengths.size == step.pages.size == 0


def test_a_step_overwrites_the_last_behind_the_same_addresses():
    metadata = AttentionMetadata(max_rows=200, max_sequences=6, max_pages=80, max_tiles=20, device=torch.device("cpu"))
    sections = (metadata.num_rows, metadata.num_items, metadata.num_tiles, metadata.kv_rows, metadata.rows)
    sections += (metadata.items, metadata.tiles, metadata.pages)
    addresses = [section.data_ptr() for section in sections]
    assert {(address - addresses[0]) % 128 for address in addresses} == {0}
    for lengths, chunks in (([700, 3, 40], [(0, 90), (40, 30)]), ([1], []), ([], [(0, 5)])):
        step = step_of(lengths, chunks)
        items = build_attention_items(step, least_split=64, tile_rows=16)
        metadata.fill(step.kv_rows, items)
        assert [int(section[0]) for section in sections[:3]] == [step.kv_rows.size, items.items.size, len(items.tiles)]
        for section, values in zip(sections[3:], (step.kv_rows, items.rows, items.items, items.tiles, items.pages), strict=True):
            assert section[: values.size].tolist() == values.ravel().tolist()
    assert addresses == [section.data_ptr() for section in sections]


def test_every_head_dimension_has_a_configuration_whose_tiles_fit_pages_and_splits():
    for element_bytes, table in ((2, ATTENTION_TILES), (4, WIDE_ATTENTION_TILES)):
        assert list(table) == sorted(table, key=lambda tiles: tiles.max_head_dim)
        assert attention_tiles_for(MAX_HEAD_DIM, element_bytes) is table[-1]
        for tiles in table:
            assert tiles.split_tokens % tiles.decode_n == 0
            for size in PAGE_SIZES:
                assert tiles.decode_n % size == tiles.prefill_n % size == 0
