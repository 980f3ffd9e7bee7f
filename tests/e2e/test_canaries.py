"""A canary of a version that no request of which ends well, and one of a good version, by the traffic alone."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tests.e2e.conftest import Publish
from tests.e2e.driving import blobs_of, generate, until
from veneer.canary_calls import CanaryStep
from veneer.client import Client
from veneer.controlplane.v1 import canaries_pb2
from veneer.errors import VeneerError
from veneer.local.stack import LocalStack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.usefixtures("without_hints")]

_ADAPTER = "on-its-way"


async def ended(client: Client) -> canaries_pb2.Canary:
    """The canary, as requests that go on and on bring it to its end."""

    async def ask() -> None:
        with contextlib.suppress(VeneerError):
            await generate(client, _ADAPTER, max_tokens=2)

    async def after_some() -> canaries_pb2.Canary | None:
        await asyncio.gather(*(ask() for _ in range(6)))
        canary = await client.canary(_ADAPTER)
        return None if canary.state == canaries_pb2.CANARY_STATE_RUNNING else canary

    return await until(after_some)  # type: ignore[return-value]


async def answers(client: Client) -> set[str]:
    return {(await generate(client, _ADAPTER, max_tokens=2)).text for _ in range(4)}


async def test_what_always_fails_is_taken_back_and_what_is_good_gets_all_traffic(
    stack: LocalStack, acme: Client, publish: Publish
) -> None:
    stable = (await publish(acme, "A", adapter=_ADAPTER)).version.digest
    good = (await publish(acme, "B", adapter=_ADAPTER)).version.digest
    bad = (await publish(acme, "C", adapter=_ADAPTER)).version.digest
    lost = blobs_of(stack, bad)  # no data plane has them yet: there are no hints
    lost.rename(lost.with_suffix(".lost"))

    await acme.start_canary(_ADAPTER, bad, [CanaryStep(50, 0, 1_000_000)])
    canary = await ended(acme)
    assert canary.state == canaries_pb2.CANARY_STATE_ROLLED_BACK, canary
    assert (canary.version, canary.stable_version) == (bad, stable)
    assert (canary.version_counts.ok, canary.stable_counts.failed) == (0, 0)
    assert canary.version_counts.failed > 0

    async def is_back() -> bool:
        with contextlib.suppress(VeneerError):
            return await answers(acme) == {"AA"}
        return False

    await until(is_back)

    await acme.start_canary(_ADAPTER, good, [CanaryStep(30, 0, 3), CanaryStep(60, 0, 3)])
    canary = await ended(acme)
    assert canary.state == canaries_pb2.CANARY_STATE_PROMOTED, canary
    assert canary.version_counts.ok >= 6

    async def is_there() -> bool:
        return await answers(acme) == {"BB"}

    await until(is_there)
