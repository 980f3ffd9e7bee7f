"""Work on another thread that a cancelled caller waits for, so that what the work uses is not closed under it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from typing import Any, TypeVar

_T = TypeVar("_T")


async def in_thread(work: Callable[[], _T], threads: Executor | None = None) -> _T:
    """Runs work on another thread and returns when it has ended, even when cancelled: what it uses may be closed then.

    Args:
        work: What to do; briefly, unless there are threads for it.
        threads: Threads for this kind of work; None for those that the process has for all that is brief.
    """
    call = asyncio.get_running_loop().run_in_executor(threads, work)
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await to_the_end((call,))
        raise


async def to_the_end(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Waits until all have ended, however often the caller is cancelled meanwhile.

    Raises:
        asyncio.CancelledError: The caller was cancelled; all have ended.
    """
    cancelled: asyncio.CancelledError | None = None
    while not all(task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
