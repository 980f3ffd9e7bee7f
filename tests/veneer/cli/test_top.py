"""`veneer top`: what it makes of what data planes say, and that it draws it."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from tests.veneer.cli.conftest import Run
from veneer.cli.top import Sample, draw, overview
from veneer.dataplane.v1 import admin_pb2 as pb
from veneer.dataplane.v1 import generation_pb2
from veneer.local.stack import LocalStack
from veneer.sync_client import SyncClient

A, B = "a" * 64, "b" * 64
_COMMAND = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from veneer.cli import main; main()"


def said(
    *, steps: int, tokens: int, device: int, store: int, versions: tuple[pb.ResidentVersion, ...] = ()
) -> pb.GetResidencyResponse:
    engine = pb.EngineState(running=2, waiting=1, steps=steps, generated_tokens=tokens, kv_pages_used=3, kv_pages_total=9)
    tenants = [pb.TenantStreams(tenant="acme", streams=2), pb.TenantStreams(tenant="rival", streams=1)]
    return pb.GetResidencyResponse(
        base_digest="f" * 64, engine=engine, device_hits=device, store_loads=store, tenants=tenants, versions=versions
    )


def held(version: str, tier: pb.Tier.ValueType, *, leases: int = 0, uses: int = 0, adapter: str = "") -> pb.ResidentVersion:
    name = {"owner": "acme", "adapter": adapter, "number": 3} if adapter else {}
    return pb.ResidentVersion(version=version, tier=tier, leases=leases, uses=uses, **name)


def test_rates_are_those_since_the_look_before() -> None:
    before = [Sample("one:1", 10.0, said(steps=100, tokens=500, device=90, store=10))]
    now = [Sample("one:1", 12.0, said(steps=120, tokens=600, device=91, store=13))]
    [replica] = overview(now, before)["replicas"]
    assert (replica["tokens_per_s"], replica["steps_per_s"]) == (50.0, 10.0)
    assert replica["hit_rates"] == {"device": 0.25, "host": 0.0, "disk": 0.0, "store": 0.75}
    [replica] = overview(now)["replicas"]
    assert replica["tokens_per_s"] is None
    assert replica["hit_rates"]["device"] == 91 / 104


def test_a_data_plane_that_was_started_again_counts_from_nothing() -> None:
    before = [Sample("one:1", 10.0, said(steps=100, tokens=500, device=90, store=10))]
    [replica] = overview([Sample("one:1", 12.0, said(steps=5, tokens=6, device=3, store=1))], before)["replicas"]
    assert (replica["tokens_per_s"], replica["hit_rates"]["device"]) == (None, 0.75)


def test_tenants_and_versions_are_those_of_all_data_planes() -> None:
    first = said(steps=1, tokens=1, device=0, store=0, versions=(held(A, pb.TIER_DEVICE, uses=5), held(B, pb.TIER_HOST, uses=9)))
    second = said(steps=1, tokens=1, device=0, store=0, versions=(held(A, pb.TIER_DEVICE, leases=2, uses=1, adapter="tone"),))
    view = overview(
        [Sample("one:1", 1.0, first), Sample("two:1", 1.0, second), Sample("three:1", 1.0, error="UNAVAILABLE: away")]
    )
    assert view["tenants"] == [{"tenant": "acme", "streams": 4}, {"tenant": "rival", "streams": 2}]
    assert view["versions"] == [
        {"version": A, "name": "acme/tone v3", "device_copies": 2, "leases": 2, "uses": 6},
        {"version": B, "name": "", "device_copies": 0, "leases": 0, "uses": 9},
    ]
    assert [one["error"] for one in view["replicas"]] == ["", "", "UNAVAILABLE: away"]
    assert view["replicas"][0]["versions"] == {"device": 1, "loading": 0, "host": 1, "disk": 0}
    assert view["replicas"][0]["hit_rates"]["device"] is None


def test_every_rate_of_hits_stands_under_its_own_name() -> None:
    found = said(steps=1, tokens=1, device=1, store=4, versions=(held(A, pb.TIER_DEVICE, adapter="tone"),))
    found.host_hits, found.disk_hits = 2, 3
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(draw(overview([Sample("one:1", 1.0, found)])))
    lines = console.export_text().splitlines()
    names = next(line for line in lines if "hit:device" in line).replace("┃", " ").split()
    values = lines[next(place for place, line in enumerate(lines) if "hit:device" in line) + 2].replace("│", " ").split()
    assert len(names) == len(values)
    rates = {name: value for name, value in zip(names, values, strict=True) if name.startswith("hit:")}
    assert rates == {"hit:device": "10%", "hit:host": "20%", "hit:disk": "30%", "hit:store": "40%"}
    assert any("acme/tone v3" in line for line in lines)


def test_nothing_that_was_said_steers_the_terminal() -> None:
    found = said(steps=1, tokens=1, device=0, store=0)
    found.tenants[0].tenant = "\x1b[2Jacme"
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(draw(overview([Sample("one:1", 1.0, found), Sample("two:1", 1.0, error="UNAVAILABLE: \x1b[2J")])))
    text = console.export_text()
    assert "\x1b" not in text
    assert "[2Jacme" in text


def test_without_a_terminal_it_says_what_to_do(run: Run, tmp_path: Path) -> None:
    outcome = run("--state", tmp_path, "--operator-key", "vnr_" + "k" * 43, "top")
    assert outcome.status == 1
    assert "--once or --json" in outcome.err


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_it_shows_running_streams_by_tenant_and_data_planes_that_are_away(run: Run, stack: LocalStack) -> None:
    state = stack.state
    sampling = generation_pb2.SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            list(client.stream_complete("once upon a time", sampling=sampling))

    with SyncClient(control=state.control, data=state.data, key=state.tenant_key) as client, ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        try:
            views = (json.loads(run("--state", stack.folder, "top", "--once", "--json").out) for _ in range(100))
            view = next(one for one in views if state.tenant in {tenant["tenant"] for tenant in one["tenants"]})
        finally:
            done.set()
        for one in asking:
            one.result(60)
    assert view["replicas"][0]["address"] == state.data_operators
    addresses = f"{state.data_operators},127.0.0.1:1"
    outcome = run("--operator-key", state.operator_key, "--data-operators", addresses, "top", "--once")
    assert outcome.status == 1
    assert "UNAVAILABLE" in outcome.out
    assert state.base_digest[:12] in outcome.out
    alone = run("--operator-key", state.operator_key, "--data-operators", addresses, "node", "residency")
    assert (alone.status, "name it alone" in alone.err) == (1, True)


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_it_draws_on_a_terminal_until_ctrl_c(stack: LocalStack) -> None:
    ours, theirs = pty.openpty()
    command = [
        sys.executable,
        "-c",
        _COMMAND,
        "--state",
        str(stack.folder),
        "top",
        "--interval",
        "0.2",
    ]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "50"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True)
    os.close(theirs)
    try:
        seen, end_s = "", time.monotonic() + 60
        while seen.count("replicas") < 2 and time.monotonic() < end_s:
            if select.select([ours], [], [], 1.0)[0]:
                seen += os.read(ours, 65536).decode(errors="replace")
        assert seen.count("replicas") >= 2, seen[-2000:]
        assert stack.state.data_operators in seen
        process.send_signal(signal.SIGINT)
        while process.poll() is None and time.monotonic() < end_s:
            if select.select([ours], [], [], 0.1)[0]:
                with suppress(OSError):  # the other side is closed when the process ends
                    os.read(ours, 65536)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
