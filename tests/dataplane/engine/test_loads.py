"""Adapters of running requests: each row has its own, and loads go on beside the steps."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dataplane.engine.client import EngineClient
from dataplane.engine.messages import Moved, Submit
from tests.dataplane.engine.serving import PROMPTS, collect, collect_deltas, idle, request, until
from veneer.errors import (
    NotFoundError,
)


@pytest.mark.parametrize("stepping", ["serial", "overlapped"])
async def test_a_mixed_batch_gives_each_row_its_own_adapter(started: Any, plain: Any, adapters: Any, stepping: str) -> None:
    client: EngineClient = await started(stepping=stepping)
    moved: list[Moved] = []
    client.on_moved = moved.append
    client.on_wanted = lambda wanted: client.stage(wanted.version, adapters[wanted.version][0])
    versions = [None, "v1", "v2", "v3", "v1", None, "v2"]
    jobs = [request(str(i), PROMPTS[i % 5], max_tokens=24, version=version) for i, version in enumerate(versions)]
    outputs = await asyncio.gather(*(collect(client, job) for job in jobs))
    for i, version in enumerate(versions):
        model = plain if version is None else adapters[version][1]
        assert outputs[i] == model.greedy(PROMPTS[i % 5], 24), version
    state = await idle(client)
    assert {(item.version, item.place) for item in moved} == {
        (version, place) for version in ("v1", "v2", "v3") for place in ("opened", "device")
    }
    assert state.max_adapters_in_step >= 2
    assert (state.store_loads, state.device_hits) == (5, 0)
    assert outputs[1] != plain.greedy(PROMPTS[1], 24)


async def test_more_adapters_than_slots_take_turns(started: Any, adapters: Any) -> None:
    client: EngineClient = await started(max_slots=1)
    for version, (path, _) in adapters.items():
        client.stage(version, path)
    jobs = [request(f"{version}{i}", [5, 6, 7], version=version) for i in range(3) for version in adapters]
    outputs = await asyncio.gather(*(collect(client, job) for job in jobs))
    for job, output in zip(jobs, outputs, strict=True):
        assert output == adapters[job.version][1].greedy([5, 6, 7], 8)
    state = await idle(client)
    assert state.evictions >= 2


async def test_a_version_that_was_evicted_and_is_loaded_again_gives_the_same_bits(started: Any, adapters: Any) -> None:
    client: EngineClient = await started(max_slots=2)
    for version, (path, _) in adapters.items():
        client.stage(version, path)

    async def bits(name: str, version: str) -> list[Any]:
        job = request(name, [5, 6, 7], version=version)
        job = replace(job, sampling=replace(job.sampling, logprobs=4, prompt_logprobs=4))
        deltas = await collect_deltas(client, job)
        return [one for delta in deltas for one in (*delta.prompt_logprobs, *delta.logprobs)]

    before = await bits("before", "v1")
    for version in ("v3", "v2", "v3", "v2"):
        await bits(f"other {version}", version)
    assert "v1" not in {one.version for one in (await idle(client)).holdings if one.place == "device"}
    assert await bits("after", "v1") == before
    assert await bits("beside", "v2") != before
    epochs = {one.version: one.epoch for one in (await idle(client)).holdings}
    assert epochs["v1"] > epochs["v3"], "it was loaded anew"


async def test_a_flood_of_adapters_keeps_no_other_tenant_off_the_device_and_loses_no_token(
    started: Any, plain: Any, adapters: Any
) -> None:
    client: EngineClient = await started(max_slots=2, max_sequences=16, quantum_tokens=16)
    for version, (path, _) in adapters.items():
        client.stage(version, path)
    floods = [request(f"x{i}", [i, 2, 3], max_tokens=60, version=f"v{1 + i % 2}", tenant="x") for i in range(16)]
    ended: list[str] = []

    async def run(job: Submit) -> list[int]:
        output = await collect(client, job)
        ended.append(job.tenant)
        return output

    running = [asyncio.create_task(run(job)) for job in floods]
    await until(client, lambda state: state.leases >= 6)
    mine = await run(request("v", [9, 8, 7], max_tokens=4, version="v3", tenant="v"))
    assert ended.index("v") < 8, "it waited for no more than a few steps and a load"
    assert mine == adapters["v3"][1].greedy([9, 8, 7], 4)
    outputs = await asyncio.gather(*running)
    for job, output in zip(floods, outputs, strict=True):
        assert output == adapters[job.version][1].greedy(list(job.prompt), 60)
    state = await idle(client)
    assert state.evictions >= 1


async def test_a_corrupt_image_is_reported_and_a_good_copy_helps(started: Any, adapters: Any, tmp_path: Path) -> None:
    client: EngineClient = await started()
    bad = bytearray(adapters["v1"][0].read_bytes())
    bad[-5] ^= 1
    (tmp_path / "bad").write_bytes(bad)
    moved: list[Moved] = []
    sent: list[Path] = []

    def send(_: object) -> None:
        sent.append(adapters["v1"][0] if sent else tmp_path / "bad")
        client.stage("v1", sent[-1])

    client.on_moved, client.on_wanted = moved.append, send
    assert await collect(client, request("a", [5, 6], version="v1")) == adapters["v1"][1].greedy([5, 6], 8)
    assert [item.place for item in moved] == ["corrupt", "opened", "device"]
    assert len(sent) == 2


async def test_a_version_that_cannot_be_had_ends_its_requests_with_the_given_status(started: Any) -> None:
    client: EngineClient = await started()
    client.on_wanted = lambda wanted: client.fail(wanted.version, status="NOT_FOUND", message="gone")
    with pytest.raises(NotFoundError, match="gone"):
        await collect(client, request("a", [1], version="nowhere"))
    await idle(client)


class Gate:
    """Holds the thread that copies images to the device at the start of a copy."""

    def __init__(self, client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
        arena = client._link._engine._runner.arena  # type: ignore[attr-defined]
        copy = arena.copy
        self.entered, self._is_open = threading.Event(), threading.Event()

        def held(*args: Any) -> None:
            self.entered.set()
            assert self._is_open.wait(60)
            copy(*args)

        monkeypatch.setattr(arena, "copy", held)

    async def wait(self) -> None:
        """Returns once a copy has begun."""
        assert await asyncio.to_thread(self.entered.wait, 60)

    def open(self) -> None:
        """Lets copies go on."""
        self._is_open.set()

    def shut(self) -> None:
        """Holds the next copy."""
        self.entered.clear()
        self._is_open.clear()


@pytest.mark.parametrize("stepping", ["serial", "overlapped"])
async def test_no_step_waits_for_a_load_that_none_of_its_rows_uses(
    started: Any, plain: Any, adapters: Any, stepping: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client: EngineClient = await started(stepping=stepping)
    client.stage("v1", adapters["v1"][0])
    await collect(client, request("warm", [3], version="v1"))
    gate = Gate(client, monkeypatch)
    client.stage("v2", adapters["v2"][0])
    cold = asyncio.create_task(collect(client, request("cold", PROMPTS[2], version="v2")))
    await gate.wait()
    versions = [None, "v1", None, "v1", None]
    jobs = [request(str(i), PROMPTS[i], max_tokens=30, version=version) for i, version in enumerate(versions)]
    async with asyncio.timeout(60):
        outputs = await asyncio.gather(*(collect(client, job) for job in jobs))
    assert not cold.done(), "the load lasts until the gate is opened"
    for version, prompt, output in zip(versions, PROMPTS, outputs, strict=True):
        assert output == (plain if version is None else adapters[version][1]).greedy(prompt, 30)
    gate.open()
    assert await cold == adapters["v2"][1].greedy(PROMPTS[2], 8)
    await idle(client)


@pytest.mark.parametrize("stepping", ["serial", "overlapped"])
async def test_a_load_that_begins_and_ends_among_running_requests_changes_none_of_their_tokens(
    started: Any, plain: Any, adapters: Any, stepping: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client: EngineClient = await started(stepping=stepping, max_slots=2)
    client.stage("v1", adapters["v1"][0])
    neighbours = [request(f"n{i}", PROMPTS[i], max_tokens=150, version=(None, "v1")[i % 2]) for i in range(4)]
    streams = [client.submit(job) for job in neighbours]
    outputs = [list((await anext(stream)).ids) for stream in streams]
    gate = Gate(client, monkeypatch)
    for round_, version in enumerate(["v2", "v3", "v2", "v3"]):
        gate.shut()
        client.stage(version, adapters[version][0])
        cold = asyncio.create_task(collect(client, request(f"cold{round_}", [5, round_], max_tokens=3, version=version)))
        await gate.wait()
        for stream, output in zip(streams, outputs, strict=True):
            for _ in range(4):
                delta = await anext(stream)
                assert delta.index == len(output), "each token comes once and in its order"
                output += delta.ids
        assert not cold.done(), "those came while the load was held"
        gate.open()
        assert await cold == adapters[version][1].greedy([5, round_], 3)
    for job, stream, output in zip(neighbours, streams, outputs, strict=True):
        async for delta in stream:
            assert delta.index == len(output)
            output += delta.ids
        assert output == (plain if job.version is None else adapters[job.version][1]).greedy(list(job.prompt), 150)
    assert (await idle(client)).evictions >= 2
