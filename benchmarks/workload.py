"""What every contender of a benchmark is given and gives back. Needs numpy alone, since contenders live in other environments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

SEED = 20_26
MODULES = {
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "qv": ("q_proj", "v_proj"),
}
"""Sets of adapted modules, by name."""
_ZIPF = 1.1


class AdapterKey(NamedTuple):
    """One made adapter; equal keys are equal numbers, everywhere.

    Attributes:
        number: Its number among those of its shape.
        rank: Rank on every module.
        modules: A name in `MODULES`.
    """

    number: int
    rank: int
    modules: str

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.modules}-r{self.rank}-{self.number}"


@dataclass(frozen=True, slots=True)
class Workload:
    """A batch of requests that arrive together.

    Attributes:
        streams: Requests.
        prompt_tokens: Tokens of each prompt.
        output_tokens: Tokens that each generates, greedily, whatever they are.
        vocab_size: Ids are drawn below it.
        adapters: Distinct adapters; 0 is the base alone.
        rank: Rank of every adapter.
        modules: A name in `MODULES`.
        popularity: Which adapter a stream has: `even` deals them out in turn, `zipf` draws them, the first most often.
    """

    streams: int
    prompt_tokens: int
    output_tokens: int
    vocab_size: int
    adapters: int = 0
    rank: int = 16
    modules: str = "all"
    popularity: str = "even"

    def prompts(self) -> list[list[int]]:
        """Returns the token ids, the same on every call."""
        random = np.random.default_rng(SEED)
        ids: list[list[int]] = random.integers(0, self.vocab_size, (self.streams, self.prompt_tokens)).tolist()
        return ids

    def adapter_keys(self) -> list[AdapterKey | None]:
        """Returns each stream's adapter; None is the base."""
        if not self.adapters:
            return [None] * self.streams
        if self.popularity == "zipf":
            weights = 1 / np.arange(1, self.adapters + 1) ** _ZIPF
            drawn = np.random.default_rng(SEED).choice(self.adapters, self.streams, p=weights / weights.sum())
            indices = drawn.tolist()
        else:
            indices = [stream % self.adapters for stream in range(self.streams)]
        return [AdapterKey(index, self.rank, self.modules) for index in indices]


@dataclass(frozen=True, slots=True)
class Run:
    """What became of a workload.

    Attributes:
        seconds: From the arrival of the batch to its last token.
        ids: Generated ids of each stream.
        firsts_s: Each stream's time to its first token; empty where a contender cannot tell.
        gaps_s: Times between tokens of a stream, of all streams.
        extra: What only some contenders can tell.
    """

    seconds: float
    ids: list[list[int]]
    firsts_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the time of prefill and decode together."""
        return sum(map(len, self.ids)) / self.seconds

    @property
    def prefill_s(self) -> float:
        """Time until every stream has its first token."""
        return max(self.firsts_s)

    @property
    def step_s(self) -> float:
        """Median time of a decode step of all streams."""
        return percentile(self.gaps_s, 50)


def percentile(values: list[float], percent: float) -> float:
    """Returns the smallest value that at least so many percent of the values do not exceed."""
    return float(np.percentile(values, percent, method="inverted_cdf"))


def agreement(one: Run, other: Run, *, first: int = 16) -> float:
    """Returns the share of equal tokens among the first of every stream.

    Contenders round differently, and all that follows a stream's first other token may differ too: so not the whole length.
    """
    pairs = [pair for ids in zip(one.ids, other.ids, strict=True) for pair in list(zip(*ids, strict=True))[:first]]
    return sum(left == right for left, right in pairs) / len(pairs)
