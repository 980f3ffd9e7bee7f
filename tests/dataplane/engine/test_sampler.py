"""Distributions, filters and seeds of the sampler."""

from __future__ import annotations

import collections
import itertools
from typing import Any

import pytest
import torch

from dataplane.engine import sampler as module
from dataplane.engine.messages import Sampling
from dataplane.engine.plan import PlannedRows
from dataplane.engine.sampler import Sampler, uniform
from tests.dataplane.engine.driving import picks

CPU = torch.device("cpu")
VOCAB = 300


def planned(index: int = 0, *, seat: int = 0, history: tuple[int, ...] | None = None, **fields: Any) -> PlannedRows:
    sampling = Sampling(max_tokens=10, **fields)
    return PlannedRows(
        seat=seat, slot=-1, start=0, count=1, ids=(0,), new_pages=(), num_pages_before=0, sampling=sampling, sample_index=index,
        history=history, num_prompt=0 if history is None else len(history), rules=None if history is None else sampling,
        plain=sampling.is_plain,
    )  # fmt: skip


def make() -> Sampler:
    return Sampler(max_sequences=4, vocab_size=VOCAB, device=CPU)


def draw(logits: torch.Tensor, count: int, **fields: Any) -> list[int]:
    """Draws tokens 0 … count − 1 of one request from the same logits."""
    samples = make().sample(logits.repeat(count, 1), picks([planned(i, **fields) for i in range(count)]))
    tokens, finite = samples.tokens, samples.finite
    assert finite.all()
    return [int(token) for token in tokens]


@pytest.fixture(scope="module")
def logits() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 2


def kept_probabilities(logits: torch.Tensor, **fields: Any) -> dict[int, float]:
    """The distribution by definition, one step after the other."""
    sampling = Sampling(max_tokens=1, **fields)
    weights = sorted(((float(p), i) for i, p in enumerate((logits.double() / sampling.temperature).softmax(0))), reverse=True)
    largest = weights[0][0]
    if sampling.top_k:
        weights = weights[: sampling.top_k]
    total, kept, before = sum(p for p, _ in weights), [], 0.0
    for p, i in weights:
        if before < sampling.top_p * total and p >= sampling.min_p * largest:
            kept.append((p, i))
        before += p
    mass = sum(p for p, _ in kept)
    return {i: p / mass for p, i in kept}


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.4},
        {"temperature": 2.5},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 2.0, "top_k": 120},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 3.0, "top_p": 0.95},
        {"temperature": 1.5, "min_p": 0.1},
        {"temperature": 4.0, "min_p": 0.05},
        {"temperature": 1.5, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
    ],
)
def test_draws_follow_the_distribution_that_the_filters_define(logits: torch.Tensor, fields: dict[str, Any]) -> None:
    count = 20_000
    want = kept_probabilities(logits, **fields)
    got = collections.Counter(draw(logits, count, seed=11, **fields))
    assert set(got) <= set(want)
    chi = sum((got[token] - count * p) ** 2 / (count * p) for token, p in want.items() if count * p >= 5)
    freedom = max(1, sum(count * p >= 5 for p in want.values()) - 1)
    assert chi < freedom + 5 * (2 * freedom) ** 0.5 + 5


