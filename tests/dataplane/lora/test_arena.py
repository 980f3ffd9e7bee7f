from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from dataplane.lora import arena as arena_module
from dataplane.lora.arena import Arena
from dataplane.lora.image import CorruptImageError, ImageError, ImagePair, build_image
from dataplane.lora.units import Units
from kernels.edges import EMBED, HEAD
from kernels.epilogue import vector_at
from kernels.fp8 import factor_bytes, to_fp8

FEATURES = [(8, 6), (8, 2), (5, 9)]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def make_image(ranks, *, dtype="float32", num_layers=2, features=FEATURES, seed=0):
    """ranks: (layer, slice) -> rank."""
    rng = np.random.default_rng(seed)
    pairs = []
    for (layer, index), rank in ranks.items():
        k, n = features[index]
        a, b = rng.standard_normal((rank, k)), rng.standard_normal((n, rank))
        pairs.append(ImagePair(layer, index, 0.25 * rank, a.astype(np.float32), b.astype(np.float32)))
    sizes = {"num_layers": num_layers, "num_slices": len(features)}
    return pairs, build_image(pairs, version="v", base_digest="b", dtype=dtype, **sizes)


def make_arena(*, dtype="float32", num_units=8, unit_bytes=512, edge_features=()):
    sizes = {"unit_bytes": unit_bytes, "max_slots": 3, "num_layers": 2}
    return Arena(num_units * unit_bytes + 100, features=FEATURES, dtype=dtype, edge_features=edge_features, **sizes)


def assert_holds(arena, slot, pairs):
    table = arena.descriptors
    where = {(pair.layer, pair.slice): pair for pair in pairs}
    for layer in range(2):
        for index, (k, n) in enumerate(FEATURES):
            pair = where.get((layer, index))
            rank = int(table.rank[slot, layer, index])
            assert rank == (0 if pair is None else pair.a.shape[0])
            if pair is None:
                continue
            a_start, b_start = int(table.a_offset[slot, layer, index]), int(table.b_offset[slot, layer, index])
            a = arena.tensor[a_start : a_start + rank * k].view(rank, k)
            b = arena.tensor[b_start : b_start + rank * n].view(rank, n)
            assert torch.equal(a, torch.from_numpy(pair.a).to(arena.tensor.dtype))
            assert torch.equal(b, torch.from_numpy(pair.b.T.copy()).to(arena.tensor.dtype))
            assert table.scale[slot, layer, index] == np.float32(pair.scaling)
            assert a_start * arena.tensor.element_size() % 128 == 0
            assert b_start * arena.tensor.element_size() % 128 == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_table_finds_every_row_of_an_image_in_the_models_dtype(dtype):
    arena = make_arena(dtype=dtype)
    pairs, image = make_image({(0, 0): 3, (0, 2): 1, (1, 1): 7}, dtype=dtype)
    extents = Units(arena.num_units, unit_bytes=512).take(image.block_bytes)
    arena.write(1, image, extents)
    assert arena.tensor.dtype == DTYPES[dtype]
    assert arena.num_units == 8
    assert_holds(arena, 1, pairs)
    assert arena.descriptors.largest_rank.tolist() == [0, 7, 0]


def test_in_fp8_the_table_counts_bytes_and_factors_stay_in_front_of_a():
    arena = make_arena(dtype="fp8", num_units=16)
    ranks = {(0, 0): 40, (0, 2): 1, (1, 1): 7}
    pairs, image = make_image(ranks, dtype="fp8")
    extents = Units(arena.num_units, unit_bytes=512).take(image.block_bytes)
    arena.write(2, image, extents)
    table = arena.descriptors
    assert arena.tensor.dtype is torch.uint8
    for pair in pairs:
        at, coded = (2, pair.layer, pair.slice), to_fp8(pair.a, pair.b)
        a, b = int(table.a_offset[at]), int(table.b_offset[at])
        held = arena.tensor.numpy()
        assert np.array_equal(held[a : a + coded.a.size].reshape(coded.a.shape), coded.a)
        assert np.array_equal(held[b : b + coded.b.size].reshape(coded.b.shape), coded.b)
        first = a - factor_bytes(len(coded.factors))
        assert np.array_equal(held[first : first + 4 * len(coded.factors)].view(np.float32), coded.factors)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_table_finds_gains_and_shifts_and_forgets_them_with_the_slot(dtype):
    arena = make_arena(dtype=dtype)
    pairs, _ = make_image({(0, 0): 3, (0, 2): 1, (1, 1): 7})
    gain, shift = np.arange(6, dtype=np.float32), -np.arange(2, dtype=np.float32)
    pairs[0], pairs[2] = dataclasses.replace(pairs[0], gain=gain), dataclasses.replace(pairs[2], shift=shift)
    image = build_image(pairs, version="v", base_digest="b", dtype=dtype, num_layers=2, num_slices=3)
    extents = Units(arena.num_units, unit_bytes=512).take(image.block_bytes)
    arena.write(1, image, extents)
    table = arena.descriptors
    assert vector_at(arena.tensor, table.gain_offset[1, 0, 0], 6).tolist() == gain.tolist()
    assert vector_at(arena.tensor, table.shift_offset[1, 1, 1], 2).tolist() == shift.tolist()
    assert ((table.gain_offset != -1).sum(), (table.shift_offset != -1).sum()) == (1, 1)
    assert table.has_epilogue.tolist() == [False, True, False]
    arena.clear(1)
    assert not table.has_epilogue.any()


EDGES = [(11, 8), (8, 11)]  # a vocabulary of 11


