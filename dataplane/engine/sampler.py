"""Chooses the next token of each sequence from its logits."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dataplane.engine.logit_rules import LogitRules
from dataplane.engine.logprobs import report
from dataplane.engine.messages import Logprobs, Sampling
from dataplane.engine.plan import Chosen, Pick, Picks, PlannedRows
from dataplane.engine.upload import upload
from dataplane.model.pieces import Pieces, TorchPieces
from veneer.errors import InternalError, VeneerError

_log = logging.getLogger(__name__)
_MASK = (1 << 64) - 1
HELD = Chosen(None, is_held=True)
"""What came of a row whose grammar's mask is not there yet."""
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


@dataclass(frozen=True, slots=True)
class Samples:
    """What was chosen.

    Attributes:
        tokens: Token ids, int64 [S].
        finite: bool [S]: whether the row's logits were finite. Looking at the largest is enough: a value that is not finite in a
            hidden state meets head weights of both signs, so the row holds a NaN (which `max` returns) or +inf.
        more: By row, of rows that are not plain: what there is beside the token.
    """

    tokens: Tensor
    finite: Tensor
    more: Mapping[int, Chosen]


class Sampler:
    """Turns logits into tokens, each row by itself: neither its neighbours nor its place in the batch matter.

    Per row: the request's own rules (`LogitRules`), then temperature, then the filters in this order: the `top_k` likeliest; of
    their renormalised probabilities the shortest prefix that reaches `top_p`; those with at least `min_p` times the likeliest
    probability. The token is the inverse cumulative distribution of what is kept, likeliest first, at the request's own uniform
    noise. Temperature 0 takes the likeliest token. Owned by the runner.

    An exception in what one row alone asks for (rules, grammar, report) is that row's fault: it ends INTERNAL, and its
    neighbours have their tokens. One in what rows without such wishes share, or in every row's, is raised.

    Args:
        max_sequences: Seats.
        vocab_size: Tokens.
        device: Of the logits.
        pieces: What finds the likeliest token.
        row_by_row: PyTorch is given one row at a time, since the last bits of its sums may depend on how many there are.
    """

    def __init__(
        self,
        *,
        max_sequences: int,
        vocab_size: int,
        device: torch.device,
        pieces: Pieces | None = None,
        row_by_row: bool = False,
    ) -> None:
        self._pieces = pieces or TorchPieces()
        self._row_by_row = row_by_row
        self._rules = LogitRules(max_sequences=max_sequences, vocab_size=vocab_size, device=device)
        self._broken: dict[int, VeneerError] = {}

    def start(self, rows: PlannedRows) -> None:
        """Sets up the seat of a sequence that is not plain, if these are its first rows."""
        if rows.history is None:
            return
        self._broken.pop(rows.seat, None)
        try:
            self._rules.start(rows)
        except Exception as error:  # noqa: BLE001 - the row's own fault; told when it samples
            self._broken[rows.seat] = _own_fault(error)

    def sample(self, logits: Tensor, picks: Picks) -> Samples:
        """Chooses tokens.

        Args:
            logits: [S, vocab]; not changed.
            picks: The S rows.
        """
        special = list(picks.special)
        if self._row_by_row and not picks.are_greedy:
            samples = self._choose_apart(logits, picks, [[i] for i in range(len(picks))])
        else:
            try:
                samples = self._choose(logits, picks)
            except Exception:  # whose fault it is shows when each of them is alone
                if not special:
                    raise
                plain = [i for i in range(len(picks)) if i not in picks.special]
                samples = self._choose_apart(logits, picks, [*([plain] if plain else []), *([i] for i in special)])
        if not special:
            return samples
        good = samples.finite.tolist()
        without = {i for i, one in samples.more.items() if one.fault is not None or one.is_held}
        whole = [i for i in special if good[i] and i not in without]
        raised = self._rules.note(picks.special, samples.tokens, whole)
        return replace(samples, more={**samples.more, **{i: failed(_own_fault(error)) for i, error in raised.items()}})

    def _choose(self, logits: Tensor, picks: Picks) -> Samples:
        """Chooses tokens and changes nothing."""
        tokens, finite = self._pieces.likeliest(logits)  # before the rules: own settings never count against the version
        faults = {i: self._broken[pick.seat] for i, pick in picks.special.items() if pick.seat in self._broken}
        special = [i for i in picks.special if i not in faults]
        drawn = [i for i, sampling in enumerate(picks.settings) if sampling.temperature > 0]
        if not special:
            if drawn:
                chosen = upload(drawn, torch.int64, logits.device)
                tokens[chosen] = self._draw(torch.where(finite[chosen, None], logits[chosen].float(), 0.0), drawn, picks)
            return Samples(tokens, finite, {i: failed(error) for i, error in faults.items()})
        at = upload(special, torch.int64, logits.device)
        ruled = torch.where(finite[at, None], logits[at].float(), 0.0)
        applied = self._rules.apply(ruled, [picks.special[i] for i in special])
        faults |= {special[k]: error for k, error in applied.faults.items()}
        held = {special[k] for k in applied.held}
        tokens[at] = ruled.argmax(dim=-1)
        drawn = [i for i in drawn if i not in faults and i not in held]
        if drawn:
            chosen = upload(drawn, torch.int64, logits.device)
            shaped = torch.where(finite[chosen, None], logits[chosen].float(), 0.0)
            place = {i: k for k, i in enumerate(special)}
            if both := [(d, place[i]) for d, i in enumerate(drawn) if i in place]:
                to, of = (upload(side, torch.int64, logits.device) for side in zip(*both, strict=True))
                shaped[to] = ruled[of]
            tokens[chosen] = self._draw(shaped, drawn, picks)
        good = finite.tolist()
        whole = [i for i in special if i not in faults and i not in held and good[i]]
        more = self._more(logits, tokens, picks.special, whole, faults)
        return Samples(tokens, finite, more | dict.fromkeys(held, HELD))

    def _choose_apart(self, logits: Tensor, picks: Picks, groups: Sequence[list[int]]) -> Samples:
        """Chooses group by group; a group is one row, or plain rows.

        Raises:
            Exception: It comes up in plain rows, or in all of several others.
        """
        tokens = torch.zeros(len(picks), dtype=torch.int64, device=logits.device)
        finite = torch.ones(len(picks), dtype=torch.bool, device=logits.device)
        more: dict[int, Chosen] = {}
        raised: list[Exception] = []
        for group in groups:
            try:
                samples = self._choose(logits[group], picks.at(group))
            except Exception as error:
                if group[0] not in picks.special:
                    raise
                raised.append(error)
                more[group[0]] = failed(_own_fault(error))
                continue
            tokens[group], finite[group] = samples.tokens, samples.finite
            more |= {group[k]: one for k, one in samples.more.items()}
        if len(raised) == len(picks.special) > 1:
            raise raised[0]
        return Samples(tokens, finite, more)

    def score(self, logits: Tensor, rows: Sequence[PlannedRows]) -> list[tuple[Logprobs, ...] | VeneerError | None]:
        """Says how likely the model found the prompt tokens of rows that are scored.

        Args:
            logits: [sum of the numbers of targets, vocab].
            rows: The planned rows that have targets, in order.

        Returns:
            For each of them the report; None where its logits were not finite, an error where its own report raised.
        """
        try:
            return [*self._score(logits, rows)]
        except Exception as error:
            if len(rows) == 1:
                return [_own_fault(error)]
            parts = logits.split([len(planned.targets) for planned in rows])
            apart = [self.score(part, [planned])[0] for part, planned in zip(parts, rows, strict=True)]
            if all(isinstance(one, VeneerError) for one in apart):
                raise
            return apart

    def _score(self, logits: Tensor, rows: Sequence[PlannedRows]) -> Iterator[tuple[Logprobs, ...] | None]:
        targets = upload([token for planned in rows for token in planned.targets], torch.int64, logits.device)
        num_top = [planned.num_top for planned in rows for _ in planned.targets]
        size = 1 if self._row_by_row else len(num_top)
        reported = itertools.chain.from_iterable(
            report(logits[i : i + size], targets[i : i + size], num_top[i : i + size]) for i in range(0, len(num_top), size)
        )
        finite = iter(logits.amax(dim=-1).isfinite().tolist())
        for planned in rows:
            mine = tuple(itertools.islice(reported, len(planned.targets)))
            good = tuple(itertools.islice(finite, len(planned.targets)))
            yield mine if all(good) else None

    @staticmethod
    def _draw(logits: Tensor, drawn: list[int], picks: Picks) -> Tensor:
        settings = [picks.settings[i] for i in drawn]
        indexes = picks.sample_indexes[drawn].tolist()
        noise = [uniform(one.seed, index) for one, index in zip(settings, indexes, strict=True)]
        return _draw(logits, settings, noise)

    @staticmethod
    def _more(
        logits: Tensor, tokens: Tensor, special: Mapping[int, Pick], whole: list[int], faults: Mapping[int, VeneerError]
    ) -> dict[int, Chosen]:
        more = {i: failed(error) for i, error in faults.items()}
        counts = {i: number for i in whole if (number := special[i].sampling.logprobs) is not None}
        if counts:
            at = upload(list(counts), torch.int64, logits.device)
            reported = report(logits[at], tokens[at], list(counts.values()))
            more |= {i: Chosen(int(tokens[i]), one) for i, one in zip(counts, reported, strict=True)}
        return more


