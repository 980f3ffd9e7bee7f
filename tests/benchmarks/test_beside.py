"""Work beside a measurement."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.beside import beside


async def test_work_goes_on_beside_a_block_and_ends_with_it() -> None:
    steps: list[int] = []

    async def work() -> None:
        while True:
            steps.append(1)
            await asyncio.sleep(0)

    async with beside([work(), work()]):
        while len(steps) < 10:  # noqa: ASYNC110  the work itself is what is counted
            await asyncio.sleep(0)
    after = len(steps)
    await asyncio.sleep(0)
    assert len(steps) == after


async def test_work_that_fails_ends_the_block_at_once() -> None:
    async def fail() -> None:
        raise ConnectionError("gone")

    with pytest.raises(ExceptionGroup) as raised:
        async with beside([fail()]):
            await asyncio.Event().wait()
    assert raised.group_contains(ConnectionError, match="gone")


async def test_the_failure_of_the_block_is_not_hidden() -> None:
    async def work() -> None:
        await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as raised:
        async with beside([work()]):
            raise ValueError("mine")
    assert raised.group_contains(ValueError, match="mine")