@pytest.mark.parametrize("fields", [{"top_p": 0.9}, {"top_k": 30}, {"min_p": 0.01}, {}, {"top_k": 100, "top_p": 0.97}])
def test_the_prefilter_never_changes_a_token(
    logits: torch.Tensor, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = draw(logits, 500, temperature=1.7, seed=5, **fields)
    monkeypatch.setattr(module, "_PREFILTER", VOCAB)
    assert draw(logits, 500, temperature=1.7, seed=5, **fields) == short


def test_a_seeded_row_does_not_depend_on_its_neighbours_or_place(logits: torch.Tensor) -> None:
    alone = [int(make().sample(logits[None].clone(), picks([planned(i, temperature=1.2, seed=7)])).tokens[0]) for i in range(40)]
    others = torch.randn(9, VOCAB) * 5
    others[3] = float("nan")
    for i, token in enumerate(alone):
        batch = torch.cat([others[: i % 9], logits[None], others[i % 9 :]])
        rows = [planned(i, seed=99 + j, temperature=j % 3 * 1.0) for j in range(9)]
        rows.insert(i % 9, planned(i, temperature=1.2, seed=7))
        samples = make().sample(batch, picks(rows))
        tokens, finite = samples.tokens, samples.finite
        assert int(tokens[i % 9]) == token
        assert finite.tolist().count(False) == 1
    assert len(set(alone)) > 5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_last_bits_of_logits_change_a_draw_only_at_the_edge_between_two_tokens(
    logits: torch.Tensor, temperature: float
) -> None:
    count, change = 20_000, 1e-3
    shaken = logits + change * (2 * torch.rand(VOCAB, generator=torch.Generator().manual_seed(4)) - 1)
    fields = {"temperature": temperature, "seed": 11}
    before, after = draw(logits, count, **fields), draw(shaken, count, **fields)
    changed = [i for i in range(count) if before[i] != after[i]]
    assert 0 < len(changed) < 0.05 * count
    order = logits.argsort(descending=True, stable=True).tolist()
    shares = (logits.double() / temperature).softmax(0)[order]
    upper = dict(zip(order, shares.cumsum(0).tolist(), strict=True))
    lower = {token: end - float(share) for (token, end), share in zip(upper.items(), shares, strict=True)}
    bound = 4 * change / temperature
    for i in changed:
        is_at_an_edge = min(uniform(11, i) - lower[before[i]], upper[before[i]] - uniform(11, i)) <= bound
        assert is_at_an_edge or abs(float(logits[before[i]] - logits[after[i]])) <= 2 * change, "the two changed their places"


def test_temperature_zero_takes_the_likeliest(logits: torch.Tensor) -> None:
    assert draw(logits, 3, temperature=0.0) == [int(logits.argmax())] * 3


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_reported(logits: torch.Tensor, poison: float) -> None:
    batch = logits.repeat(3, 1)
    batch[1, 17] = poison
    finite = make().sample(batch, picks([planned(temperature=1.0), planned(temperature=1.0), planned(temperature=0.0)])).finite
    assert finite.tolist() == [True, False, True]


def test_repetition_penalty_pushes_seen_tokens_of_prompt_and_output_down() -> None:
    sampler = make()
    logits = torch.full((VOCAB,), -4.0)
    logits[:4] = torch.tensor([8.0, 7.0, 6.0, -1.0])
    row = planned(seat=2, temperature=0.0, repetition_penalty=2.0, history=(0, 5))
    sampler.start(row)
    tokens = [int(sampler.sample(logits[None].clone(), picks([row])).tokens[0]) for _ in range(3)]
    assert tokens == [1, 2, 0], "8/2 < 7; then 7/2 < 6; then 4 is the largest"
    sampler.start(planned(seat=2, temperature=0.0, repetition_penalty=2.0, history=(9,)))
    assert int(sampler.sample(logits[None].clone(), picks([row])).tokens[0]) == 0, "a seat starts anew"


def test_noise_is_uniform_and_depends_on_seed_and_index() -> None:
    values = [uniform(seed, index) for seed in range(100) for index in range(100)]
    assert len(set(values)) == 10_000
    assert abs(sum(values) / 10_000 - 0.5) < 0.015
    assert all(0 <= value < 1 for value in values)
    assert uniform(2**64 - 1, 3) == uniform(-1, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "fields", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.1, "top_p": 0.5, "seed": 3}]
)
def test_no_setting_makes_finite_logits_count_as_not_finite(
    logits: torch.Tensor, dtype: torch.dtype, fields: dict[str, Any]
) -> None:
    sampler = make()
    likeliest = int(logits.argmax())
    row = planned(repetition_penalty=1e-38, history=(likeliest,), **fields)
    sampler.start(row)
    samples = sampler.sample(logits.to(dtype).repeat(1, 1), picks([row]))
    assert samples.finite.tolist() == [True]
    assert samples.tokens.tolist() == [likeliest]


def test_a_device_draws_among_all_tokens_where_a_few_may_not_do_and_gets_the_same_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [
        Sampling(max_tokens=1, temperature=1.0, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
        for seed, (top_p, top_k, min_p) in enumerate(itertools.product((1.0, 0.7), (0, 5, 64, 65), (0.0, 0.05)))
    ]
    logits = torch.randn(len(settings), 300, generator=torch.Generator().manual_seed(5))
    noise = [uniform(one.seed, 3) for one in settings]
    on_cpu = module._draw(logits, settings, noise)
    whole = [row for row, one in enumerate(settings) if one.top_k not in {5, 64}]
    assert module._undecided(torch.empty(0, device="meta"), settings, whole=False) == whole
    assert module._undecided(torch.empty(0, device="meta"), settings, whole=True) == []
    monkeypatch.setattr(module, "_undecided", lambda *_, whole: list(range(len(settings))))
    assert module._draw(logits, settings, noise).tolist() == on_cpu.tolist()