def test_pairs_on_embedding_and_head_lie_beside_the_table_and_go_with_the_slot():
    pairs, _ = make_image({(0, 0): 3, (1, 2): 2})
    ones = np.ones
    pairs += [
        ImagePair(2, 0, 0.5, ones((4, 11), np.float32), 2 * ones((8, 4), np.float32)),
        ImagePair(2, 1, -1.0, 3 * ones((1, 8), np.float32), 4 * ones((11, 1), np.float32)),
    ]
    image = build_image(pairs, version="v", base_digest="b", dtype="float32", num_layers=2, num_slices=3)
    assert image.has_edges
    assert image.rank == 4
    plain = make_arena()
    with pytest.raises(ImageError, match="embedding or head is not computed in float32"):
        plain.check(image)
    arena = make_arena(edge_features=EDGES)
    arena.write(1, image, Units(arena.num_units, unit_bytes=512).take(image.block_bytes))
    embed, head = arena.edges[1][EMBED], arena.edges[1][HEAD]
    assert (embed.rank, embed.scale, head.rank, head.scale) == (4, 0.5, 1, -1.0)
    for offset, count, value in (
        (embed.a_offset, 44, 1), (embed.b_offset, 32, 2), (head.a_offset, 8, 3), (head.b_offset, 11, 4),
    ):  # fmt: skip
        assert arena.tensor[offset : offset + count].eq(value).all()
    assert arena.descriptors.largest_rank[1] == 3
    _, without = make_image({(0, 0): 3})
    arena.write(1, without, Units(arena.num_units, unit_bytes=512).take(without.block_bytes))
    assert arena.edges == {}
    arena.write(1, image, Units(arena.num_units, unit_bytes=512).take(image.block_bytes))
    arena.clear(1)
    assert arena.edges == {}
    with pytest.raises(CorruptImageError, match="layer 2, slice 0 is 11 in, 8 out"):
        make_arena(edge_features=[(12, 8), (8, 12)]).check(image)


def test_an_image_cut_over_extents_is_found_as_a_whole_one_is_and_its_neighbours_stay():
    arena = make_arena()
    units = Units(arena.num_units, unit_bytes=512)
    held = [units.take([512]) for _ in range(8)]
    neighbours, neighbour = make_image({(1, 2): 2}, seed=5)
    assert neighbour.num_bytes <= 512
    arena.write(0, neighbour, held[2])
    for index in (0, 1, 4, 6, 7):
        units.give(held[index])
    pairs, image = make_image({(0, 0): 3, (0, 1): 4, (1, 0): 5, (1, 1): 2})
    extents = units.take(image.block_bytes)
    assert len(extents) > 1
    arena.write(2, image, extents)
    assert_holds(arena, 2, pairs)
    assert_holds(arena, 0, neighbours)


def test_a_narrower_image_in_a_used_slot_leaves_nothing_of_the_last_one():
    arena = make_arena()
    units = Units(arena.num_units, unit_bytes=512)
    _, wide = make_image({(layer, index): 4 for layer in range(2) for index in range(3)})
    first = units.take(wide.block_bytes)
    arena.write(0, wide, first)
    epoch = int(arena.descriptors.epoch[0])
    units.give(first)
    pairs, narrow = make_image({(1, 1): 2}, seed=1)
    arena.write(0, narrow, units.take(narrow.block_bytes))
    assert_holds(arena, 0, pairs)
    assert arena.descriptors.largest_rank[0] == 2
    assert arena.descriptors.epoch[0] > epoch
    arena.clear(0)
    assert_holds(arena, 0, [])


def test_nothing_is_visible_before_it_is_published():
    arena = make_arena()
    pairs, image = make_image({(0, 0): 3})
    extents = Units(arena.num_units, unit_bytes=512).take(image.block_bytes)
    arena.copy(image, extents)
    assert_holds(arena, 0, [])
    arena.publish(0, arena.locate(image, extents))
    assert_holds(arena, 0, pairs)


@pytest.mark.parametrize(
    "other",
    [{"dtype": "float16"}, {"num_layers": 3}, {"features": [(8, 6), (8, 2)]}, {"features": [(8, 6), (8, 2), (5, 900)]}],
)
def test_an_image_of_another_model_is_refused_before_a_byte_is_copied(other):
    arena = make_arena()
    ranks = {(0, 0): 1, (1, 2 if len(other.get("features", FEATURES)) == 3 else 1): 1}
    _, image = make_image(ranks, **other)
    with pytest.raises(CorruptImageError):
        arena.write(0, image, Units(64, unit_bytes=512).take(image.block_bytes))
    assert not arena.tensor.any()


def test_tensors_and_arrays_of_the_table_agree():
    arena = make_arena()
    _, image = make_image({(0, 0): 3, (1, 2): 5})
    arena.write(1, image, Units(8, unit_bytes=512).take(image.block_bytes))
    table = arena.descriptors
    for array, tensor in zip((table.a_offset, table.b_offset, table.rank, table.scale), table.tensors, strict=True):
        assert np.array_equal(array, tensor.numpy())
    assert table.tensors[0].dtype == torch.int64


def test_a_copy_gives_the_processor_up_between_parts_and_leaves_out_no_byte(monkeypatch):
    monkeypatch.setattr(arena_module, "_PART_BYTES", 100)
    turns = []
    monkeypatch.setattr(arena_module.os, "sched_yield", lambda: turns.append(None))
    arena = make_arena()
    pairs, image = make_image({(0, 0): 3, (0, 2): 1, (1, 1): 7})
    arena.write(1, image, Units(8, unit_bytes=512).take(image.block_bytes))
    assert_holds(arena, 1, pairs)
    assert len(turns) >= image.num_bytes // 100 - 1
