"""Chooses the next token of each sequence from its logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dataplane.engine.messages import Sampling
from dataplane.engine.plan import PlannedRows
from dataplane.model.pieces import Pieces, TorchPieces

_MASK = (1 << 64) - 1
_PREFILTER = 64
"""Likeliest tokens that nearly every draw is decided by; `topk` of 64 costs a thirtieth of a full sort at 49,152 tokens (CPU)."""


def uniform(seed: int, index: int) -> float:
    """Returns the noise of token `index` of a request: a multiple of 2⁻⁵³ in [0, 1) that depends on (seed, index) only.

    Source: the SplitMix64 mixing function (Steele, Lea and Flood, 2014), used as a hash of a counter.
    """
    return (_mix(_mix(seed & _MASK) ^ (index * 0x9E3779B97F4A7C15 & _MASK)) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Sampler:
    """Turns logits into tokens, each row by itself: neither its neighbours nor its place in the batch matter.

    Per row: repetition penalty, then temperature, then the filters in this order: the `top_k` likeliest; of their renormalised
    probabilities the shortest prefix that reaches `top_p`; those with at least `min_p` times the likeliest probability. The
    token is the inverse cumulative distribution of what is kept, likeliest first, at the request's own uniform noise.
    Temperature 0 takes the likeliest token. Owned by the runner.
    """

    def __init__(self, *, max_sequences: int, vocab_size: int, device: torch.device, pieces: Pieces | None = None) -> None:
        self._pieces = pieces or TorchPieces()
        self._shape = (max_sequences, vocab_size)
        self._device = device
        self._seen: Tensor | None = None

    def start(self, rows: PlannedRows) -> None:
        """Sets up a seat whose rows carry a history: the tokens that its repetition penalty starts from."""
        if rows.history is None:
            return
        if self._seen is None:
            self._seen = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        self._seen[rows.seat] = False
        self._seen[rows.seat, torch.tensor(rows.history, device=self._device)] = True

    def sample(self, logits: Tensor, rows: Sequence[PlannedRows]) -> tuple[Tensor, Tensor]:
        """Chooses tokens.

        Args:
            logits: [S, vocab]; rows with a repetition penalty are changed in place.
            rows: The S planned rows that sample.

        Returns:
            Token ids int64 [S], and bool [S]: whether the row's logits were finite. Looking at the largest is enough: a value
            that is not finite in a hidden state meets head weights of both signs, so the row holds a NaN (which `max` returns)
            or +inf.
        """
        settings = [planned.sampling for planned in rows]
        assert None not in settings, "every row given to the sampler samples"
        tokens, finite = self._pieces.likeliest(logits)  # before the penalty: own settings never count against the version
        penalised = [i for i, sampling in enumerate(settings) if sampling and sampling.repetition_penalty != 1.0]
        if penalised:
            self._penalise(logits, penalised, rows)
            tokens = logits.argmax(dim=-1)
        drawn = [i for i, sampling in enumerate(settings) if sampling and sampling.temperature > 0]
        if drawn:
            chosen = torch.tensor(drawn, device=logits.device)
            picked = _draw(
                torch.where(finite[chosen, None], logits[chosen].float(), 0.0),
                [settings[i] for i in drawn if settings[i]],  # type: ignore[misc]
                [uniform(settings[i].seed, rows[i].sample_index) for i in drawn],  # type: ignore[union-attr]
            )
            tokens[chosen] = picked
        for i in penalised:
            assert self._seen is not None
            self._seen[rows[i].seat, tokens[i]] = True
        return tokens, finite

    def _penalise(self, logits: Tensor, penalised: list[int], rows: Sequence[PlannedRows]) -> None:
        assert self._seen is not None, "a seat with a penalty was started with its history"
        for i in penalised:
            sampling = rows[i].sampling
            assert sampling is not None
            row, penalty, ends = logits[i], sampling.repetition_penalty, torch.finfo(logits.dtype)
            changed = torch.where(row > 0, row / penalty, row * penalty).clamp(ends.min, ends.max)  # a tiny penalty overflows
            row.copy_(torch.where(self._seen[rows[i].seat], changed, row))


def _draw(logits: Tensor, settings: list[Sampling], noise: list[float]) -> Tensor:
    """Draws one token a row, [R]; logits are float32 [R, vocab] and finite at their maximum."""
    device = logits.device
    temperature = torch.tensor([sampling.temperature for sampling in settings], device=device)
    ends = torch.finfo(logits.dtype)
    scaled = (logits / temperature[:, None].clamp(min=1e-5)).clamp(ends.min, ends.max)
    scaled -= scaled.amax(dim=-1, keepdim=True)
    mass = scaled.exp().sum(dim=-1, dtype=torch.float64)
    few, few_ids = scaled.topk(min(_PREFILTER, scaled.shape[1]), dim=-1)
    picked, decided = _pick(few, mass, settings, noise, vocab=scaled.shape[1])
    tokens = few_ids.gather(1, picked[:, None]).squeeze(1)
    open_rows = (~decided).nonzero().squeeze(1)
    if open_rows.numel():
        values, ids = scaled[open_rows].sort(dim=-1, descending=True, stable=True)
        left = open_rows.tolist()
        picked, _ = _pick(values, mass[open_rows], [settings[i] for i in left], [noise[i] for i in left], vocab=scaled.shape[1])
        tokens[open_rows] = ids.gather(1, picked[:, None]).squeeze(1)
    return tokens


def _pick(values: Tensor, mass: Tensor, settings: list[Sampling], noise: list[float], *, vocab: int) -> tuple[Tensor, Tensor]:
    """Picks a position in each row of candidates.

    Args:
        values: float32 [R, C], the C largest logits in falling order, less the largest.
        mass: float64 [R], sum of exp over the whole vocabulary.
        settings: R settings.
        noise: R numbers in [0, 1).
        vocab: Tokens in all; C = vocab decides every row.

    Returns:
        Positions int64 [R], and bool [R]: whether the candidates sufficed to decide.
    """
    device, num = values.device, values.shape[1]
    whole = num == vocab

    def column(numbers: list[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64, device=device)[:, None]

    top_k = column([float(sampling.top_k or vocab) for sampling in settings])
    top_p = column([sampling.top_p for sampling in settings])
    min_p = column([sampling.min_p for sampling in settings])
    weights = values.double().exp()
    place = torch.arange(num, device=device)
    weights = torch.where(place < top_k, weights, 0.0)
    sums = weights.cumsum(dim=-1)
    total = torch.where(top_k <= num, sums[:, -1:], mass[:, None])
    exact_total = (top_k <= num) | (top_k >= vocab)
    kept = (place < top_k) & (sums - weights < top_p * total) & (weights >= min_p)
    ends = ~kept[:, -1:] | (top_k <= num)
    kept_sum = torch.where(kept, weights, 0.0).sum(dim=-1, keepdim=True)
    unfiltered = (top_p >= 1.0) & (min_p <= 0.0) & exact_total
    kept_mass = torch.where(ends, kept_sum, total)
    target = column(noise) * kept_mass
    position = (sums <= target).sum(dim=-1)
    last = kept.sum(dim=-1) - 1
    decided = (exact_total & (ends | (unfiltered & (sums[:, -1:] > target)))).squeeze(1)
    if whole:
        decided = torch.ones_like(decided)
        position = (sums <= column(noise) * kept_sum).sum(dim=-1)
    return torch.minimum(position, last.clamp(min=0)), decided
