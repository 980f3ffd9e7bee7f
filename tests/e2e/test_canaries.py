"""A canary of a version that no request of which ends well, and one of a good version, by the traffic alone."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from tests.e2e.conftest import Publish
from tests.e2e.driving import generate, until
from tests.fixtures.adapters import make_adapter_folder
from veneer.artifact import BaseDescription
from veneer.canary_calls import CanaryStep
from veneer.client import Client
from veneer.controlplane.v1 import canaries_pb2
from veneer.errors import VeneerError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

_ADAPTER = "on-its-way"
_TOO_LARGE = 65  # ranks that the data plane takes end at 64, those of the publish check at 256


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
    acme: Client, publish: Publish, model_base: BaseDescription, tmp_path: Path
) -> None:
    stable = (await publish(acme, "A", adapter=_ADAPTER)).version.digest
    good = (await publish(acme, "B", adapter=_ADAPTER)).version.digest
    folder = make_adapter_folder(tmp_path / "bad", model_base, ranks=_TOO_LARGE)
    bad = (await acme.publish(folder, adapter=_ADAPTER, base=model_base.digest)).version.digest

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
