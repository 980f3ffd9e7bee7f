"""Attention over pages against plain attention over each sequence alone, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dataplane.model.architecture import Architecture
from dataplane.model.attention import PagedKv, TorchAttention
from dataplane.model.batch import Batch, Chunk
from dataplane.model.config import parse_config

CONFIG = parse_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 10,
        "max_position_embeddings": 64,
    }
)
CPU = torch.device("cpu")


# Each form of attention that a family has: in layer 1, which is the one that is tried.
FORMS = {
    "plain": CONFIG,
    "window": replace(CONFIG, layers=(CONFIG.layers[0], replace(CONFIG.layers[1], window=5))),
    "window of one": replace(CONFIG, layers=(CONFIG.layers[0], replace(CONFIG.layers[1], window=1))),
    "softcap and scale": replace(CONFIG, attention_softcap=0.7, attention_scale=0.4),
    "softcap and window": replace(CONFIG, attention_softcap=0.7, layers=(CONFIG.layers[0], replace(CONFIG.layers[1], window=5))),
}


def plain(form: Architecture, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last rows q of a sequence with keys k and values v; [rows, heads, dim]."""
    q, k, v = q.double(), k.double().repeat_interleave(2, 1), v.double().repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * form.attention_scale
    if form.attention_softcap is not None:
        scores = torch.tanh(scores / form.attention_softcap) * form.attention_softcap
    hidden = torch.ones(len(q), len(k)).triu(len(k) - len(q) + 1).bool()
    if (window := form.layers[1].window) is not None:
        hidden |= torch.ones(len(q), len(k)).tril(len(k) - len(q) - window).bool()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(
    "parts",
    [
        [(5, 1)],
        [(0, 1), (16, 1), (33, 1)],
        [(0, 7), (0, 7), (0, 7), (0, 5)],
        [(3, 4), (16, 16), (0, 2)],
        [(20, 1), (2, 1), (0, 6), (0, 6), (9, 8), (0, 6), (15, 3)],
    ],
)
def test_every_row_sees_its_own_sequence_and_no_more(parts: list[tuple[int, int]], page_size: int, form: Architecture) -> None:
    """`parts` are (context, rows) of each sequence."""
    kv = PagedKv(form, num_pages=120, page_size=page_size, dtype=torch.float32, device=CPU)
    kv.data[1:] = 1e4  # what others left
    attention = TorchAttention(form, kv)
    free = torch.randperm(119, generator=torch.Generator().manual_seed(1)) + 1
    keys, values, qs, tables = [], [], [], []
    for context, rows in parts:
        length = context + rows
        count = -(-length // page_size)
        pages, free = free[:count], free[count:]
        kv.clear(pages)
        tables.append(pages)
        keys.append(torch.randn(length, 2, 16))
        values.append(torch.randn(length, 2, 16))
        qs.append(torch.randn(rows, 4, 16))
        for position in range(context):
            row = kv.row_of(int(pages[position // page_size]), position % page_size) + 2 * page_size  # layer 1
            kv.rows[row], kv.rows[row + page_size] = keys[-1][position], values[-1][position]

    positions = torch.cat([torch.arange(context, context + rows) for context, rows in parts])
    pages_of = torch.cat([table[torch.arange(c, c + n) // page_size] for table, (c, n) in zip(tables, parts, strict=True)])
    decode = [i for i, (_, rows) in enumerate(parts) if rows == 1]
    width = max((len(tables[i]) for i in decode), default=0)
    padded = torch.zeros(len(decode), width, dtype=torch.int64)
    for i in decode:
        padded[i, : len(tables[i])] = tables[i]
    firsts = [sum(rows for _, rows in parts[:i]) for i in range(len(parts))]
    batch = Batch(
        ids=positions,
        positions=positions,
        kv_rows=pages_of * kv.rows_per_page + positions % page_size,
        num_decode=len(decode),
        decode_lengths=torch.tensor([parts[i][0] + 1 for i in decode], dtype=torch.int64),
        decode_pages=padded,
        chunks=tuple(Chunk(firsts[i], rows, context, tables[i]) for i, (context, rows) in enumerate(parts) if i not in decode),
        sample_rows=None,
    )
    attention.begin_step(batch)
    new = [torch.cat([q, k[-len(q) :]], 1) for q, k in zip(qs, keys, strict=True)]
    out = attention(torch.cat(new), torch.cat([v[c:] for v, (c, _) in zip(values, parts, strict=True)]), layer=1)
    want = torch.cat([plain(form, q, k, v).flatten(1) for q, k, v in zip(qs, keys, values, strict=True)])
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    assert kv.data[0].eq(0).all()
