"""All layers in one native call beside the same layers in pieces; every family is in tests/oracle/test_families.py."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dataplane.model.architecture import Architecture
from dataplane.model.attention import PagedKv, TorchAttention
from dataplane.model.batch import Batch, Chunk
from dataplane.model.config import parse_config
from dataplane.model.decoder import Decoder, weight_shapes
from dataplane.model.loader import load_decoder
from dataplane.model.native_attention import NativeAttention
from dataplane.model.native_stack import PARTS, NativeStack
from dataplane.model.pieces import NativePieces, Pieces, TorchPieces
from dataplane.model.stack import NoLowRank, PieceStack
from kernels.native import INSTRUCTION_SETS, Native, load_native, processor_features

AVAILABLE = [one for one in INSTRUCTION_SETS if one.needs <= processor_features()]
CPU = torch.device("cpu")
FORM = parse_config(
    {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 96, "intermediate_size": 130, "num_attention_heads": 4,
        "head_dim": 32, "num_key_value_heads": 2, "num_hidden_layers": 3, "vocab_size": 50, "max_position_embeddings": 1024,
    }
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    generator = torch.Generator().manual_seed(5)
    tensors = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in weight_shapes(FORM).items()}
    save_file(tensors, path / "model.safetensors")
    return path


def load(folder: Path, pieces: Pieces, dtype: torch.dtype) -> Decoder:
    return load_decoder(folder, FORM, max_context=1024, dtype=dtype, device=CPU, pieces=pieces)


def in_pieces(model: Decoder) -> Decoder:
    assert isinstance(model.stack, NativeStack)
    return replace(model, stack=PieceStack(FORM, model.stack.layers, model.stack.rotaries, model.pieces))


class Cache:
    """Two sequences that grow: each step has a row of one and a chunk of the other."""

    def __init__(self, form: Architecture, native: Native, dtype: torch.dtype) -> None:
        self.kv = PagedKv(form, num_pages=128, page_size=16, dtype=dtype, device=CPU)
        self.attention = NativeAttention(form, self.kv, native=native)
        self.tables = torch.arange(1, 121).view(2, 60)
        self.lengths = [0, 0]

    def step(self, model: Decoder, rows: int) -> torch.Tensor:
        """Adds a token to the first sequence and `rows` to the second one; returns all logits."""
        positions = torch.cat([torch.tensor([self.lengths[0]]), torch.arange(self.lengths[1], self.lengths[1] + rows)])
        seats = torch.tensor([0] + [1] * rows)
        kv_rows = self.tables[seats, positions // 16] * self.kv.rows_per_page + positions % 16
        chunk = Chunk(1, rows, self.lengths[1], self.tables[1])
        self.lengths = [self.lengths[0] + 1, self.lengths[1] + rows]
        ids = (positions * 7 + seats) % FORM.vocab_size
        batch = Batch(ids, positions, kv_rows, 1, torch.tensor([self.lengths[0]]), self.tables[:1], (chunk,), None)
        return model.forward(batch, self.attention, NoLowRank())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("instruction_set", AVAILABLE, ids=lambda one: one.name)
def test_steps_of_any_size_have_the_bits_of_layers_in_pieces(folder: Path, instruction_set, dtype: torch.dtype) -> None:
    native = load_native(instruction_set)
    model = load(folder, NativePieces(native, dtype, invariant=True), dtype)
    one, other = Cache(FORM, native, dtype), Cache(FORM, native, dtype)
    for rows in (3, 1, 9, 600, 2):  # buffers grow and are used again; 600 tokens are attended to in splits
        assert torch.equal(one.step(model, rows), other.step(in_pieces(model), rows))
    assert torch.equal(one.kv.data, other.kv.data)


def test_any_number_of_threads_gives_the_same_bits(folder: Path) -> None:
    native, threads = load_native(), torch.get_num_threads()
    model = load(folder, NativePieces(native, torch.bfloat16, invariant=True), torch.bfloat16)
    said = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            cache = Cache(FORM, native, torch.bfloat16)
            said.append(torch.cat([cache.step(model, rows) for rows in (17, 1, 530)]))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(said[0], said[1])
    assert torch.equal(said[0], said[2])


def test_layers_are_one_call_where_all_products_are_native(folder: Path) -> None:
    native = load_native()
    assert isinstance(load(folder, NativePieces(native, torch.float32, invariant=True), torch.float32).stack, NativeStack)
    assert isinstance(load(folder, NativePieces(native, torch.float32), torch.float32).stack, PieceStack)
    own = load(folder, NativePieces(native, torch.bfloat16), torch.bfloat16).stack
    assert isinstance(own, NativeStack) == native.has_best_product
    assert isinstance(load(folder, TorchPieces(), torch.bfloat16).stack, PieceStack)


def test_another_form_of_attention_is_refused(folder: Path) -> None:
    native = load_native()
    model = load(folder, NativePieces(native, torch.float32, invariant=True), torch.float32)
    cache = Cache(FORM, native, torch.float32)
    cache.attention = TorchAttention(FORM, cache.kv)  # type: ignore[assignment]
    with pytest.raises(AssertionError, match="together"):
        cache.step(model, 3)


def test_the_call_counts_the_time_of_its_parts(folder: Path) -> None:
    native = load_native()
    model = load(folder, NativePieces(native, torch.float32, invariant=True), torch.float32)
    cache, stack = Cache(FORM, native, torch.float32), model.stack
    assert isinstance(stack, NativeStack)
    assert stack.seconds == dict.fromkeys(PARTS, 0.0)
    start = time.perf_counter()
    cache.step(model, 200)
    taken = time.perf_counter() - start
    assert 0 < sum(stack.seconds.values()) < taken
    assert all(stack.seconds[part] > 0 for part in PARTS if part != "adapters")
