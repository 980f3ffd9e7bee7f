"""A store that neither answers nor fails: who waits for it hears so in time, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Publish
from tests.e2e.driving import Stream, generate, until, weights_of
from tests.fixtures.stack import DATA_SETTINGS
from veneer.client import Client
from veneer.dataplane.v1 import generation_pb2 as pb
from veneer.errors import DeadlineExceededError, UnavailableError
from veneer.local.stack import LocalStack

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

_LOAD_TIMEOUT_S = 4.0


@pytest.fixture
def impatient(tmp_path: Path, model_dir: Path) -> Iterator[LocalStack]:
    """A system of its own, with one place for loads and no hints."""
    settings: dict[str, str | None] = {
        **DATA_SETTINGS,
        "load_timeout_s": str(_LOAD_TIMEOUT_S),
        "max_fetches": "1",
        "redis_url": None,
    }
    with LocalStack(tmp_path / "stack", model_dir, data_settings=settings) as stack:
        stack.add_tenant("acme")
        yield stack


@contextlib.asynccontextmanager
async def hanging(file: Path) -> AsyncIterator[None]:
    """Whoever reads a file waits until the end of the block: a pipe is in its place that nobody writes to."""
    away = file.with_suffix(".away")
    file.rename(away)
    os.mkfifo(file)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # nobody reads
            os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))
        away.replace(file)


async def test_a_load_that_hangs_costs_its_own_callers_their_time_and_nobody_else_anything(
    impatient: LocalStack, publish: Publish
) -> None:
    state = impatient.state
    async with contextlib.AsyncExitStack() as stack:
        acme = Client(control=state.control, data=state.data, key=state.tenant_key or "", timeout_s=60.0)
        stack.push_async_callback(acme.close)
        hung = (await publish(acme, "A", adapter="hanging-store", alias="stable")).version.digest
        await publish(acme, "B", adapter="hanging-store-other", alias="stable")
        running = Stream(acme, "hanging-store-other", max_tokens=1900)
        await running.first()
        async with hanging(weights_of(impatient, hung)):
            start_s = time.monotonic()
            waits = asyncio.create_task(Stream(acme, "hanging-store", max_tokens=8).read())
            instead = await generate(acme, "hanging-store", fallback=pb.FALLBACK_MODE_NOT_READY)
            assert instead.served is not None
            assert (instead.served.version, instead.served.fallback) == ("", True)
            with pytest.raises(DeadlineExceededError):
                await generate(acme, "hanging-store", timeout_s=0.5)
            await publish(acme, "C", adapter="hanging-store-third", alias="stable")
            third = await generate(acme, "hanging-store-third")
            assert third.text == "C" * 8, "the only place is given up by what brings nothing"

            answer = await waits
            assert isinstance(answer.error, UnavailableError)
            assert time.monotonic() - start_s > _LOAD_TIMEOUT_S, "it was waited for as long as it should be"
            await publish(acme, "D", adapter="hanging-store-fourth", alias="stable")
            assert (await generate(acme, "hanging-store-fourth")).text == "D" * 8
        assert (await running.read()).text == "B" * 1900

        async def serves() -> bool:
            return (await generate(acme, "hanging-store", max_tokens=3)).text == "AAA"

        await until(serves)
