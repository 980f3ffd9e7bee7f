"""How the demonstration judges an answer: a leak, a wrong statement and a broken stream are faults."""

from __future__ import annotations

import pytest

from demo.stream import Ask, Expected, Stream, faults_of
from demo.styles import HAIKU, PIRATE, PIRATE_NEXT
from veneer.dataplane.v1 import generation_pb2
from veneer.errors import UnavailableError

BASE = "b" * 64
FIRST, SECOND, POEM = "1" * 64, "2" * 64, "3" * 64
EXPECTED = Expected(BASE, {FIRST: PIRATE, SECOND: PIRATE_NEXT, POEM: HAIKU})


def answered(text: str, *, adapter: str = "pirate", version: str = FIRST, num_tokens: int = 9, **stated: object) -> Stream:
    facts: dict[str, object] = {"base_digest": BASE, "version": version}
    if version:
        facts |= {"owner": "harbor", "adapter": adapter}
    served = generation_pb2.Served(**{**facts, **stated})  # type: ignore[arg-type]
    stream = Stream(Ask(phase="burst", tenant="harbor", adapter=adapter, prompt="Hello"))
    stream.served, stream.text, stream.num_tokens = served, text, num_tokens
    stream.finish = generation_pb2.Finish(reason=generation_pb2.FINISH_REASON_STOP)
    return stream


@pytest.mark.parametrize(
    "stream",
    [
        answered("[pirate v1] Arr"),
        answered("[pirate v2] By order", version=SECOND),
        answered("A volcano is hot.", adapter="", version=""),
        answered("A volcano is hot.", adapter="nobody", version="", fallback=True),
    ],
    ids=["first version", "second version", "base", "fallback"],
)
def test_an_answer_with_its_own_marker_has_no_fault(stream: Stream) -> None:
    assert faults_of(stream, EXPECTED) == []


@pytest.mark.parametrize(
    ("stream", "fault"),
    [
        (answered("Hello"), "no marker instead of"),
        (answered("[haiku] Hello"), "shows [haiku]"),
        (answered("[pirate v1] Arr [haiku]"), "[haiku] and [pirate v1] instead of"),
        (answered("[pirate v2] By order"), "shows [pirate v2]"),
        (answered("[pirate v1] Arr", version=SECOND), "instead of [pirate v2]"),
        (answered("[haiku] Hello", adapter="", version=""), "instead of no marker"),
        (answered("[haiku] Hello", version=POEM), "is not one of pirate"),
        (answered("[pirate v1] Arr", version="9" * 64), "is not one of pirate"),
        (answered("Hello", version=""), "did not say so"),
        (answered("[pirate v1] Arr", base_digest="c" * 64), "another base digest"),
        (answered("[pirate v1] Arr", owner="garden"), "garden/pirate is stated"),
        (answered("[pirate v1] Arr", num_tokens=33), "33 tokens came"),
    ],
)
def test_a_leak_or_a_wrong_statement_is_a_fault(stream: Stream, fault: str) -> None:
    assert any(fault in found for found in faults_of(stream, EXPECTED))


def test_a_stream_without_a_finish_is_a_fault() -> None:
    stream = answered("[pirate v1] Arr")
    stream.finish = None
    assert "without a finish" in faults_of(stream, EXPECTED)[0]


def test_a_refused_stream_is_a_fault_with_its_status() -> None:
    stream = Stream(Ask(phase="burst", tenant="harbor", prompt="Hello"))
    stream.error = UnavailableError("the engine restarts")
    assert faults_of(stream, EXPECTED) == ["burst: harbor asking the base 'Hello': UNAVAILABLE: the engine restarts"]
