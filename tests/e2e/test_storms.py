"""Crowds: many requests for one version that is not there yet, many callers that go away, an engine that dies while it loads."""

from __future__ import annotations

import asyncio
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


async def test_a_crowd_for_one_version_that_is_not_there_fetches_it_once(
    stack: LocalStack, acme: Client, operator: OperatorClient, publish: Publish
) -> None:
    adapter = (await publish(acme, "A")).version.adapter
    before = await _figure(stack, _LOADS)
    async with conserved(operator):
        answers = await asyncio.gather(*(Stream(acme, adapter, max_tokens=4).read() for _ in range(_CROWD)))
    assert {(answer.text, answer.error) for answer in answers} == {("AAAA", None)}
    assert await _figure(stack, _LOADS) == before + 1


async def test_equal_files_of_two_tenants_are_loaded_and_freed_each_by_itself(
    stack: LocalStack,
    acme: Client,
    rival: Client,
    *,
    operator: OperatorClient,
    model_base: BaseDescription,
    tmp_path: Path,
) -> None:
    files = write_marker(tmp_path / "twin", model_base, "J")
    versions = [(await client.publish(files, adapter="twin", base=model_base.digest)).version.digest for client in (acme, rival)]
    assert len(set(versions)) == 2
    before = await _figure(stack, _LOADS)
    for number, (client, version) in enumerate(zip((acme, rival), versions, strict=True), start=1):
        answer = await generate(client, "twin", max_tokens=40)
        assert answer.text == "J" * 40
        assert answer.served is not None
        assert answer.served.version == version
        assert await _figure(stack, _LOADS) == before + number, "what another tenant holds saves nobody a load"
    freed = [(await operator.unload(version)).freed for version in reversed(versions)]
    assert freed[0] == freed[1]
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
        reading = [asyncio.create_task(Stream(acme, name, max_tokens=8).read()) for name in adapters.values() for _ in range(5)]
        await until(lambda: _waits(operator))
        os.kill(engine, signal.SIGKILL)
        for answer in await asyncio.gather(*reading):
            assert answer.finish is not None or isinstance(answer.error, UnavailableError)
        for marker, name in adapters.items():
            assert (await until(lambda name=name: generate(acme, name))).text == marker * 8  # type: ignore[misc]


async def _figure(stack: LocalStack, name: str) -> float:
    page = await aside(lambda: urllib.request.urlopen(f"http://{stack.state.data_metrics}/metrics", timeout=10).read().decode())
    found = re.search(rf"^{re.escape(name)} (\S+)$", page, re.MULTILINE)
    return float(found[1]) if found else 0.0


async def _waits(operator: OperatorClient) -> bool:
    engine = (await operator.residency()).engine
    return engine.waiting + engine.running > 0
