"""The engine's message interface: commands into it, events out of it.

The engine runs in a process of its own; these records are all that passes between it and the serving process. They are plain
frozen dataclasses of integers, floats, strings and tuples, so that one codec (JSON lines, see `encode` and `decode`) carries them
and the same interface works inside one process for tests. Times are durations, never clock readings of the other process.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal


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
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Runs one request.

    Attributes:
        request_id: Unique among running requests.
        tenant: Tenant of the caller, for fair shares and cache keys.
        prompt: Token ids, at least one; len(prompt) + 1 <= the context limit.
        sampling: How tokens are chosen.
        version: Digest of the adapter version, or None for the base. Bound here for the request's whole life.
        deadline_s: Seconds from receipt until the request must have ended; None for no limit.
        weight: Share of the tenant relative to others.
        cache_salt: Secret of the caller's tenant, hex, part of every cache key; without one nothing of the request is kept for
            reuse, and nothing reused.
    """

    request_id: str
    tenant: str
    prompt: tuple[int, ...]
    sampling: Sampling
    version: str | None = None
    deadline_s: float | None = None
    weight: int = 1
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends a request; all it holds is free within one step. Unknown or finished ids are ignored. No event follows."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stage:
    """Tells the engine that a version's image lies in host memory at `path` (see `dataplane.lora.image`). Idempotent."""

    version: str
    path: str


@dataclass(frozen=True, slots=True)
class Unstage:
    """Takes a version away (retired, quarantined, host copy evicted).

    `drop_device` gives out no more leases and frees its device copy once none is held.
    """

    version: str
    drop_device: bool = False


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


Command = Submit | Abort | Stage | Unstage | Fail | Query | Stop

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one request.

    Attributes:
        request_id: The request.
        index: Index of the first token in `ids`; 0, 1, 2 …, no gaps.
        ids: Token ids; the final stop token, if one ended the sequence, is the last of them.
        finish: Why the sequence ended, or None while it goes on. It is the last event of the request.
        prompt_tokens: Tokens of the prompt.
    """

    request_id: str
    index: int
    ids: tuple[int, ...]
    finish: FinishReason | None
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """All that one step produced."""

    deltas: tuple[Delta, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """A request ended badly; its last event.

    `status` is the name of a gRPC status code; `retry_after_s` says when trying again may work, where that is known.
    """

    request_id: str
    status: str
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """A queued request needs this version's image in host memory and the engine does not know of one."""

    version: str


@dataclass(frozen=True, slots=True)
class Moved:
    """A version changed place: on the device, back to host only (evicted), or its image was refused as corrupt.

    `seconds` is the time that the copy took, 0 for evictions.
    """

    version: str
    place: Literal["device", "host", "corrupt"]
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class NotFinite:
    """A request of this version gave logits that are not finite; that request has ended INTERNAL."""

    version: str | None
    request_id: str


@dataclass(frozen=True, slots=True)
class Holding:
    """One version that the engine holds; see `veneer.dataplane.v1.ResidentVersion`."""

    version: str
    place: Literal["host", "loading", "device"]
    rank: int
    size_bytes: int
    leases: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Counters of the engine; names as in `veneer.dataplane.v1.EngineState`.

    `kv_pages_kept` are free pages whose contents can be shared; `prefix_queries` and `prefix_hits` count prompt tokens that were
    looked up, and found, in the prefix cache.
    """

    token: int
    running: int
    waiting: int
    kv_pages_used: int
    kv_pages_total: int
    arena_bytes_used: int
    arena_bytes_total: int
    leases: int
    steps: int
    max_adapters_in_step: int
    max_rows_in_step: int
    mixed_steps: int
    generated_tokens: int
    device_hits: int
    host_hits: int
    store_loads: int
    evictions: int
    holdings: tuple[Holding, ...]
    kv_pages_kept: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is up: its memory plan as printable lines, and the limits that follow from it."""

    plan: tuple[str, ...]
    max_context: int
    vocab_size: int


Event = Tokens | Failed | Wanted | Moved | NotFinite | State | Ready

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (Submit, Abort, Stage, Unstage, Fail, Query, Stop, Tokens, Failed, Wanted, Moved, NotFinite, State, Ready)
}


def encode(message: Command | Event) -> bytes:
    """Returns one line of JSON, newline included."""
    return json.dumps([type(message).__name__, message], separators=(",", ":"), default=_fields).encode() + b"\n"


def decode(line: bytes) -> Command | Event:
    """Reads a line that `encode` wrote.

    Raises:
        ValueError: The line is no message.
    """
    try:
        kind, fields = json.loads(line)
        return _build(_KINDS[kind], fields)  # type: ignore[no-any-return]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError("not an engine message") from error


def _fields(record: Any) -> dict[str, Any]:
    """Returns a dataclass's fields without copying them, as `dataclasses.asdict` would: a prompt may have 100,000 tokens."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _build(kind: type[Any], fields: dict[str, Any]) -> Any:
    if kind is Submit:
        return Submit(**{**fields, "prompt": tuple(fields["prompt"]), "sampling": _sampling(fields["sampling"])})
    if kind is Tokens:
        return Tokens(tuple(Delta(**{**delta, "ids": tuple(delta["ids"])}) for delta in fields["deltas"]))
    if kind is State:
        return State(**{**fields, "holdings": tuple(Holding(**holding) for holding in fields["holdings"])})
    if kind is Ready:
        return Ready(**{**fields, "plan": tuple(fields["plan"])})
    return kind(**fields)


def _sampling(fields: dict[str, Any]) -> Sampling:
    return Sampling(**{**fields, "stop_token_ids": tuple(fields["stop_token_ids"])})
