from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane.lora.image import ImageError, ImagePair, LossyAdapterError, build_image, check_loss
from dataplane.lora.image_file import open_image, write_image
from kernels.fp8 import Fp8Pair, factor_bytes, from_fp8, relative_error, to_fp8

FIELDS = {"version": "v1", "base_digest": "b1", "num_layers": 3, "num_slices": 2}


def pair(layer=0, index=0, rank=3, *, scaling=0.5, k=7, n=5, seed=0):
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((rank, k)).astype(np.float32)
    return ImagePair(layer, index, scaling, a, rng.standard_normal((n, rank)).astype(np.float32))


def build(pairs, *, dtype="float32", **fields):
    return build_image(pairs, dtype=dtype, **{**FIELDS, **fields})


def matrix(image, offset, shape, dtype):
    return np.frombuffer(image.payload.tobytes(), dtype, count=shape[0] * shape[1], offset=offset).reshape(shape)


def test_every_pair_that_goes_in_comes_out_with_b_transposed(tmp_path):
    pairs = [pair(2, 1, 5, seed=1), pair(0, 0, 1, seed=2, scaling=1 / 3), pair(0, 1, 64, seed=3, k=9), pair(1, 0, 8, seed=4)]
    built = build(pairs)
    write_image(tmp_path / "image", built)
    image = open_image(tmp_path / "image", version="v1", base_digest="b1", dtype="float32")
    assert [(block.layer, block.slice) for block in image.blocks] == [(0, 0), (0, 1), (1, 0), (2, 1)]
    for source in pairs:
        (block,) = (block for block in image.blocks if (block.layer, block.slice) == (source.layer, source.slice))
        assert block.rank == source.a.shape[0]
        assert block.scale == float(np.float32(source.scaling))
        assert (block.in_features, block.out_features) == (source.a.shape[1], source.b.shape[0])
        assert np.array_equal(matrix(image, block.a_offset, source.a.shape, np.float32), source.a)
        assert np.array_equal(matrix(image, block.b_offset, source.b.T.shape, np.float32), source.b.T)
        assert block.a_offset % 128 == block.b_offset % 128 == 0
    assert image.rank == 64
    assert sum(image.block_bytes) == image.num_bytes
    assert image.payload.tobytes() == built.payload.tobytes()
    assert not image.payload.flags.writeable


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_gains_and_shifts_lie_beside_their_pair_in_float32(tmp_path, dtype):
    gain, shift = np.linspace(0.1, 3, 5, dtype=np.float32), np.full(5, -1 / 3, np.float32)
    pairs = [
        dataclasses.replace(pair(0, 0, 3), gain=gain, shift=shift),
        dataclasses.replace(pair(0, 1, 2), gain=gain),
        ImagePair(2, 0, 1.0, np.empty((0, 7), np.float32), np.empty((5, 0), np.float32), shift=shift),
    ]
    write_image(tmp_path / "image", build(pairs, dtype=dtype))
    blocks = open_image(tmp_path / "image").blocks
    payload = open_image(tmp_path / "image").payload
    for block, source in zip(blocks, pairs, strict=True):
        for offset, vector in ((block.gain_offset, source.gain), (block.shift_offset, source.shift)):
            assert (offset == -1) == (vector is None)
            if vector is not None:
                assert offset % 128 == 0
                assert np.array_equal(np.frombuffer(payload.tobytes(), np.float32, 5, offset), vector)
    assert blocks[2].rank == 0
    assert open_image(tmp_path / "image").num_bytes == sum(block.size_bytes for block in blocks)


def test_in_fp8_each_block_has_its_factors_in_front_of_a_and_half_the_bytes(tmp_path):
    pairs = [pair(0, 0, 40, seed=1, k=256, n=128), pair(0, 1, 1, seed=2), pair(2, 1, 5, seed=3, k=128, n=384)]
    write_image(tmp_path / "image", build(pairs, dtype="fp8"))
    image = open_image(tmp_path / "image", dtype="fp8")
    for block, source in zip(image.blocks, pairs, strict=True):
        rank = source.a.shape[0]
        coded = Fp8Pair(
            matrix(image, block.a_offset, source.a.shape, np.uint8),
            matrix(image, block.b_offset, source.b.T.shape, np.uint8),
            matrix(image, block.factor_offset, (1, rank), np.float32)[0],
        )
        expected = from_fp8(to_fp8(source.a, source.b))
        assert all(np.array_equal(*both) for both in zip(from_fp8(coded), expected, strict=True))
        assert block.a_offset - block.factor_offset == factor_bytes(rank)
        assert block.offset % 128 == block.a_offset % 128 == block.b_offset % 128 == 0
        assert block.loss == relative_error(source.a, source.b, coded)
    assert image.blocks[0].size_bytes == factor_bytes(40) + build(pairs, dtype="bfloat16").blocks[0].size_bytes // 2
    assert sum(image.block_bytes) == image.num_bytes