def failed(error: VeneerError) -> Chosen:
    """Returns what the scheduler is told of a row that cannot go on."""
    return Chosen(None, fault=(error.status, error.message))


def _own_fault(error: Exception) -> VeneerError:
    """Says that a row's own part raised; the log says where."""
    if isinstance(error, VeneerError):
        return error
    _log.error("the rules of a request raised; it ends", exc_info=error)
    return InternalError(f"choosing a token of this request failed: {type(error).__name__}")


def _draw(logits: Tensor, settings: list[Sampling], noise: list[float]) -> Tensor:
    """Draws one token a row, [R]; logits are float32 [R, vocab] and finite at their maximum."""
    device = logits.device
    temperature = upload([sampling.temperature for sampling in settings], torch.float32, device)
    ends = torch.finfo(logits.dtype)
    scaled = (logits / temperature[:, None].clamp(min=1e-5)).clamp(ends.min, ends.max)
    scaled -= scaled.amax(dim=-1, keepdim=True)
    mass = scaled.exp().sum(dim=-1, dtype=torch.float64)
    few, few_ids = scaled.topk(min(_PREFILTER, scaled.shape[1]), dim=-1)
    picked, decided = _pick(few, mass, settings, noise, vocab=scaled.shape[1])
    tokens = few_ids.gather(1, picked[:, None]).squeeze(1)
    left = _undecided(decided, settings, whole=few.shape[1] == scaled.shape[1])
    if left:
        open_rows = upload(left, torch.int64, device)
        values, ids = scaled[open_rows].sort(dim=-1, descending=True, stable=True)
        picked, _ = _pick(values, mass[open_rows], [settings[i] for i in left], [noise[i] for i in left], vocab=scaled.shape[1])
        tokens[open_rows] = ids.gather(1, picked[:, None]).squeeze(1)
    return tokens


def _undecided(decided: Tensor, settings: list[Sampling], *, whole: bool) -> list[int]:
    """Returns the rows that have to be drawn among all tokens.

    To ask a device which rows its candidates decided would be to wait for it: there they are those for which it is not certain.
    """
    if decided.device.type == "cpu":
        rows: list[int] = (~decided).nonzero().squeeze(1).tolist()
        return rows
    return [] if whole else [i for i, sampling in enumerate(settings) if not 0 < sampling.top_k <= _PREFILTER]


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
        return upload(numbers, torch.float64, device)[:, None]

    top_k = column([float(sampling.top_k or vocab) for sampling in settings])
    top_p = column([sampling.top_p for sampling in settings])
    min_p = column([sampling.min_p for sampling in settings])
    weights = values.double().exp()
    place = torch.arange(num, device=device)
    weights = torch.where(place < top_k, weights, 0.0)
    sums = weights.cumsum(dim=-1)
    total = torch.where(top_k <= num, sums[:, -1:], mass[:, None])
    exact_total = (top_k <= num) | (top_k >= vocab)
    kept = (place < top_k) & (sums - weights < top_p * total) & (weights >= min_p) & (weights > 0)
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
