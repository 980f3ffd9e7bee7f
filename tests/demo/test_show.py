"""What the demonstration shows must be readable on a narrow terminal and in a log."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from demo.conservation import Holdings
from demo.show import Screen
from demo.stream import Ask, Stream
from veneer.dataplane.v1 import admin_pb2, generation_pb2
from veneer.errors import NotFoundError


def a_stream() -> Stream:
    stream = Stream(Ask(phase="running", tenant="chambers", adapter="counsel", prompt="Hello"))
    stream.served = generation_pb2.Served(version="ab" * 32, version_number=1, arm=1, sticky=True)
    stream.text, stream.num_tokens = "[counsel] The forest\nis a natural ecosystem.", 11
    stream.start_s, stream.first_s, stream.end_s = 1.0, 1.25, 3.25
    return stream


def a_refusal() -> Stream:
    stream = Stream(Ask(phase="foreign", tenant="garden", owner="harbor", adapter="pirate", prompt="Hello"))
    stream.error, stream.end_s = NotFoundError("no such adapter, alias or version"), 1.0
    return stream


@pytest.mark.parametrize("width", [80, 140])
def test_the_closing_table_keeps_every_column_at_any_width(width: int) -> None:
    output = io.StringIO()
    Screen(Console(file=output, width=width)).closing_table([a_stream(), a_refusal()])
    _, title, header, answered, refused = output.getvalue().splitlines()
    assert title.split() == ["Requests"]
    assert header.split()[:9] == ["#", "part", "tenant", "adapter", "version", "arm", "fallback", "TTFT", "tokens/s"]
    assert answered.split()[:10] == ["1", "running", "chambers", "counsel", "v1", "abababab", "1", "250", "ms", "5.0"]
    assert "[counse" in answered
    assert refused.split()[:5] == ["2", "foreign", "garden", "pirate", "refused:"[: len(refused.split()[4])]]


def test_the_engine_table_counts_hits_of_every_tier() -> None:
    output = io.StringIO()
    residency = admin_pb2.GetResidencyResponse(device_hits=6, host_hits=2, disk_hits=1, store_loads=1, mean_store_load_s=0.25)
    residency.engine.max_adapters_in_step = 3
    start = Holdings(requests=0, kv_pages=0, leases=0, arena_bytes=4096, tasks=27)
    Screen(Console(file=output, width=140)).engine_table(residency, start=start, end=start)
    shown = " ".join(output.getvalue().split())
    assert "found on the device 6 of 10 requests (60%)" in shown
    assert "in host memory 2 of 10 requests (20%)" in shown
    assert "on the disk 1 of 10 requests (10%)" in shown
    assert "from the store 1 of 10 requests (10%)" in shown
    assert "store to disk 250 ms" in shown
    assert "arena bytes in use 4096 (at the start 4096)" in shown


def test_without_a_terminal_an_ended_stream_is_one_line() -> None:
    output = io.StringIO()
    with Screen(Console(file=output, width=40)).streams([a_stream()]) as on_end:
        on_end(a_stream())
    (line,) = output.getvalue().splitlines()
    assert line.split()[:6] == ["chambers", "counsel", "v1", "abababab", "11", "tokens"]
    assert line.endswith("[counsel] The forest is a natural ecosystem.")


def test_a_terminal_sees_the_marker_and_the_end_of_a_long_answer() -> None:
    output = io.StringIO()
    stream = a_stream()
    stream.text = "[counsel] " + "word " * 100 + "end"
    with Screen(Console(file=output, width=80, force_terminal=True)).streams([stream]):
        pass
    assert "[counsel] wo…" in output.getvalue()
    assert "word end" in output.getvalue()


def test_the_verdict_lists_every_fault() -> None:
    output = io.StringIO()
    Screen(Console(file=output, width=80)).verdict(["one [red] fault", "another"], checked="all well")
    assert [line for line in output.getvalue().splitlines() if line] == ["✗ one [red] fault", "✗ another"]
