"""Crowds: many requests for one version that is not there yet, many callers that go away, an engine that dies while it loads."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.conftest import Publish
from tests.e2e.driving import Answer, Stream, aside, conserved, engine_pid, generate, until
from tests.e2e.markers import write_marker
from veneer.artifact import BaseDescription
from veneer.client import Client
from veneer.errors import UnavailableError
from veneer.local.stack import LocalStack
from veneer.operator_client import OperatorClient

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.usefixtures("without_hints")]

_CROWD = 200
_LEAVERS = 500
_LOADS = 'veneer_adapter_load_seconds_count{origin="store",target="host"}'
_HOPS = (
    _LOADS,
    'veneer_adapter_load_seconds_count{origin="host",target="device"}',
    *(f'veneer_adapter_fetch_seconds_count{{part="{part}"}}' for part in ("grant", "read", "build")),
    'veneer_adapter_first_token_seconds_count{level="store"}',
)


async def test_a_crowd_for_one_version_that_is_not_there_fetches_it_once(
    stack: LocalStack, acme: Client, operator: OperatorClient, publish: Publish
) -> None:
    version = (await publish(acme, "A")).version
    async with conserved(operator):
        answers = await asyncio.gather(*(Stream(acme, version.adapter, max_tokens=4).read() for _ in range(_CROWD)))
    assert {(answer.text, answer.error) for answer in answers} == {("AAAA", None)}
    assert await aside(_num_loads, stack, version.digest) == 1


async def test_equal_files_of_two_tenants_are_loaded_and_freed_each_by_itself(
    stack: LocalStack,
    acme: Client,
    rival: Client,
    *,
    operator: OperatorClient,
    model_base: BaseDescription,
    tmp_path: Path,
) -> None:
    stable, files = (write_marker(tmp_path / marker, model_base, marker) for marker in "KJ")
    versions = []
    for client in (acme, rival):
        await client.publish(stable, adapter="twin", base=model_base.digest)
        assert (await generate(client, "twin", max_tokens=4)).text == "KKKK"  # what an alias moves to is brought: it is there
        versions.append((await client.publish(files, adapter="twin", base=model_base.digest)).version.digest)
    assert len(set(versions)) == 2

    async def cold(client: Client, version: str) -> dict[str, float]:
        """What a first request brings about: each hop once. Again, where loads that other tests left came between."""

        async def alone() -> dict[str, float] | None:
            await operator.unload(version)
            before = await _hops(stack)
            answer = await generate(client, "twin", version=version, max_tokens=40)
            assert answer.text == "J" * 40
            assert answer.served is not None
            assert answer.served.version == version
            hops = {name: figure - before[name] for name, figure in (await _hops(stack)).items()}
            return hops if set(hops.values()) == {1, 2} else None

        hops = await until(alone)
        assert hops is not None
        return hops

    loads, freed = [], []
    for is_held in (False, True):  # whether the other tenant's is held too
        if is_held:
            await cold(acme, versions[0])
        loads.append(await cold(rival, versions[1]))
        freed.append((await operator.unload(versions[1])).freed)
    assert loads[0] == loads[1], "what another tenant holds saves nobody a hop, and so no time to the first token"
    assert set(loads[0].values()) == {1, 2}, "each hop once, and both files"
    assert freed[0] == freed[1] == (await operator.unload(versions[0])).freed
    assert min(freed[0].device_bytes, freed[0].host_bytes, freed[0].disk_bytes) > 0


@pytest.mark.slow
async def test_a_crowd_that_leaves_at_any_time_leaves_nothing_behind(
    acme: Client, operator: OperatorClient, publish: Publish
) -> None:
    adapters = {marker: (await publish(acme, marker)).version.adapter for marker in "BCDEF"}
    chance = random.Random(1)

    async def leave(marker: str) -> Answer:
        stream = Stream(
            acme,
            adapters.get(marker, ""),
            max_tokens=chance.choice((1, 50, 500)),
            prompt="p" * chance.choice((1, 100, 1400)),
        )
        reading = asyncio.create_task(stream.read())
        await asyncio.wait({reading}, timeout=chance.random() * 4)
        reading.cancel()
        await asyncio.wait({reading})
        await stream.close()
        assert not marker or set(stream.answer.text) <= {marker}
        return stream.answer

    async with conserved(operator):
        answers = await asyncio.gather(*(leave(chance.choice(("", *adapters))) for _ in range(_LEAVERS)))
    assert [answer.error for answer in answers if answer.error is not None] == []
    for marker, adapter in adapters.items():
        assert (await generate(acme, adapter)).text == marker * 8


async def test_an_engine_that_dies_while_versions_load_ends_their_requests_and_loads_them_in_the_next_one(
    stack: LocalStack, acme: Client, operator: OperatorClient, publish: Publish
) -> None:
    adapters = {marker: (await publish(acme, marker)).version.adapter for marker in "GHI"}
    engine = engine_pid(stack)
    async with conserved(operator):
        long = (Stream(acme, name, max_tokens=500) for name in adapters.values() for _ in range(5))  # none ends unseen
        reading = [asyncio.create_task(stream.read()) for stream in long]
        await until(lambda: _waits(operator))
        os.kill(engine, signal.SIGKILL)
        for answer in await asyncio.gather(*reading):
            assert answer.finish is not None or isinstance(answer.error, UnavailableError)
        for marker, name in adapters.items():
            assert (await until(lambda name=name: generate(acme, name))).text == marker * 8  # type: ignore[misc]


def _num_loads(stack: LocalStack, version: str) -> int:
    """How often the data plane fetched a version, by its log: figures count what other tests left to be loaded too."""
    log = stack.data_plane.process.log.read_text().splitlines()
    lines = [json.loads(line) for line in log if line.startswith("{")]
    return sum(line["message"] == "a version was loaded from the store" and line["version"] == version for line in lines)


async def _hops(stack: LocalStack) -> dict[str, float]:
    """What counts the hops of loads, up to the first token; and how often files were read in the control plane."""
    data, control = await _page(stack.state.data_metrics), await _page(stack.state.control_metrics)
    reads = re.findall(r'^veneer_grpc_calls_total\{.*method="\S*ReadBlob".*\} (\S+)$', control, re.MULTILINE)
    return {name: _read(data, name) for name in _HOPS} | {"reads": sum(map(float, reads))}


async def _page(address: str) -> str:
    return await aside(lambda: urllib.request.urlopen(f"http://{address}/metrics", timeout=60).read().decode())


def _read(page: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", page, re.MULTILINE)
    return float(found[1]) if found else 0.0


async def _waits(operator: OperatorClient) -> bool:
    engine = (await operator.residency()).engine
    return engine.waiting + engine.running > 0
