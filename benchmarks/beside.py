"""Work that goes on beside a measurement, and ends with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterable


@contextlib.asynccontextmanager
async def beside(works: Iterable[Coroutine[None, None, None]]) -> AsyncIterator[None]:
    """Runs endless works beside a block, and cancels them at its end.

    Raises:
        ExceptionGroup: What one of them failed with: it ends the others and the block at once, since what is measured beside
            less than there should be means nothing; or the block's own failure.
    """
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work) for work in works]
        yield
        for task in tasks:
            task.cancel()
