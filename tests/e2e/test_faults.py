"""Parts of the system that die and come back: what must go on goes on, what cannot says so, and nothing is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import urllib.request
from functools import partial

import pytest

from tests.e2e.conftest import Connect, Publish
from tests.e2e.driving import Answer, Stream, aside, conserved, engine_pid, generate, until, until_not
from veneer.client import Client
from veneer.errors import UnauthenticatedError, UnavailableError
from veneer.local.stack import LocalStack
from veneer.operator_client import OperatorClient

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.usefixtures("healthy")]

_LONG = 1900


async def test_without_valkey_nothing_fails_and_moves_and_revocations_are_still_seen(
    stack: LocalStack, acme: Client, operator: OperatorClient, publish: Publish, connect: Connect
) -> None:
    one = (await publish(acme, "A", adapter="unhinted")).version.digest
    key = await acme.create_key(roles=["caller"])
    caller = connect(key.secret)
    running = Stream(acme, "unhinted", max_tokens=_LONG)
    await running.first()
    stack.valkey.kill()
    await until(lambda: _hints_are(stack, connected=False))

    two = (await publish(acme, "B", adapter="unhinted")).version.digest
    assert (await generate(acme, "unhinted")).text == "A" * 8
    for version, old, new in ((two, "A", "B"), (one, "B", "A")):
        await acme.set_alias("unhinted", {version: 1})
        await until_not(partial(_writes, acme, "unhinted", old))
        assert (await generate(acme, "unhinted")).text == new * 8
    assert await _is_let_in(caller, "unhinted")
    await acme.revoke_key(key.key.id)
    await until_not(partial(_is_let_in, caller, "unhinted"))
    answer = await running.read()
    assert (answer.error, answer.text) == (None, "A" * _LONG)

    await aside(stack.valkey.start)
    await until(lambda: _hints_are(stack, connected=True))

    async def hinted() -> bool:
        """Nobody asks for this version: only a hint can bring it. One may be dropped, in the flood of those that waited."""
        version = (await publish(acme, "C", adapter="unhinted")).version.digest
        end_s = time.monotonic() + 5.0
        while not await _is_held(operator, version):
            if time.monotonic() > end_s:
                return False
            await asyncio.sleep(0.05)
        return True

    await until(hinted)


async def test_without_postgres_cached_rights_serve_and_writes_are_refused_quickly(
    stack: LocalStack, acme: Client, publish: Publish
) -> None:
    await publish(acme, "D", adapter="cached")
    assert (await generate(acme, "cached")).text == "D" * 8
    running = Stream(acme, "cached", max_tokens=_LONG)
    await running.first()
    await aside(stack.postgres.kill)

    with pytest.raises(UnavailableError):  # and not that a deadline passed
        await acme.create_grant("cached", "rival")
    for _ in range(3):
        assert (await generate(acme, "cached")).text == "D" * 8
    answer = await running.read()
    assert (answer.error, answer.text) == (None, "D" * _LONG)

    await aside(stack.postgres.start)
    await until(lambda: acme.create_grant("cached", "rival"))
    published = await publish(acme, "E", adapter="cached", alias="stable")
    assert published.version.number == 2
    await until(lambda: _writes(acme, "cached", "E"))
    await acme.revoke_grant("cached", "rival")


async def test_a_killed_control_plane_stops_no_stream_and_forgets_nothing(
    stack: LocalStack, acme: Client, publish: Publish
) -> None:
    one = (await publish(acme, "F", adapter="lasting")).version.digest
    two = (await publish(acme, "G", adapter="lasting")).version.digest
    assert (await generate(acme, "lasting")).text == "F" * 8
    running = Stream(acme, "lasting", max_tokens=_LONG)
    await running.first()
    stack.control_plane.kill()

    assert (await generate(acme, "lasting")).text == "F" * 8
    answer = await running.read()
    assert (answer.error, answer.text) == (None, "F" * _LONG)
    with pytest.raises(UnavailableError):
        await acme.set_alias("lasting", {two: 1})

    await aside(stack.control_plane.start)
    versions = await until(lambda: acme.versions("lasting"))
    assert {version.digest for version in versions} == {one, two}
    await until(lambda: acme.set_alias("lasting", {two: 1}))
    await until(lambda: _writes(acme, "lasting", "G"))


async def test_a_killed_data_plane_ends_its_streams_unavailable_and_serves_again_without_a_new_publish(
    stack: LocalStack, acme: Client, publish: Publish
) -> None:
    for marker, name in (("H", "crash-h"), ("I", "crash-i")):
        await publish(acme, marker, adapter=name)
    streams = [Stream(acme, name, max_tokens=_LONG) for name in ("crash-h", "crash-i", "crash-h", "crash-i")]
    for stream in streams:
        await stream.first()
    reading = [asyncio.create_task(stream.read()) for stream in streams]
    stack.data_plane.kill()
    for answer, marker in zip(await asyncio.gather(*reading), "HIHI", strict=True):
        _assert_cut_off(answer, marker)

    await aside(stack.data_plane.start)
    for marker, name in (("H", "crash-h"), ("I", "crash-i")):
        assert await until(partial(_writes, acme, name, marker))


async def test_a_killed_engine_ends_its_streams_unavailable_and_the_data_plane_lives_on(
    stack: LocalStack, acme: Client, operator: OperatorClient, publish: Publish
) -> None:
    await publish(acme, "J", adapter="engine")
    data_plane, engine = stack.data_plane.process.pid, engine_pid(stack)
    async with conserved(operator):
        streams = [Stream(acme, adapter, max_tokens=_LONG) for adapter in ("engine", "", "engine")]
        for stream in streams:
            await stream.first()
        reading = [asyncio.create_task(stream.read()) for stream in streams]
        os.kill(engine, signal.SIGKILL)
        cut, base, also_cut = await asyncio.gather(*reading)
        _assert_cut_off(cut, "J")
        _assert_cut_off(also_cut, "J")
        assert isinstance(base.error, UnavailableError)
        await until(lambda: _writes(acme, "engine", "J"))
    assert stack.data_plane.process.pid == data_plane
    assert engine_pid(stack) != engine


async def test_a_data_plane_that_is_asked_to_stop_finishes_its_streams(stack: LocalStack, acme: Client, publish: Publish) -> None:
    await publish(acme, "K", adapter="drained")
    running = Stream(acme, "drained", max_tokens=600)
    await running.first()
    stopping = asyncio.create_task(aside(stack.data_plane.stop))
    answer = await running.read()
    assert (answer.error, answer.text) == (None, "K" * 600)
    await stopping
    with pytest.raises(UnavailableError):
        await generate(acme, "drained")
    await aside(stack.data_plane.start)
    await until(lambda: _writes(acme, "drained", "K"))


def _assert_cut_off(answer: Answer, marker: str) -> None:
    """It ended UNAVAILABLE, never well, and what came is the beginning of the right answer."""
    assert isinstance(answer.error, UnavailableError)
    assert answer.finish is None
    assert 0 < answer.num_tokens < _LONG
    assert answer.text == marker * answer.num_tokens


async def _writes(client: Client, adapter: str, marker: str) -> bool:
    return (await generate(client, adapter, max_tokens=3)).text == marker * 3


async def _is_let_in(client: Client, adapter: str) -> bool:
    try:
        await generate(client, adapter, max_tokens=1)
    except UnauthenticatedError:
        return False
    return True


async def _hints_are(stack: LocalStack, *, connected: bool) -> bool:
    """Whether the data plane's own figures say so."""
    page = await aside(lambda: urllib.request.urlopen(f"http://{stack.state.data_metrics}/metrics", timeout=60).read().decode())
    return f"\nveneer_hints_connected {float(connected)}\n" in page


async def _is_held(operator: OperatorClient, version: str) -> bool:
    return any(held.version == version for held in (await operator.residency()).versions)
