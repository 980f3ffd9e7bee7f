"""Work on another thread, and callers that go away meanwhile."""

from __future__ import annotations

import asyncio
import threading

import pytest

from veneer.threads import in_thread


@pytest.mark.parametrize("num_cancels", [1, 3])
async def test_work_on_a_thread_has_ended_when_its_caller_was_cancelled(num_cancels: int) -> None:
    begun, go = threading.Event(), threading.Event()
    ended: list[bool] = []

    def work() -> None:
        begun.set()
        ended.append(go.wait(60))

    task = asyncio.create_task(in_thread(work))
    await asyncio.to_thread(begun.wait, 60)
    for _ in range(num_cancels):
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]
