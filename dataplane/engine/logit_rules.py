"""What a request's own rules make of its logits before a token is chosen: bans, bias, penalties, grammar."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dataplane.engine.messages import MAX_BAD_WORD_TOKENS, Sampling
from dataplane.engine.plan import Pick, PlannedRows
from dataplane.engine.upload import upload
from veneer.errors import InvalidArgumentError, VeneerError

_LARGEST = 1e30
"""Largest logit that a penalty makes: a tiny one overflows, and the sum over a temperature must not."""


class Ruled(NamedTuple):
    """Rows that get no token.

    Attributes:
        faults: By row: why it can never have one.
        held: Rows whose grammar's mask is not there yet.
    """

    faults: dict[int, VeneerError]
    held: set[int]


@dataclass(slots=True)
class _Seat:
    """Rules of the sequence in one seat, as far as they do not change from step to step.

    Attributes:
        bias: Tokens and what is added to their logits.
        stops: Tokens that are banned before `min_tokens`.
        banned: Tokens that are bad words by themselves.
        words: By the last token but one: (all tokens before the last, the last) of longer bad words.
        recent: The last output tokens, where there are longer bad words.
    """

    bias: tuple[Tensor, Tensor] | None = None
    stops: Tensor | None = None
    banned: Tensor | None = None
    words: dict[int, list[tuple[tuple[int, ...], int]]] = field(default_factory=dict)
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_BAD_WORD_TOKENS))


class LogitRules:
    """Applies rules to the rows of a step that have some, all such rows together; owned by the sampler.

    Per row x, in this order (the one of vLLM):

        x[bad words that would be complete, stop tokens before min_tokens, what the grammar forbids] = -inf
        (a grammar that allows nothing but stop tokens is complete: they are allowed then, before min_tokens too)
        x[i] += logit_bias[i]
        x[i] = x[i] / r if x[i] > 0 else x[i] · r      for tokens i of prompt and output, r = repetition_penalty
        x[i] -= frequency_penalty · c[i] + presence_penalty · (c[i] > 0)      c[i] = how often token i is in the output

    Counts are kept on the device, [max_sequences, vocab], from the first sequence with a penalty on.
    """

    def __init__(self, *, max_sequences: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (max_sequences, vocab_size)
        self._device = device
        self._seats: dict[int, _Seat] = {}
        self._prompt: Tensor | None = None
        self._counts: Tensor | None = None

    def start(self, rows: PlannedRows) -> None:
        """Sets up a seat for the sequence whose first rows these are."""
        history, sampling = rows.history, rows.rules
        assert history is not None, "the first rows of a sequence that is not plain carry its history"
        assert sampling is not None, "and its rules"
        seat = self._seats[rows.seat] = _Seat()
        if sampling.logit_bias:
            tokens, numbers = zip(*sampling.logit_bias, strict=True)
            seat.bias = self._ids(tokens), upload(numbers, torch.float32, self._device)
        if sampling.min_tokens:
            seat.stops = self._ids([token for token in sampling.stop_token_ids if token < self._shape[1]])
        single = [word[0] for word in sampling.bad_words if len(word) == 1]
        if single:
            seat.banned = self._ids(single)
        for word in sampling.bad_words:
            if len(word) > 1:
                seat.words.setdefault(word[-2], []).append((word[:-1], word[-1]))
        output = history[rows.num_prompt :]
        seat.recent.extend(output[-MAX_BAD_WORD_TOKENS:])
        if _has_penalty(sampling):
            self._count(rows.seat, history[: rows.num_prompt], output)

    def apply(self, logits: Tensor, rows: Sequence[Pick]) -> Ruled:
        """Changes logits in place. Never waits: a row whose grammar's mask is not there is held.

        Args:
            logits: float32 [R, vocab], finite.
            rows: The R rows.
        """
        faults, held = self._ban(logits, rows)
        self._add_bias(logits, rows)
        self._penalise(logits, rows)
        for i in (logits.amax(dim=-1) == -torch.inf).nonzero().squeeze(1).tolist():
            if i not in held:
                faults.setdefault(
                    i, InvalidArgumentError("the request's grammar, bad_words and min_tokens together leave no token")
                )
        return Ruled(faults, held)

    def note(self, rows: Mapping[int, Pick], tokens: Tensor, where: Sequence[int]) -> dict[int, Exception]:
        """Takes the tokens that were chosen for the rows at `where`, which are among `rows`.

        Returns:
            By row: what its grammar raised.
        """
        counted = [i for i in where if _has_penalty(rows[i].sampling)]
        if counted:
            assert self._counts is not None, "a seat with a penalty was started"
            self._counts[self._ids([rows[i].seat for i in counted]), tokens[self._ids(counted)]] += 1
        raised: dict[int, Exception] = {}
        for i in where:
            seat, mask = self._seats.get(rows[i].seat), rows[i].mask
            if mask is not None:
                try:
                    mask.advance(int(tokens[i]))
                except Exception as error:  # noqa: BLE001 - it is this row's
                    raised[i] = error
            if seat is not None and seat.words:
                seat.recent.append(int(tokens[i]))
        return raised

    def _ban(self, logits: Tensor, rows: Sequence[Pick]) -> Ruled:
        faults: dict[int, VeneerError] = {}
        held: set[int] = set()
        at: list[int] = []
        bits: list[np.ndarray[tuple[int], np.dtype[np.uint8]]] = []
        places: list[int] = []
        lists: list[Tensor] = []
        for i, pick in enumerate(rows):
            seat, sampling = self._seats[pick.seat], pick.sampling
            is_early = seat.stops is not None and pick.sample_index < sampling.min_tokens
            if pick.mask is not None:
                try:
                    allowed = pick.mask.allowed(pick.sample_index)
                except VeneerError as error:
                    faults[i] = error
                    continue
                if allowed is None:
                    held.add(i)
                    continue
                bits.append(np.frombuffer(allowed, dtype=np.uint8))
                at.append(i)
                is_early = is_early and not _allows_only(bits[-1], sampling.stop_token_ids)
            if seat.stops is not None and is_early:
                places.append(i)
                lists.append(seat.stops)
            if seat.banned is not None:
                places.append(i)
                lists.append(seat.banned)
            if seat.words and (complete := _completions(seat)):
                places.append(i)
                lists.append(self._ids(complete))
        if bits:
            vocab = self._shape[1]
            masks = np.unpackbits(np.stack(bits), axis=1, bitorder="little", count=vocab).view(bool)
            chosen = self._ids(at)
            logits[chosen] = torch.where(torch.from_numpy(masks).to(self._device), logits[chosen], -torch.inf)
        if lists:
            logits[self._rows(places, lists), torch.cat(lists)] = -torch.inf
        return Ruled(faults, held)

    def _add_bias(self, logits: Tensor, rows: Sequence[Pick]) -> None:
        biased = [(i, bias) for i, pick in enumerate(rows) if (bias := self._seats[pick.seat].bias) is not None]
        if biased:
            tokens = [bias[0] for _, bias in biased]
            numbers = torch.cat([bias[1] for _, bias in biased])
            logits[self._rows([i for i, _ in biased], tokens), torch.cat(tokens)] += numbers

    def _penalise(self, logits: Tensor, rows: Sequence[Pick]) -> None:
        penalised = [i for i, pick in enumerate(rows) if _has_penalty(pick.sampling)]
        if not penalised:
            return
        assert self._counts is not None, "a seat with a penalty was started"
        assert self._prompt is not None, "it is made with the counts"
        settings = [rows[i].sampling for i in penalised]
        repetition, frequency, presence = (
            upload(numbers, torch.float32, self._device)[:, None]
            for numbers in zip(
                *((one.repetition_penalty, one.frequency_penalty, one.presence_penalty) for one in settings), strict=True
            )
        )
        at, seats = self._ids(penalised), self._ids([rows[i].seat for i in penalised])
        counts, x = self._counts[seats], logits[at]
        once = counts > 0
        changed = torch.where(x > 0, x / repetition, x * repetition).clamp(-_LARGEST, _LARGEST)
        x = torch.where((self._prompt[seats] | once) & ~x.isinf(), changed, x)
        logits[at] = x - frequency * counts - presence * once

    def _count(self, seat: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        if self._counts is None or self._prompt is None:
            self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
            self._prompt = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        self._counts[seat] = torch.bincount(self._ids(output), minlength=self._shape[1])
        self._prompt[seat] = False
        self._prompt[seat, self._ids(prompt)] = True

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return upload(tokens, torch.int64, self._device)

    def _rows(self, places: Sequence[int], lists: Sequence[Tensor]) -> Tensor:
        """Returns the row of each entry of the lists put together."""
        sizes = [len(one) for one in lists]
        return self._ids(places).repeat_interleave(self._ids(sizes), output_size=sum(sizes))


def _has_penalty(sampling: Sampling) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0


def _allows_only(bits: np.ndarray[tuple[int], np.dtype[np.uint8]], tokens: Sequence[int]) -> bool:
    """Whether a mask allows some of these tokens and no other."""
    num_allowed = int(np.bitwise_count(bits).sum())
    return 0 < num_allowed == sum(bool(bits[token >> 3] >> (token & 7) & 1) for token in set(tokens) if token >> 3 < len(bits))


def _completions(seat: _Seat) -> list[int]:
    """Returns the tokens that would complete a bad word."""
    if not seat.recent:
        return []
    recent = tuple(seat.recent)
    return [last for before, last in seat.words.get(recent[-1], ()) if recent[-len(before) :] == before]
