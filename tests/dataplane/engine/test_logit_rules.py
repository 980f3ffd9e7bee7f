"""A request's own rules against the same rules written down naively, one row and one token at a time."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from dataplane.engine.logit_rules import LogitRules
from dataplane.engine.messages import Sampling
from dataplane.engine.plan import PlannedRows
from dataplane.engine.sampler import Sampler
from tests.dataplane.engine.driving import picks
from veneer.errors import InvalidArgumentError, ResourceExhaustedError

CPU = torch.device("cpu")
VOCAB = 40


class Sequence:
    """One request as the scheduler would plan it, and its rules by definition."""

    def __init__(self, seat: int, prompt: tuple[int, ...], *, mask: Any = None, temperature: float = 0.0, **fields: Any) -> None:
        self.seat, self.prompt, self.mask = seat, prompt, mask
        self.sampling = Sampling(max_tokens=99, temperature=temperature, **fields)
        self.output: list[int] = []
        self.fresh = True

    def planned(self) -> PlannedRows:
        history = (*self.prompt, *self.output) if self.fresh else None
        self.fresh = False
        return PlannedRows(
            seat=self.seat, slot=-1, start=0, count=1, ids=(0,), new_pages=(), num_pages_before=0, sampling=self.sampling,
            sample_index=len(self.output), history=history, num_prompt=len(self.prompt),
            rules=None if history is None else self.sampling, plain=self.sampling.is_plain, mask=self.mask,
        )  # fmt: skip

    def ruled(self, logits: list[float]) -> list[float]:
        """The definition."""
        rules, x = self.sampling, list(logits)
        for word in rules.bad_words:
            if tuple(self.output[len(self.output) - len(word) + 1 :]) == word[:-1] and len(self.output) >= len(word) - 1:
                x[word[-1]] = -math.inf
        if len(self.output) < rules.min_tokens:
            for token in rules.stop_token_ids:
                x[token] = -math.inf
        for token, number in rules.logit_bias:
            x[token] += number
        for token in set(self.prompt) | set(self.output):
            x[token] = x[token] / rules.repetition_penalty if x[token] > 0 else x[token] * rules.repetition_penalty
        for token in set(self.output):
            x[token] -= rules.frequency_penalty * self.output.count(token) + rules.presence_penalty
        return x


class Mask:
    """A mask that allows what the test says and remembers what it was told."""

    def __init__(self, *allowed: int) -> None:
        self.tokens: list[int] = []
        self._bits = bytearray(math.ceil(VOCAB / 8))
        for token in allowed:
            self._bits[token // 8] |= 1 << token % 8

    def allowed(self, index: int) -> bytes | None:
        return bytes(self._bits)

    def advance(self, token: int) -> None:
        self.tokens.append(token)


class Broken(Mask):
    """A mask that cannot go on."""

    def allowed(self, index: int) -> bytes | None:
        raise ResourceExhaustedError("the grammar is too complex here")


def some_rules(rng: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if rng.random() < 0.5:
        fields["repetition_penalty"] = rng.choice([0.5, 1.3, 2.0])
    if rng.random() < 0.5:
        fields["frequency_penalty"] = rng.choice([-0.5, 0.7])
    if rng.random() < 0.5:
        fields["presence_penalty"] = rng.choice([-1.0, 1.5])
    if rng.random() < 0.5:
        fields["logit_bias"] = tuple((token, rng.uniform(-3, 3)) for token in rng.sample(range(VOCAB), 5))
    if rng.random() < 0.5:
        fields |= {"min_tokens": rng.randint(1, 9), "stop_token_ids": tuple(rng.sample(range(VOCAB), 3))}
    if rng.random() < 0.7:
        fields["bad_words"] = tuple(tuple(rng.choices(range(8), k=rng.randint(1, 3))) for _ in range(6))
    return fields


@pytest.mark.parametrize("seed", range(12))
def test_mixed_rows_follow_their_own_rules_exactly(seed: int) -> None:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    sequences = [Sequence(seat, tuple(rng.choices(range(VOCAB), k=6)), **some_rules(rng)) for seat in range(6)]
    sampler = Sampler(max_sequences=6, vocab_size=VOCAB, device=CPU)
    for step in range(14):
        if step == 6:  # a sequence that was preempted and came back to another seat
            sequences[2].seat, sequences[4].seat = sequences[4].seat, sequences[2].seat
            sequences[2].fresh = sequences[4].fresh = True
        present = [sequence for sequence in sequences if rng.random() < 0.8 or sequence.fresh]
        rng.shuffle(present)
        rows = [sequence.planned() for sequence in present]
        for row in rows:
            sampler.start(row)
        logits = torch.randn(len(rows), VOCAB, generator=generator)
        logits[:, :8] += 2  # so that few tokens come often
        samples = sampler.sample(logits, picks(rows))
        for sequence, row_logits, token in zip(present, logits.tolist(), samples.tokens.tolist(), strict=True):
            want = sequence.ruled(row_logits)
            assert want[token] == pytest.approx(max(want), abs=1e-5), f"step {step}, {sequence.sampling}"
            sequence.output.append(token)


@pytest.mark.parametrize("seed", range(4))
def test_every_logit_is_what_the_definition_gives(seed: int) -> None:
    rng = random.Random(100 + seed)
    sequences = [Sequence(seat, tuple(rng.choices(range(VOCAB), k=6)), **some_rules(rng)) for seat in range(8)]
    for sequence in sequences:
        sequence.output = rng.choices(range(VOCAB), k=rng.randint(0, 12))
    rules = LogitRules(max_sequences=8, vocab_size=VOCAB, device=CPU)
    rows = [sequence.planned() for sequence in sequences]
    for row in rows:
        rules.start(row)
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(seed))
    want = torch.tensor([sequence.ruled(row) for sequence, row in zip(sequences, logits.tolist(), strict=True)])
    assert rules.apply(logits, [row.pick for row in rows]) == ({}, set())
    torch.testing.assert_close(logits, want, rtol=1e-6, atol=1e-6)


def test_a_grammar_selects_and_is_told_what_was_chosen() -> None:
    mask = Mask(3, 17)
    sequences = [Sequence(0, (1,), grammar="g", mask=mask), Sequence(1, (1,))]
    sampler = Sampler(max_sequences=2, vocab_size=VOCAB, device=CPU)
    rows = [sequence.planned() for sequence in sequences]
    sampler.start(rows[0])
    logits = torch.arange(VOCAB, dtype=torch.float32).repeat(2, 1)
    assert sampler.sample(logits, picks(rows)).tokens.tolist() == [17, VOCAB - 1]
    assert mask.tokens == [17]


def test_a_drawn_token_is_allowed_too() -> None:
    rows = [Sequence(0, (1,), grammar="g", mask=Mask(3, 17), temperature=2.0, seed=seed).planned() for seed in range(300)]
    sampler = Sampler(max_sequences=1, vocab_size=VOCAB, device=CPU)
    sampler.start(rows[0])
    tokens = sampler.sample(torch.zeros(300, VOCAB), picks(rows)).tokens.tolist()
    assert set(tokens) == {3, 17}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("mask", "status"), [(Mask(), InvalidArgumentError.status), (Broken(3), ResourceExhaustedError.status)])
def test_rules_that_leave_nothing_end_their_own_row_only(temperature: float, mask: Mask, status: str) -> None:
    sequences = [Sequence(0, (1,), grammar="g", mask=mask, temperature=temperature), Sequence(1, (1,), min_tokens=1)]
    sampler = Sampler(max_sequences=2, vocab_size=VOCAB, device=CPU)
    rows = [sequence.planned() for sequence in sequences]
    for row in rows:
        sampler.start(row)
    samples = sampler.sample(torch.arange(VOCAB, dtype=torch.float32).repeat(2, 1), picks(rows))
    fault = samples.more[0].fault
    assert fault is not None
    assert fault[0] == status
    assert list(samples.more) == [0]
    assert int(samples.tokens[1]) == VOCAB - 1
    assert mask.tokens == []


class Late(Mask):
    """A mask that is not there yet."""

    def allowed(self, index: int) -> bytes | None:
        return None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_mask_is_not_there_is_held_and_its_neighbours_have_their_tokens(temperature: float) -> None:
    late, ready = Late(3), Mask(17)
    masks = [late, ready, None, late]
    sequences = [
        Sequence(i, (1,), grammar="g" if mask else "", mask=mask, temperature=temperature, logprobs=1)
        for i, mask in enumerate(masks)
    ]
    sampler = Sampler(max_sequences=4, vocab_size=VOCAB, device=CPU)
    rows = [sequence.planned() for sequence in sequences]
    for row in rows:
        sampler.start(row)
    samples = sampler.sample(torch.arange(VOCAB, dtype=torch.float32).repeat(4, 1) * 100, picks(rows))
    assert {i for i, one in samples.more.items() if one.is_held} == {0, 3}
    assert all(samples.more[i].fault is None and samples.more[i].token is None for i in (0, 3))
    assert samples.tokens[1:3].tolist() == [17, VOCAB - 1]
    assert (late.tokens, ready.tokens) == ([], [17])


@pytest.mark.parametrize(("allowed", "chosen"), [((5,), 5), ((5, 6), 6), ((5, 17), 17), ((17, 20), 20)])
def test_a_grammar_that_is_complete_ends_before_min_tokens_and_any_other_does_not(allowed: tuple[int, ...], chosen: int) -> None:
    sequence = Sequence(0, (1,), grammar="g", mask=Mask(*allowed), min_tokens=9, stop_token_ids=(5, 6, VOCAB + 9))
    sampler = Sampler(max_sequences=1, vocab_size=VOCAB, device=CPU)
    row = sequence.planned()
    sampler.start(row)
    samples = sampler.sample(torch.arange(VOCAB, dtype=torch.float32).repeat(1, 1), picks([row]))
    assert samples.more == {}
    assert samples.tokens.tolist() == [chosen]


def test_a_row_that_is_not_finite_is_found_whatever_its_rules() -> None:
    sequences = [Sequence(seat, (1,), logit_bias=((2, 5.0),), logprobs=2) for seat in range(3)]
    sampler = Sampler(max_sequences=3, vocab_size=VOCAB, device=CPU)
    rows = [sequence.planned() for sequence in sequences]
    for row in rows:
        sampler.start(row)
    logits = torch.zeros(3, VOCAB)
    logits[1, 7] = torch.nan
    samples = sampler.sample(logits, picks(rows))
    assert samples.finite.tolist() == [True, False, True]
    assert sorted(samples.more) == [0, 2]


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    sequence = Sequence(0, (1, 2), temperature=0.0, logit_bias=((9, 100.0),), repetition_penalty=3.0, logprobs=3)
    sampler = Sampler(max_sequences=1, vocab_size=VOCAB, device=CPU)
    row = sequence.planned()
    sampler.start(row)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(5))
    raw = logits.double().log_softmax(-1)[0]
    chosen = sampler.sample(logits, picks([row])).more[0]
    assert chosen.token == 9
    assert chosen.logprobs is not None
    assert chosen.logprobs.logprob == pytest.approx(float(raw[9]), abs=1e-5)
    assert [token for token, _ in chosen.logprobs.top] == raw.topk(3).indices.tolist()
    assert [number for _, number in chosen.logprobs.top] == pytest.approx(raw.topk(3).values.tolist(), abs=1e-5)


def test_plain_rows_run_no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("a rule ran")

    for name in ("start", "apply", "note"):
        monkeypatch.setattr(LogitRules, name, fail)
    sampler = Sampler(max_sequences=2, vocab_size=VOCAB, device=CPU)
    rows = [Sequence(0, (1,)).planned(), Sequence(1, (1,), temperature=1.0).planned()]
    rows = [row._replace(history=None) for row in rows]
    for row in rows:
        sampler.start(row)
    assert sampler.sample(torch.zeros(2, VOCAB), picks(rows)).more == {}


def test_a_row_is_drawn_as_if_it_were_alone_whatever_rules_stand_beside_it() -> None:
    fields: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 1},
        {"temperature": 1.0, "seed": 2, "logit_bias": ((3, 2.0),)},
        {"frequency_penalty": 1.0},
        {"temperature": 0.8, "seed": 3, "bad_words": ((5,),), "logprobs": 1},
        {"temperature": 1.5, "seed": 4, "grammar": "g", "mask": Mask()},
        {"temperature": 1.5, "seed": 5},
    ]
    logits = torch.randn(len(fields), VOCAB, generator=torch.Generator().manual_seed(4))

    def choose(which: list[int]) -> list[int]:
        sampler = Sampler(max_sequences=len(fields), vocab_size=VOCAB, device=CPU)
        rows = [Sequence(i, (1,), **fields[i]).planned() for i in which]
        for row in rows:
            if not row.plain:
                sampler.start(row)
        return sampler.sample(logits[which], picks(rows)).tokens.tolist()

    together = choose(list(range(len(fields))))
    for i in (0, 1, 2, 3, 5):
        assert choose([i]) == [together[i]]
