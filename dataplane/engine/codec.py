"""The messages of the engine as lines of JSON, between its process and the serving process."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from dataplane.engine.messages import (
    Abort,
    Command,
    Event,
    Fail,
    Failed,
    Holding,
    Logprobs,
    Moved,
    NotFinite,
    Pause,
    Pin,
    Query,
    Ready,
    Resume,
    Sampling,
    Stage,
    State,
    Stop,
    Submit,
    Tokens,
    Unloaded,
    Unpin,
    Unstage,
    Wanted,
)
from dataplane.engine.samples import Samples, TakeSamples

_COMMANDS = (Submit, Abort, Pause, Resume, Stage, Unstage, Pin, Unpin, Fail, Query, TakeSamples, Stop)
_EVENTS = (Tokens, Failed, Wanted, Moved, Unloaded, NotFinite, State, Samples, Ready)
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (*_COMMANDS, *_EVENTS)}


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
        return _tokens(**fields)
    if kind is State:
        holdings = tuple(Holding(**holding) for holding in fields["holdings"])
        seconds = tuple((str(part), float(number)) for part, number in fields["seconds"])
        counts = {name: tuple(fields[name]) for name in ("queue_counts", "rank_row_counts")}
        return State(**{**fields, **counts, "holdings": holdings, "seconds": seconds})
    if kind is TakeSamples:
        return TakeSamples(**{**fields, "places": tuple((int(layer), int(index)) for layer, index in fields["places"])})
    if kind is Samples:
        return Samples(**{**fields, "values": tuple(map(tuple, fields["values"]))})
    if kind is Ready:
        return Ready(**{**fields, "plan": tuple(fields["plan"])})
    return kind(**fields)


def _sampling(fields: dict[str, Any]) -> Sampling:
    bias = tuple((int(token), float(number)) for token, number in fields.get("logit_bias", ()))
    words = tuple(tuple(word) for word in fields.get("bad_words", ()))
    return Sampling(**{**fields, "stop_token_ids": tuple(fields["stop_token_ids"]), "logit_bias": bias, "bad_words": words})


def _tokens(*, finishes: list[Any], logprobs: list[Any], prompt_logprobs: list[Any], **columns: list[Any]) -> Tokens:
    return Tokens(
        **{name: tuple(column) for name, column in columns.items()},
        finishes=tuple((row, finish, cached) for row, finish, cached in finishes),
        logprobs=tuple((row, _logprobs(fields)) for row, fields in logprobs),
        prompt_logprobs=tuple((row, tuple(map(_logprobs, several))) for row, several in prompt_logprobs),
    )


def _logprobs(fields: dict[str, Any]) -> Logprobs:
    return Logprobs(fields["logprob"], tuple((int(token), float(number)) for token, number in fields["top"]))
