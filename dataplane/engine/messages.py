"""The engine's message interface: commands into it, events out of it.

The engine runs in a process of its own; these records are all that passes between it and the serving process. They are plain
frozen dataclasses of integers, floats, strings and tuples, so that one codec (`dataplane.engine.codec`) carries them and the same
interface works inside one process for tests. Times are durations, never clock readings of the other process.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat, starmap
from typing import Literal, NamedTuple

from dataplane.engine.samples import Samples, TakeSamples
from dataplane.engine.state import Holding as Holding  # noqa: PLC0414  the interface has one address
from dataplane.engine.state import State as State  # noqa: PLC0414

MAX_LOGIT_BIAS = 300
"""Tokens with a bias of their own in one request."""
MAX_BAD_WORDS = 128
"""Banned sequences of one request."""
MAX_BAD_WORD_TOKENS = 128
"""Tokens of a banned sequence: a word of 128 bytes has no more."""
MAX_LOGPROBS = 20
"""Likeliest tokens that are reported beside the chosen one."""
MAX_SCORES = 65_536
"""Prompt logprobs of one request: prompt tokens × (prompt_logprobs + 1); they travel in one message."""
MAX_GRAMMAR_BYTES = 256 << 10
"""Bytes of a grammar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token of one sequence is chosen.

    Attributes:
        max_tokens: Tokens to generate at most; at least 1.
        temperature: 0 chooses the likeliest token.
        top_p: Keep the likeliest tokens whose probabilities add up to this; (0, 1].
        top_k: Keep so many of the likeliest tokens; 0 keeps all.
        min_p: Keep tokens at least this likely relative to the likeliest; [0, 1].
        repetition_penalty: Divides (positive) or multiplies (negative) logits of tokens seen in prompt or output; 1 does nothing.
        seed: Seed of this request's own noise: token i uses noise that depends on (seed, i) only. Never None: the front draws
            one.
        stop_token_ids: Tokens that end the sequence, the model's end-of-sequence tokens included unless the caller ignores them.
        frequency_penalty: Taken off a token's logit once for each time that it is in the output; 0 does nothing.
        presence_penalty: Taken off the logit of every token that is in the output; 0 does nothing.
        logit_bias: (token, number) pairs, no token twice: added to the token's logit. At most `MAX_LOGIT_BIAS`.
        min_tokens: No stop token is chosen before so many tokens.
        bad_words: Sequences of tokens that the output never holds. At most `MAX_BAD_WORDS`, each of at most
            `MAX_BAD_WORD_TOKENS`.
        logprobs: Report each chosen token's logarithm of probability and those of so many likeliest tokens, by the model's own
            distribution: before temperature, penalties, bias, bans and filters. None: report nothing.
        prompt_logprobs: The same of the prompt's tokens but the first.
        grammar: What the output must match, as llguidance reads it; empty: anything.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether a choice needs nothing but logits and noise: no state of the sequence, nothing to report of it."""
        return (
            self.repetition_penalty == 1.0
            and not self.frequency_penalty
            and not self.presence_penalty
            and not self.logit_bias
            and not self.min_tokens
            and not self.bad_words
            and self.logprobs is None
            and not self.grammar
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Runs one request.

    Attributes:
        request_id: Unique among running requests.
        tenant: Tenant of the caller, for fair shares and cache keys.
        prompt: Token ids, at least one; len(prompt) + 1 <= the context limit.
        sampling: How tokens are chosen.
        version: Digest of the adapter version, or None for the base. Bound here for the request's whole life.
        active_from: Position in the prompt from which on the version computes; what lies before is the base's.
        deadline_s: Seconds from receipt until the request must have ended; None for no limit.
        weight: Share of the tenant relative to others.
        priority: Place among the waiting requests of its tenant: higher goes first, equals as they came.
        rank: Largest rank of the version, as the catalogue says; 0 for the base, or where it is not known.
        max_rank_rows: Rank rows that the distinct adapters of the tenant's running requests may have; 0 for no limit.
        max_arena_bytes: Bytes of the arena that adapters charged to the tenant may take; 0 for no limit.
        cache_salt: Secret of the caller's tenant, hex, part of every cache key; without one nothing of the request is kept for
            reuse, and nothing reused.
    """

    request_id: str
    tenant: str
    prompt: tuple[int, ...]
    sampling: Sampling
    version: str | None = None
    active_from: int = 0
    deadline_s: float | None = None
    weight: int = 1
    priority: int = 0
    rank: int = 0
    max_rank_rows: int = 0
    max_arena_bytes: int = 0
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends a request; all it holds is free within one step. Unknown or finished ids are ignored. No event follows."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Keeps a request out of the steps: its reader is slow. It keeps its place and, while others do not need them, its pages."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Resume:
    """Lets a paused request run again."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stage:
    """Tells the engine that a version's image lies in host memory at `path` (see `dataplane.lora.image`). Idempotent."""

    version: str
    path: str


@dataclass(frozen=True, slots=True)
class Unstage:
    """Takes a version away (retired, quarantined, host copy evicted).

    `drop_device` gives out no more leases and frees its device copy once none is held; then an `Unloaded` follows.
    """

    version: str
    drop_device: bool = False


@dataclass(frozen=True, slots=True)
class Pin:
    """Has a version brought to the device and kept there, until `Unpin`; its owner pays for it meanwhile. Idempotent."""

    version: str
    owner: str


@dataclass(frozen=True, slots=True)
class Unpin:
    """Lets a pinned version make room again; unknown ones are ignored."""

    version: str


@dataclass(frozen=True, slots=True)
class Fail:
    """Ends every waiting request of a version whose image cannot be had, with this status and message."""

    version: str
    status: str
    message: str