def test_an_image_names_the_pair_that_loses_most_in_fp8():
    cancels = pair(1, 1, 1)
    near = cancels.a * (1 + 0.01 * np.random.default_rng(1).standard_normal(7)).astype(np.float32)
    cancels = dataclasses.replace(cancels, a=np.concatenate([cancels.a, near]), b=np.hstack([cancels.b, -cancels.b]))
    image = build([pair(), cancels, pair(2, 0)], dtype="fp8")
    assert (image.loss.layer, image.loss.slice) == (1, 1)
    assert image.loss.error > 0.2
    check_loss(image, most=image.loss.error)
    with pytest.raises(LossyAdapterError, match=r"^layer 1, slice 1: loses .* max_adapter_loss is 0.2"):
        check_loss(image, most=0.2)
    assert build([pair()]).loss is None


def test_what_no_factor_holds_is_refused():
    huge = pair()
    huge.a[0, 0], huge.b[0, 0] = 1e30, 1e30
    with pytest.raises(ImageError, match="layer 0, slice 0: A times B: has values that are not finite in fp8"):
        build([huge], dtype="fp8")


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"gain": np.array([1, np.nan, 1, 1, 1], np.float32)}, "not finite"),
        ({"shift": np.ones(4, np.float32)}, r"no float32 \[out\]"),
        ({"shift": np.ones(5, np.float64)}, r"no float32 \[out\]"),
        ({"a": np.empty((0, 7), np.float32), "b": np.empty((5, 0), np.float32)}, "rank 0 and nothing else"),
    ],
)
def test_vectors_that_do_not_fit_are_refused(changes, fault):
    with pytest.raises(ImageError, match=fault):
        build([dataclasses.replace(pair(), **changes)])


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", np.uint16), ("float16", np.float16)])
def test_a_matrix_in_the_images_own_type_is_laid_out_as_it_is(dtype, bits):
    wide = pair(rank=4)
    image = build([wide], dtype=dtype)
    (block,) = image.blocks
    a = matrix(image, block.a_offset, (4, 7), bits).copy()
    b = matrix(image, block.b_offset, (4, 5), bits).T.copy()
    assert build([dataclasses.replace(wide, a=a, b=b)], dtype=dtype).payload.tobytes() == image.payload.tobytes()
    a.view(np.uint16)[2, 3] = 0x7F80 if dtype == "bfloat16" else 0x7C00
    with pytest.raises(ImageError, match="not finite"):
        build([dataclasses.replace(wide, a=a, b=b)], dtype=dtype)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=64))
def test_bfloat16_is_rounded_as_torch_rounds_it(values):
    a = np.array([values], dtype=np.float32)
    expected = torch.from_numpy(a).to(torch.bfloat16)
    one = ImagePair(0, 0, 1.0, a, np.ones((1, 1), np.float32))
    if not torch.isfinite(expected).all():
        with pytest.raises(ImageError, match="not finite"):
            build([one], dtype="bfloat16")
        return
    image = build([one], dtype="bfloat16")
    assert np.array_equal(matrix(image, 0, a.shape, np.int16), expected.view(torch.int16).numpy())


@pytest.mark.parametrize(
    ("bits", "expected"),
    [(0x3F808000, 0x3F80), (0x3F818000, 0x3F82), (0x3F808001, 0x3F81), (0x00008000, 0x0000), (0x80018000, 0x8002)],
)
def test_bfloat16_ties_go_to_even(bits, expected):
    a = np.array([[bits]], dtype=np.uint32).view(np.float32)
    image = build([ImagePair(0, 0, 1.0, a, np.ones((1, 1), np.float32))], dtype="bfloat16")
    assert matrix(image, 0, (1, 1), np.uint16)[0, 0] == expected


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("float16", 1e5),
        ("bfloat16", 3.4e38),
        ("float32", np.inf),
        ("bfloat16", -np.inf),
        ("bfloat16", np.nan),
        ("float16", np.nan),
        ("fp8", np.inf),
        ("fp8", np.nan),
    ],
)
@pytest.mark.parametrize("matrix_name", ["A", "B"])
def test_a_value_that_is_not_finite_after_the_cast_is_refused(dtype, value, matrix_name):
    bad = pair(1, 1)
    (bad.a if matrix_name == "A" else bad.b)[0, 0] = value
    with pytest.raises(ImageError) as caught:
        build([pair(), bad], dtype=dtype)
    assert [violation.field for violation in caught.value.violations] == [f"layer 1, slice 1: {matrix_name}"]


def test_a_nan_whose_payload_would_round_to_infinity_or_to_zero_is_refused():
    for bits in (0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF):
        a = np.array([[bits]], dtype=np.uint32).view(np.float32)
        with pytest.raises(ImageError, match="not finite"):
            build([ImagePair(0, 0, 1.0, a, np.ones((1, 1), np.float32))], dtype="bfloat16")


def test_all_faults_are_listed_at_once():
    wrong = ImagePair(0, 0, 1.0, np.ones((2, 7), np.float32), np.ones((5, 3), np.float32))
    empty = ImagePair(1, 1, 1.0, np.ones((0, 7), np.float32), np.ones((5, 0), np.float32))
    pairs = [pair(0, 1), pair(0, 1), pair(4, 0), pair(0, 2), pair(2, 0, scaling=np.inf), pair(2, 1, scaling=1e39), wrong, empty]
    with pytest.raises(ImageError) as caught:
        build(pairs)
    assert len(caught.value.violations) == 7


def test_an_adapter_without_pairs_is_refused():
    with pytest.raises(ImageError, match="no pair"):
        build([])


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ImageError, match="float8"):
        build([pair()], dtype="float8")
