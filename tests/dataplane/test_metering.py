"""A prompt that the engine was given counts for the quota and the ledger, however its request ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest

from dataplane.fallback import FallbackMode
from dataplane.metering import Meter
from dataplane.quotas import Admission, Amounts, Demand, Leased, Quotas
from dataplane.resolution import TenantQuotas
from dataplane.token_stream import Piece
from tests.dataplane.doubles import VERSION, answer, caller, delta, resolution, until
from tests.dataplane.stage import REQUEST, Entry, Stage, hang_in_engine, hang_in_load
from veneer.errors import DeadlineExceededError, InternalError, ResourceExhaustedError, UnavailableError, VeneerError

_QUOTA = 1000
_PROMPT = 2  # tokens of what `REQUEST` asks


async def _lease(demands: Sequence[Demand]) -> Leased:
    return Leased({demand.tenant: Amounts(requests=0, tokens=_QUOTA, streams=0) for demand in demands}, lifetime_s=60.0)


@pytest.fixture
async def metered(stage: Stage) -> AsyncIterator[Stage]:
    """A stage whose tenant has a quota of tokens."""
    stage.quotas = Quotas(_lease)
    stage.generator = stage.build()
    stage.says = replace(answer(resolution(1, ticket=b"v")), caller=caller(quotas=TenantQuotas(tokens=_QUOTA), ticket=b"c"))
    keeper = asyncio.create_task(stage.quotas.run())
    yield stage
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)
    assert stage.loader.held == stage.generator.num_streams == 0


async def _cancel(stage: Stage) -> None:
    before = len(stage.engine.submits)
    task = asyncio.create_task(stage.run())
    await until(lambda: len(stage.engine.submits) > before)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("hang", [hang_in_engine, hang_in_load])
async def test_who_leaves_before_the_first_token_has_used_its_prompt(metered: Stage, hang: Callable[[Stage], None]) -> None:
    hang(metered)
    for _ in range(3):
        await _cancel(metered)
    assert [use[1:6] for use in metered.uses] == [("acme", "bot", VERSION, b"v".hex(), "CANCELLED")] * 3
    assert [use[7:] for use in metered.uses] == [(_PROMPT, 0, 0)] * 3
    assert metered.quotas._books["acme"].used["tokens"] == 3 * _PROMPT


@pytest.mark.parametrize("error", [DeadlineExceededError("late"), InternalError("odd"), ResourceExhaustedError("a grammar")])
async def test_a_request_that_fails_in_the_engine_has_used_its_prompt(metered: Stage, error: VeneerError) -> None:
    metered.engine.script = (error,)
    with pytest.raises(type(error)):
        await metered.run()
    assert [(use.status, use.prompt_tokens) for use in metered.uses] == [(error.status, _PROMPT)]
    assert metered.quotas._books["acme"].used["tokens"] == _PROMPT


async def test_what_the_engine_does_not_take_uses_nothing(metered: Stage) -> None:
    metered.engine.script = (ResourceExhaustedError("too many requests wait", retry_after_s=1.0),)
    with pytest.raises(ResourceExhaustedError):
        await metered.run()
    metered.loader.ready = False
    with pytest.raises(UnavailableError):  # it does not wait for the version
        await metered.run(replace(REQUEST, fallback=FallbackMode.FAIL))
    assert [(use.version, use.prompt_tokens) for use in metered.uses] == [("", 0)] * 2
    assert metered.quotas._books["acme"].used["tokens"] == 0


async def test_what_a_kill_would_leave_is_told_once_the_engine_has_the_request_and_after_each_128_tokens(metered: Stage) -> None:
    hang_in_load(metered)
    await _cancel(metered)
    assert [use[1:6] for use in metered.told] == [("acme", "bot", VERSION, b"v".hex(), "UNAVAILABLE")]
    assert [use[7:] for use in metered.told] == [(_PROMPT, 0, 0)]

    assert not isinstance(metered.says, VeneerError)
    meter = Meter(metered.says, Admission(), Entry(metered.told, metered.uses), 1)
    pieces = [Piece(0, (7,) * count, "", None) for count in (100, 27, 1, 127, 2, 300)]
    for piece in pieces:
        meter.saw(None, piece)
    assert [use.output_tokens for use in metered.told[1:]] == [128, 257, 557]


async def test_a_request_counts_once_whatever_else_is_tried_for_it(metered: Stage) -> None:
    metered.limits = replace(metered.limits, fallback_after_s=0)
    metered.generator = metered.build()
    metered.loader.ready = False
    metered.engine.gates[VERSION] = asyncio.Event()
    metered.engine.script = (delta(70, finish="length"),)
    async with aclosing(metered.generator.run(replace(REQUEST, fallback=FallbackMode.NOT_READY))) as parts:
        assert [part.served.version async for part in parts if part.served is not None] == [None]
    assert len(metered.engine.submits) == 2
    (use,) = metered.uses
    assert (use.version, use.status, *use[7:]) == ("", "OK", _PROMPT, 0, 1)
    assert metered.quotas._books["acme"].used["tokens"] == _PROMPT + 1
