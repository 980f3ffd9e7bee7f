"""One request of the demonstration: what is asked, what came, and what is wrong with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from demo.styles import Style, markers_in
from veneer.answer import Event
from veneer.client import Client
from veneer.dataplane.v1 import generation_pb2
from veneer.errors import VeneerError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What one stream asks for.

    Attributes:
        phase: Part of the story, for the table.
        tenant: Who asks.
        prompt: What the user says.
        adapter: Name of the adapter; empty for the base.
        owner: Tenant that owns it; empty for the asking tenant.
        split_unit: Unit of a traffic split.
        max_tokens: Tokens at most.
        ignore_eos: Goes on to `max_tokens` whatever the model says.
        fallback: When the base may answer instead.
    """

    phase: str
    tenant: str
    prompt: str
    adapter: str = ""
    owner: str = ""
    split_unit: str = ""
    max_tokens: int = 32
    ignore_eos: bool = False
    fallback: generation_pb2.FallbackMode.ValueType = generation_pb2.FALLBACK_MODE_NONE


@dataclass(slots=True)
class Stream:
    """An `Ask` and what has come so far. Written by `follow` alone; times are seconds of `time.monotonic`.

    Attributes:
        ask: What is asked.
        served: What answers; None until the first token.
        text: The answer so far.
        num_tokens: Tokens so far.
        finish: How it ended; None while it runs or when it failed.
        error: Why it failed.
        start_s: When it was sent.
        first_s: When its first message came.
        end_s: When it ended.
    """

    ask: Ask
    served: generation_pb2.Served | None = None
    text: str = ""
    num_tokens: int = 0
    finish: generation_pb2.Finish | None = None
    error: VeneerError | None = None
    start_s: float = 0.0
    first_s: float = 0.0
    end_s: float = 0.0
    began: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_running(self) -> bool:
        """Whether tokens have come and more may come."""
        return self.served is not None and not self.end_s

    @property
    def time_to_first_token_s(self) -> float:
        """Seconds from the request to its first token; 0 when none came."""
        return self.first_s - self.start_s if self.served is not None else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second after the first one; 0 when there are too few."""
        end_s = self.end_s or time.monotonic()
        return (self.num_tokens - 1) / (end_s - self.first_s) if self.num_tokens > 1 and end_s > self.first_s else 0.0


async def follow(client: Client, stream: Stream, *, on_end: Callable[[Stream], None] | None = None) -> None:
    """Sends the request and reads the answer into `stream` to its end; a refusal is kept in `stream.error`."""
    ask = stream.ask
    stream.start_s = time.monotonic()
    events = client.generate(
        [generation_pb2.ChatMessage(role="user", content=ask.prompt)],
        adapter=ask.adapter,
        owner=ask.owner,
        split_unit=ask.split_unit,
        fallback=ask.fallback,
        sampling=generation_pb2.SamplingParams(temperature=0.0, max_tokens=ask.max_tokens, ignore_eos=ask.ignore_eos),
    )
    try:
        async for event in events:
            _take(stream, event)
    except VeneerError as error:
        stream.error = error
    finally:
        stream.end_s = time.monotonic()
        stream.began.set()
    if on_end is not None:
        on_end(stream)


def _take(stream: Stream, event: Event) -> None:
    if isinstance(event, generation_pb2.Served):
        stream.served = event
        stream.first_s = time.monotonic()
        stream.began.set()
    elif isinstance(event, generation_pb2.Chunk):
        stream.text += event.text
        stream.num_tokens += len(event.ids)
    elif isinstance(event, generation_pb2.Finish):
        stream.finish = event


@dataclass(frozen=True, slots=True)
class Expected:
    """What the streams are judged by.

    Attributes:
        base_digest: Digest of the base.
        styles: What was published under each version's digest.
    """

    base_digest: str
    styles: Mapping[str, Style]


def faults_of(stream: Stream, expected: Expected) -> list[str]:
    """Lists what is wrong with an answered stream.

    An adapter's stream must show the marker of the version that the service states, and no other; a base stream none.
    """
    ask, served = stream.ask, stream.served
    name = f"{ask.phase}: {ask.tenant} asking {ask.adapter or 'the base'} {ask.prompt!r}"
    if stream.error is not None:
        return [f"{name}: {stream.error.status}: {stream.error.message}"]
    if served is None or stream.finish is None:
        return [f"{name}: ended without a finish"]
    faults = []
    if served.base_digest != expected.base_digest:
        faults.append("another base digest is stated")
    style = expected.styles.get(served.version)
    if served.version and (style is None or style.adapter != ask.adapter):
        faults.append(f"the stated version {served.version[:12]} is not one of {ask.adapter or 'the base'}")
    if ask.adapter and not served.version and not served.fallback:
        faults.append("the base answered and did not say so")
    if served.version and (served.owner, served.adapter) != (ask.owner or ask.tenant, ask.adapter):
        faults.append(f"{served.owner}/{served.adapter} is stated")
    markers = frozenset({style.marker} if style else ())
    if (found := markers_in(stream.text)) != markers:
        faults.append(f"shows {_names(found)} instead of {_names(markers)}: {stream.text[:60]!r}")
    if stream.num_tokens > ask.max_tokens or stream.num_tokens == 0:
        faults.append(f"{stream.num_tokens} tokens came, {ask.max_tokens} were asked for")
    return [f"{name}: {fault}" for fault in faults]


def _names(markers: Iterable[str]) -> str:
    return " and ".join(sorted(markers)) or "no marker"
