"""What is kept of calls: metrics, facts for their log lines, and the lines of those that are logged together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_LOG = logging.getLogger(__name__)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_TOGETHER_S = 1.0
_TRACE_HEADERS = ("traceparent", "tracestate")
_facts: ContextVar[dict[str, object] | None] = ContextVar("facts", default=None)


def collect_facts() -> dict[str, object]:
    """Begins to collect the facts of the call that runs in this task; returns where they will be. For the interceptor."""
    facts: dict[str, object] = {}
    _facts.set(facts)
    return facts


def note(**facts: object) -> None:
    """Adds facts to the log line of the call that runs in this task, if one does; later ones replace earlier ones.

    Identifiers, names and numbers only: never a prompt, a text, a token, a key.
    """
    collected = _facts.get()
    if collected is not None:
        collected.update(facts)


def trace_facts(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, object]:
    """Returns `trace_id` and `span_id` in W3C's form: of OpenTelemetry's span if one is active, else of the call's `traceparent`.

    Args:
        metadata: The headers of the call. Without a valid `traceparent` there is no fact.
    """
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        headers = {name: value for name, value in metadata if name in _TRACE_HEADERS and isinstance(value, str)}
        if not headers:
            return {}
        context = trace.get_current_span(TraceContextTextMapPropagator().extract(headers)).get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": trace.format_trace_id(context.trace_id), "span_id": trace.format_span_id(context.span_id)}


class MethodMetrics:
    """Counts the calls of one method on one listener. Labels are looked up once: that takes longer than to count."""

    def __init__(self, running: Gauge, ended: Callable[[str], Counter], seconds: Histogram) -> None:
        self._running = running
        self._find_ended = ended
        self._ended: dict[str, Counter] = {}
        self._seconds = seconds

    def started(self) -> None:
        """A call begins."""
        self._running.inc()

    def ended(self, code: str, *, seconds: float) -> None:
        """A call that had begun is over."""
        ended = self._ended.get(code)
        if ended is None:
            ended = self._ended[code] = self._find_ended(code)
        self._running.dec()
        ended.inc()
        self._seconds.observe(seconds)


class CallMetrics:
    """Counts calls by method and code. Only methods that are served get a label, so that callers cannot make new ones."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("listener", "method")
        self._ended = Counter("veneer_grpc_calls", "Calls that ended.", (*labels, "code"), registry=registry)
        self._seconds = Histogram("veneer_grpc_call_seconds", "Time of calls.", labels, registry=registry, buckets=_SECONDS)
        self._running = Gauge("veneer_grpc_calls_running", "Calls that run.", labels, registry=registry)

    def of(self, listener: str, method: str) -> MethodMetrics:
        """The part of one method."""
        names = (listener, method)
        ended = partial(self._ended.labels, *names)
        return MethodMetrics(self._running.labels(*names), ended, self._seconds.labels(*names))


@dataclass(slots=True)
class _Calls:
    number: int = 0
    seconds: float = 0.0


class CallSummary:
    """Calls of which there are many and that went well: a line a second for each method and key. Owned by one event loop."""

    def __init__(self, listener: str) -> None:
        self._listener = listener
        self._calls: dict[tuple[str, str], _Calls] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, method: str, key_id: str, *, seconds: float) -> None:
        """A call ended."""
        calls = self._calls.get((method, key_id))
        if calls is None:
            calls = self._calls[method, key_id] = _Calls()
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(_TOGETHER_S, self.flush)
        calls.number += 1
        calls.seconds += seconds

    def flush(self) -> None:
        """Logs what was added since the last time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ended, self._calls = self._calls, {}
        for (method, key_id), calls in ended.items():
            facts = {"method": method, "listener": self._listener, "code": "OK", "key_id": key_id}
            _LOG.info("calls answered from memory", extra={**facts, "calls": calls.number, "seconds": round(calls.seconds, 6)})