@dataclass(frozen=True, slots=True)
class Query:
    """Asks for a `State` event with the same token."""

    token: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the engine: running requests end UNAVAILABLE."""


Command = Submit | Abort | Pause | Resume | Stage | Unstage | Pin | Unpin | Fail | Query | TakeSamples | Stop

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of one token: how likely the model found it.

    Attributes:
        logprob: Natural logarithm of its probability.
        top: (token, logarithm of probability) of the likeliest tokens, likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Delta(NamedTuple):
    """New tokens of one request, as its reader gets them. A named tuple, since that is the cheapest to make.

    Attributes:
        request_id: The request.
        index: Index of the first token in `ids`; 0, 1, 2 …, no gaps.
        ids: Token ids; the final stop token, if one ended the sequence, is the last of them.
        finish: Why the sequence ended, or None while it goes on. It is the last event of the request.
        prompt_tokens: Tokens of the prompt.
        logprobs: One for each id where asked for, else empty.
        prompt_logprobs: One for each token of the prompt but the first, in the first delta, where asked for.
        cached_tokens: Of the prompt's tokens, those that the prefix cache held; with `finish`.
    """

    request_id: str
    index: int  # type: ignore[assignment]  # hides `tuple.index`, which nobody wants of a record
    ids: tuple[int, ...]
    finish: FinishReason | None
    prompt_tokens: int
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    cached_tokens: int = 0

    def followed_by(self, later: Delta) -> Delta:
        """Returns this delta and the next one of the request as one."""
        return Delta(
            self.request_id,
            self.index,
            self.ids + later.ids,
            later.finish,
            self.prompt_tokens,
            self.logprobs + later.logprobs,
            self.prompt_logprobs + later.prompt_logprobs,
            later.cached_tokens,
        )


@dataclass(frozen=True, slots=True)
class Tokens:
    """All that one step produced: a token each of several requests, in columns, since most rows say nothing more.

    Attributes:
        request_ids: The requests.
        indexes: Indexes of the tokens in their outputs.
        ids: The tokens.
        prompt_tokens: Tokens of the prompts.
        finishes: (row, why, tokens of the prompt that the prefix cache held) of the requests that end with it.
        logprobs: (row, that of its token) where asked for.
        prompt_logprobs: (row, those of its prompt) where asked for and the token is the first.
    """

    request_ids: tuple[str, ...] = ()
    indexes: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()
    prompt_tokens: tuple[int, ...] = ()
    finishes: tuple[tuple[int, FinishReason, int], ...] = ()
    logprobs: tuple[tuple[int, Logprobs], ...] = ()
    prompt_logprobs: tuple[tuple[int, tuple[Logprobs, ...]], ...] = ()

    def deltas(self) -> list[Delta]:
        """Returns each request's part."""
        columns = zip(self.request_ids, self.indexes, zip(self.ids), repeat(None), self.prompt_tokens)
        deltas = list(starmap(Delta, columns))
        for row, finish, cached in self.finishes:
            deltas[row] = deltas[row]._replace(finish=finish, cached_tokens=cached)
        for row, logprobs in self.logprobs:
            deltas[row] = deltas[row]._replace(logprobs=(logprobs,))
        for row, prompt_logprobs in self.prompt_logprobs:
            deltas[row] = deltas[row]._replace(prompt_logprobs=prompt_logprobs)
        return deltas


@dataclass(frozen=True, slots=True)
class Failed:
    """A request ended badly; its last event.

    `status` is the name of a gRPC status code; `retry_after_s` says when trying again may work, where that is known;
    `is_tenants_limit`, that it is a `TenantLimitError`.
    """

    request_id: str
    status: str
    message: str
    retry_after_s: float | None = None
    is_tenants_limit: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """A queued request needs this version's image in host memory and the engine does not know of one."""

    version: str


@dataclass(frozen=True, slots=True)
class Moved:
    """A version changed place.

    Attributes:
        version: The version.
        place: `device`; `host` when it lost its device copy; `opened` when its image was read from the disk, checked and mapped;
            `corrupt` when that was refused.
        seconds: Time that the copy, or reading and checking, took; 0 for what lost its copy.
        reason: Why it lost it: for `room`, or to `yield` to a tenant below its share.
        rank: Largest rank of what came to the device, or was opened.
        size_bytes: Bytes of its image.
        epoch: Number of its load.
    """

    version: str
    place: Literal["device", "host", "opened", "corrupt"]
    seconds: float = 0.0
    reason: Literal["room", "yield", ""] = ""
    rank: int = 0
    size_bytes: int = 0
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Unloaded:
    """What came free of a version that was taken away with its device copy (`Unstage`); nothing of it is left.

    Attributes:
        version: The version.
        device_bytes: Bytes of the arena.
        host_bytes: Bytes of its mapped image.
        kv_bytes: Bytes of KV pages that it computed and that were kept for reuse.
        came_back: It was staged again before all was free, so its device copy stays.
        num_asked: How many `Unstage` this answers.
    """

    version: str
    device_bytes: int = 0
    host_bytes: int = 0
    kv_bytes: int = 0
    came_back: bool = False
    num_asked: int = 1


@dataclass(frozen=True, slots=True)
class NotFinite:
    """A request of this version gave logits that are not finite; that request has ended INTERNAL."""

    version: str | None
    request_id: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is up: its memory plan as printable lines, and the limits that follow from it.

    `slower` says why a slower form computes than the processor could run; empty where none does.
    """

    plan: tuple[str, ...]
    max_context: int
    vocab_size: int
    slower: str = ""


Event = Tokens | Failed | Wanted | Moved | Unloaded | NotFinite | State | Samples | Ready
