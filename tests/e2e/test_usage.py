"""What tenants read of their use is what their requests were answered, whatever was killed meanwhile."""

from __future__ import annotations

import os
import signal

import pytest

from tests.e2e.conftest import Publish
from tests.e2e.driving import Stream, aside, engine_pid, generate, until
from veneer.client import Client
from veneer.controlplane.v1 import tenants_pb2
from veneer.errors import UnavailableError
from veneer.local.stack import LocalStack

_LONG = 1900

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.mark.usefixtures("healthy")
async def test_answers_are_in_the_ledger_once_though_the_data_plane_is_killed(
    acme: Client, rival: Client, publish: Publish, stack: LocalStack
) -> None:
    await publish(acme, "A", adapter="metered")
    answers = [await generate(acme, "metered", max_tokens=4) for _ in range(3)]
    running = Stream(acme, "metered", max_tokens=_LONG)
    await running.read_tokens(1)
    os.kill(engine_pid(stack), signal.SIGSTOP)  # so that it cannot come to its end
    stack.data_plane.kill()
    assert isinstance((await running.read()).error, UnavailableError)
    await aside(stack.data_plane.start)
    answers.append(await until(lambda: generate(acme, "metered", max_tokens=4)))

    async def is_told() -> tenants_pb2.Usage | None:
        used = [one for one in await acme.usage() if one.adapter == "metered"]
        assert sum(one.requests - one.failed_requests for one in used) <= 4
        return used[0] if used and (used[0].requests, used[0].failed_requests) == (5, 1) else None

    usage = await until(is_told)
    assert usage.owner == "acme"
    finished = [answer.finish for answer in answers if answer.finish is not None]
    told = sum(finish.completion_tokens for finish in finished)
    assert told == 16
    assert told <= usage.output_tokens <= told + _LONG
    assert usage.prompt_tokens == 5 * finished[0].prompt_tokens  # equal prompts
    assert [one for one in await rival.usage() if one.adapter == "metered"] == []
