"""A caller that goes away, at every stage of its request, and a deadline that passes: all that was taken is given back."""

from __future__ import annotations

import asyncio

import pytest

from tests.e2e.conftest import Publish
from tests.e2e.driving import Stream, blobs_unreadable, conserved, engine_pid, generate, idle, stopped, until
from tests.fixtures.stack import DATA_SETTINGS
from veneer.client import Client
from veneer.dataplane.v1 import generation_pb2 as pb
from veneer.errors import DeadlineExceededError
from veneer.local.stack import LocalStack
from veneer.operator_client import OperatorClient

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.usefixtures("without_hints")]

_SEATS = int(DATA_SETTINGS["max_sequences"])
_LONG = 1900
_ATTEMPTS = 20


async def test_what_a_running_request_holds_is_noticed(acme: Client, operator: OperatorClient, publish: Publish) -> None:
    adapter = (await publish(acme, "A")).version.adapter
    await generate(acme, adapter)
    before = await until(lambda: idle(operator, max_tasks=None))
    stream = Stream(acme, adapter, max_tokens=_LONG)
    await stream.first()
    found = await operator.residency()
    assert (found.engine.running, found.engine.leases) == (1, 1)
    assert found.engine.kv_pages_used > 0
    assert found.engine.tasks > before.engine.tasks
    assert sum(held.leases for held in found.versions) == 1
    await stream.close()
    await until(lambda: idle(operator, max_tasks=before.engine.tasks))


async def test_cancelled_while_queued(acme: Client, operator: OperatorClient, publish: Publish) -> None:
    adapter = (await publish(acme, "A")).version.adapter
    async with conserved(operator):
        seated = [Stream(acme, adapter, max_tokens=_LONG) for _ in range(_SEATS)]
        for stream in seated:
            await stream.first()
        queued = Stream(acme, adapter, max_tokens=4)
        reading = asyncio.create_task(queued.first())
        await until(lambda: _counts(operator, running=_SEATS, waiting=1))
        reading.cancel()
        await asyncio.wait({reading})
        await queued.close()
        await until(lambda: _counts(operator, running=_SEATS, waiting=0))
        assert queued.answer.num_tokens == 0
        for stream in seated:
            await stream.close()
    assert (await generate(acme, adapter)).text == "A" * 8


async def test_cancelled_while_its_adapter_loads(
    stack: LocalStack, acme: Client, operator: OperatorClient, publish: Publish
) -> None:
    version = (await publish(acme, "B")).version
    async with conserved(operator):
        with blobs_unreadable(stack, version.digest):
            stream = Stream(acme, version.adapter, max_tokens=4)
            reading = asyncio.create_task(stream.first())
            await until(lambda: _counts(operator, running=0, waiting=1))
            assert (await generate(acme, max_tokens=8)).num_tokens == 8  # a miss holds nobody up
            reading.cancel()
            await asyncio.wait({reading})
            await stream.close()
            await until(lambda: _counts(operator, running=0, waiting=0))
        assert (await generate(acme, version.adapter)).text == "B" * 8


async def test_cancelled_during_prefill(stack: LocalStack, acme: Client, operator: OperatorClient, publish: Publish) -> None:
    adapter = (await publish(acme, "C")).version.adapter
    await generate(acme, adapter)
    pid = engine_pid(stack)
    async with conserved(operator):
        for attempt in range(_ATTEMPTS):
            prompt = f"{attempt:02}" + "p" * _LONG  # a prompt of its own: pages of one that was read to its end are found again
            generated = (await operator.residency()).engine.generated_tokens
            stream = Stream(acme, adapter, max_tokens=1, prompt=prompt)
            reading = asyncio.create_task(stream.first())
            while not (reading.done() or await _has_pages(operator)):  # the whole prompt may be read between two looks
                pass
            with stopped(pid):  # so that the stage is still the one that was seen when the cancel arrives
                reading.cancel()
                await asyncio.wait({reading})
                await stream.close()
            await until(lambda: _counts(operator, running=0, waiting=0))
            if (await operator.residency()).engine.generated_tokens == generated:
                return  # it was cut before its first token
    pytest.fail("the prompt was always read to its end before the cancel")


async def test_cancelled_before_the_engine_took_it(
    stack: LocalStack, acme: Client, operator: OperatorClient, publish: Publish
) -> None:
    adapter = (await publish(acme, "D")).version.adapter
    await generate(acme, adapter)
    async with conserved(operator):
        with stopped(engine_pid(stack)), pytest.raises(DeadlineExceededError):
            await generate(acme, adapter, timeout_s=0.5)
    assert (await generate(acme, adapter)).text == "D" * 8


@pytest.mark.parametrize("count", [1, 7, 100])
async def test_cancelled_during_decode(acme: Client, operator: OperatorClient, publish: Publish, count: int) -> None:
    adapter = (await publish(acme, "E")).version.adapter
    async with conserved(operator):
        neighbour = Stream(acme, adapter, max_tokens=150)
        await neighbour.first()
        before = (await operator.residency()).engine.generated_tokens
        stream = Stream(acme, adapter, max_tokens=_LONG)
        answer = await stream.read_tokens(count)
        await stream.close()
        assert set(answer.text) == {"E"}
        whole = await neighbour.read()
        assert (whole.error, whole.text) == (None, "E" * 150)
    after = (await operator.residency()).engine.generated_tokens
    assert after - before < _LONG  # it did not decode to its end


async def test_cancelled_at_the_last_token(acme: Client, operator: OperatorClient, publish: Publish) -> None:
    adapter = (await publish(acme, "F")).version.adapter
    async with conserved(operator):
        for count in (1, 2, 40):
            stream = Stream(acme, adapter, max_tokens=count)
            await stream.read_tokens(count)
            await stream.close()
    assert (await generate(acme, adapter)).text == "F" * 8


async def test_a_deadline_ends_a_request_that_runs(acme: Client, operator: OperatorClient, publish: Publish) -> None:
    adapter = (await publish(acme, "G")).version.adapter
    await generate(acme, adapter)
    async with conserved(operator):
        streams = [Stream(acme, adapter, max_tokens=_LONG, timeout_s=0.6) for _ in range(_SEATS)]
        answers = await asyncio.gather(*(stream.read() for stream in streams))
        for answer in answers:
            assert isinstance(answer.error, DeadlineExceededError)
            assert answer.finish is None
            assert set(answer.text) <= {"G"}


async def test_a_deadline_ends_a_request_whose_adapter_loads_unless_the_base_may_answer(
    stack: LocalStack, acme: Client, operator: OperatorClient, publish: Publish
) -> None:
    version = (await publish(acme, "H")).version
    async with conserved(operator):
        with blobs_unreadable(stack, version.digest):
            with pytest.raises(DeadlineExceededError):
                await generate(acme, version.adapter, timeout_s=1.0)
            answer = await generate(acme, version.adapter, fallback=pb.FALLBACK_MODE_NOT_READY)
            assert answer.served is not None
            assert (answer.served.fallback, answer.served.version) == (True, "")
            assert answer.served.fallback_reason == pb.FALLBACK_REASON_NOT_READY
            assert "H" not in answer.text
        assert (await generate(acme, version.adapter)).text == "H" * 8


async def _counts(operator: OperatorClient, *, running: int, waiting: int) -> bool:
    engine = (await operator.residency()).engine
    return (engine.running, engine.waiting) == (running, waiting)


async def _has_pages(operator: OperatorClient) -> bool:
    return (await operator.residency()).engine.kv_pages_used > 0
