"""Pairs on embedding and head against their formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.edges import EMBED, HEAD, Edge, Edges

HIDDEN, VOCAB = 12, 29
RANKS = {0: {EMBED: 3, HEAD: 5}, 2: {HEAD: 1}, 5: {EMBED: 8}}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def arena(request: pytest.FixtureRequest) -> torch.Tensor:
    return torch.randn(4096, generator=torch.Generator().manual_seed(1)).to(request.param)


@pytest.fixture
def table() -> dict[int, dict[int, Edge]]:
    found: dict[int, dict[int, Edge]] = {}
    at = 64
    for slot, ranks in RANKS.items():
        for kind, rank in ranks.items():
            width = VOCAB if kind == EMBED else HIDDEN
            found.setdefault(slot, {})[kind] = Edge(at, at + rank * width, rank, 0.5 + slot)
            at += rank * (VOCAB + HIDDEN) + 64
    return found


def _pair(arena: torch.Tensor, edge: Edge, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    a = arena[edge.a_offset :][: edge.rank * k].view(edge.rank, k).double()
    return a, arena[edge.b_offset :][: edge.rank * n].view(edge.rank, n).double()


def test_rows_have_what_their_own_adapter_adds(arena: torch.Tensor, table: dict[int, dict[int, Edge]]) -> None:
    random = np.random.default_rng(2)
    row_slot = random.choice([-1, 0, 2, 4, 5], 60).astype(np.int32)
    ids = torch.from_numpy(random.integers(0, VOCAB, 60))
    x, h = (torch.randn(60, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(arena.dtype) for seed in (3, 4))
    rows = torch.tensor([5, 7, 7, 30, 59])
    logits = torch.zeros(5, VOCAB, dtype=arena.dtype)
    edges = Edges(arena, table, hidden=HIDDEN, vocab_size=VOCAB)
    edges.begin_step(row_slot)
    embedded = x.clone()
    edges.embed_(embedded, ids)
    edges.head_(logits, h[rows], rows)
    tolerance = 1e-4 if arena.dtype is torch.float32 else 0.4
    for t, slot in enumerate(row_slot.tolist()):
        wanted = x[t].double()
        if edge := table.get(slot, {}).get(EMBED):
            a, b = _pair(arena, edge, VOCAB, HIDDEN)
            wanted = wanted + edge.scale * a[:, ids[t]] @ b
            torch.testing.assert_close(embedded[t].double(), wanted, atol=tolerance, rtol=tolerance / 4)
        else:
            assert torch.equal(embedded[t], x[t])
    for place, t in enumerate(rows.tolist()):
        if edge := table.get(int(row_slot[t]), {}).get(HEAD):
            a, b = _pair(arena, edge, HIDDEN, VOCAB)
            torch.testing.assert_close(
                logits[place].double(), edge.scale * (a @ h[t].double()) @ b, atol=tolerance, rtol=tolerance / 4
            )
        else:
            assert not logits[place].any()


def test_a_rows_bits_do_not_depend_on_its_neighbours(arena: torch.Tensor, table: dict[int, dict[int, Edge]]) -> None:
    edges = Edges(arena, table, hidden=HIDDEN, vocab_size=VOCAB)
    h = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(5)).to(arena.dtype)
    said = []
    for row_slot in ([0], [0] * 40, [0, 2, -1, 5] * 10, [0, *[2] * 17, 0]):
        edges.begin_step(np.array(row_slot, dtype=np.int32))
        logits = torch.zeros(len(row_slot), VOCAB, dtype=arena.dtype)
        x = torch.zeros(len(row_slot), HIDDEN, dtype=arena.dtype)
        edges.head_(logits, h[: len(row_slot)], None)
        edges.embed_(x, torch.full((len(row_slot),), 7))
        said.append(torch.cat((logits[0], x[0])))
    assert all(torch.equal(said[0], other) for other in said)
    assert said[0].abs().max() > 0


def test_nothing_is_read_from_a_device_while_a_step_is_queued(table: dict[int, dict[int, Edge]]) -> None:
    """Tensors without memory raise where their values are asked for."""
    device = torch.device("meta")
    edges = Edges(torch.empty(4096, device=device), table, hidden=HIDDEN, vocab_size=VOCAB)
    row_slot = np.array([0] * 20 + [2, -1, 5], dtype=np.int32)
    assert edges.is_needed(row_slot)
    edges.begin_step(row_slot)
    x = torch.zeros(23, HIDDEN, device=device)
    edges.embed_(x, torch.zeros(23, dtype=torch.int64, device=device))
    edges.head_(torch.zeros(2, VOCAB, device=device), x[:2], torch.tensor([3, 22]))


def test_a_step_without_such_adapters_touches_nothing(table: dict[int, dict[int, Edge]]) -> None:
    edges = Edges(torch.empty(0), table, hidden=HIDDEN, vocab_size=VOCAB)
    row_slot = np.array([-1, 1, 3], dtype=np.int32)
    assert not edges.is_needed(row_slot)
    edges.begin_step(row_slot)
    x = torch.ones(3, HIDDEN)
    edges.embed_(x, torch.zeros(3, dtype=torch.int64))
    edges.head_(x, x, torch.tensor([0]))
    assert x.eq(1).all()
