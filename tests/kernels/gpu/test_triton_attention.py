"""The form behind the interface of the model, beside PyTorch's, over steps of rows that decode and chunks together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dataplane.model.architecture import Architecture
from dataplane.model.attention import PagedKv, TorchAttention
from dataplane.model.batch import Batch, Chunk
from dataplane.model.config import parse_config
from dataplane.model.triton_attention import TritonAttention
from kernels.gpu.attention import UnsupportedAttentionError
from kernels.gpu.device import probe

CPU = torch.device("cpu")
PLAIN = parse_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 2,
        "vocab_size": 10,
        "max_position_embeddings": 512,
    }
)


def with_window(form: Architecture, window: int) -> Architecture:
    """Layers in turn see a window and everything, as some families have it."""
    return replace(form, layers=(replace(form.layers[0], window=window), form.layers[1]))


FORMS = {
    "plain": PLAIN,
    "window": with_window(PLAIN, 37),
    "softcap and scale": replace(PLAIN, attention_softcap=0.7, attention_scale=0.4),
    "softcap and window": with_window(replace(PLAIN, attention_softcap=0.7), 8),
}
PARTS = [[(66, 1), (2, 1), (0, 6), (9, 7)], [(67, 1), (16, 1)], [(0, 20), (64, 5)]]
CASES = [(name, dtype, False) for name in FORMS for dtype in (torch.float32, torch.bfloat16)]
CASES.append(("softcap and window", torch.float32, True))


def batch_of(kv: PagedKv, parts: list[tuple[int, int]], tables: list[torch.Tensor]) -> Batch:
    """`parts` are (context, rows) of each sequence, single rows first."""
    size = kv.page_size
    num_decode = sum(rows == 1 for _, rows in parts)
    used = [table[: -(-(context + rows) // size)] for (context, rows), table in zip(parts, tables, strict=True)]
    padded = torch.zeros(num_decode, max((len(table) for table in used[:num_decode]), default=0), dtype=torch.int64)
    for row, table in zip(padded, used, strict=False):
        row[: len(table)] = table
    positions = torch.cat([torch.arange(context, context + rows) for context, rows in parts])
    pages = torch.cat([table[torch.arange(c, c + n) // size] for table, (c, n) in zip(used, parts, strict=True)])
    firsts = [sum(rows for _, rows in parts[:i]) for i in range(len(parts))]
    return Batch(
        ids=positions,
        positions=positions,
        kv_rows=pages * kv.rows_per_page + positions % size,
        num_decode=num_decode,
        decode_lengths=torch.tensor([context + 1 for context, _ in parts[:num_decode]], dtype=torch.int64),
        decode_pages=padded,
        chunks=tuple(Chunk(firsts[i], rows, context, used[i]) for i, (context, rows) in enumerate(parts) if rows > 1),
        sample_rows=None,
    )


@pytest.mark.parametrize(("name", "dtype", "batch_invariant"), CASES)
def test_gives_what_the_torch_form_gives(name: str, dtype: torch.dtype, batch_invariant: bool) -> None:
    torch.manual_seed(0)
    form = FORMS[name]
    page_size = 16 if dtype is torch.float32 else 32
    kv = PagedKv(form, num_pages=30, page_size=page_size, dtype=dtype, device=CPU)
    kv.data[1:].normal_()
    other = PagedKv(form, num_pages=30, page_size=page_size, dtype=dtype, device=CPU)
    other.data.copy_(kv.data)
    limits = {"max_rows": 64, "max_sequences": 5, "max_context": 80}
    attention = TritonAttention(form, kv, gpu=probe("cpu"), batch_invariant=batch_invariant, **limits)
    expected = TorchAttention(form, other)
    for parts in PARTS:
        batch = batch_of(kv, parts, distinct(parts, kv.page_size))
        attention.begin_step(batch)
        expected.begin_step(batch)
        for layer in range(2):
            fused = torch.randn(len(batch.positions), 10, 32).to(dtype)
            got, want = (each(fused[:, :8], fused[:, 8:], layer=layer) for each in (attention, expected))
            tolerance = 2e-5 if dtype is torch.float32 else 3e-2
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
        assert torch.equal(kv.data, other.data)


def distinct(parts: list[tuple[int, int]], page_size: int) -> list[torch.Tensor]:
    """Returns pages of their own for each sequence, at random places."""
    counts = [-(-(context + rows) // page_size) for context, rows in parts]
    return list((torch.randperm(29)[: sum(counts)] + 1).split(counts))


def test_lengths_and_pages_come_from_the_host_where_the_batch_has_them_there() -> None:
    """The tensors of the device are not read when launches are planned: here they hold nothing that could be planned."""
    kv = PagedKv(PLAIN, num_pages=9, page_size=16, dtype=torch.float32, device=CPU)
    attention = TritonAttention(PLAIN, kv, gpu=probe("cpu"), max_rows=8, max_sequences=2, max_context=64)
    fused = torch.randn(4, 10, 32)
    host = batch_of(kv, [(20, 1), (4, 3)], [torch.tensor([3, 5]), torch.tensor([7])])
    outputs = []
    for batch in (host, replace(host, host=host, kv_rows=None, decode_lengths=None, decode_pages=None, chunks=())):
        attention.begin_step(batch)
        outputs.append(attention(fused[:, :8], fused[:, 8:], layer=1))
    assert torch.equal(*outputs)


def test_shapes_that_the_kernels_do_not_attend_to_are_refused() -> None:
    for form, page_size, message in (
        (replace(PLAIN, head_dim=40), 16, "not 40"),
        (replace(PLAIN, head_dim=272), 16, "not 272"),
        (PLAIN, 8, "not 8"),
    ):
        kv = PagedKv(form, num_pages=2, page_size=page_size, dtype=torch.float32, device=CPU)
        with pytest.raises(UnsupportedAttentionError, match=message):
            TritonAttention(form, kv, gpu=probe("cpu"), max_rows=8, max_sequences=2, max_context=64)


def test_scratch_is_known_without_a_device() -> None:
    sizes = []
    for device in (CPU, torch.device("meta")):
        kv = PagedKv(PLAIN, num_pages=2, page_size=16, dtype=torch.bfloat16, device=device)
        limits = {"max_rows": 512, "max_sequences": 64, "max_context": 4096}
        sizes.append(TritonAttention(PLAIN, kv, gpu=probe("cpu"), **limits).scratch_bytes)
    assert sizes[0] == sizes[1]
    assert 64 * 16 * 2 * 16 * 32 * 4 < sizes[0] < 20 << 20


def test_a_library_that_was_chosen_attends_to_prompts(monkeypatch) -> None:
    calls = []

    def attend(q, k, v, *, starts, longest, window):
        calls.append(starts.tolist())
        return torch.full_like(q, 7.0)

    monkeypatch.setattr("dataplane.model.triton_attention.choose_library", lambda *_, **__: attend)
    kv = PagedKv(PLAIN, num_pages=9, page_size=16, dtype=torch.float32, device=CPU)
    attention = TritonAttention(PLAIN, kv, gpu=probe("cpu"), max_rows=8, max_sequences=2, max_context=64)
    attention.try_library(lambda _: 0.0)
    attention.begin_step(batch_of(kv, [(20, 1), (0, 3)], [torch.tensor([3, 5]), torch.tensor([7])]))
    fused = torch.randn(4, 10, 32)
    out = attention(fused[:, :8], fused[:, 8:], layer=1)
    assert calls == [[0, 3]]
    assert bool((out[1:] == 7).all())
    assert not bool((out[0] == 7).any())
