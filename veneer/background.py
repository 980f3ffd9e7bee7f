"""How a process's background tasks end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

_log = logging.getLogger(__name__)


async def end_tasks(tasks: Iterable[asyncio.Task[None]], *, timeout_s: float = 10.0) -> None:
    """Cancels tasks and waits until they have ended; one that goes on is named in the log and left.

    How they ended is their owner's to look at.
    """
    left = set(tasks)
    for task in left:
        task.cancel()
    if left:
        _, left = await asyncio.wait(left, timeout=timeout_s)
    for task in left:
        _log.error("a background task does not end", extra={"task": task.get_name(), "where": repr(task)})
