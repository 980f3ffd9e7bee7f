"""What the control plane says about where adapters are, kept for a while."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from veneer.errors import VeneerError

_FRESH_S = 10.0
_PATIENCE_S = 0.25
"""How long the first request of an adapter waits for an answer; later ones use the last one while another is asked for."""
_MAX_ADAPTERS = 10_000


@dataclass(frozen=True, slots=True)
class Location:
    """Where an adapter is.

    Attributes:
        key: What identifies the adapter to routers that hash.
        addresses: Data planes that hold it; none where nothing is known.
    """

    key: str
    addresses: tuple[str, ...] = ()


Ask = Callable[[str, str], Awaitable[Location]]
"""Asks the control plane about an adapter and its owner, empty for the caller's own tenant."""


class Locations:
    """Answers by adapter. It never fails a request: without an answer the adapter's name is the key. Owned by one event loop.

    Args:
        ask: Asks the control plane; None where the client has no address of one.
        clock: Monotonic seconds.
    """

    def __init__(self, ask: Ask | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._known: OrderedDict[tuple[str, str], tuple[Location, float]] = OrderedDict()
        self._asking: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def of(self, adapter: str, owner: str) -> Location:
        """Returns where an adapter is, as far as it is known."""
        if not adapter:
            return Location("")
        about = (adapter, owner)
        found, until_s = self._known.get(about, (None, 0.0))
        if self._ask is not None and self._clock() >= until_s and about not in self._asking:
            self._asking[about] = asyncio.create_task(self._look_up(self._ask, about))
        if found is None and (task := self._asking.get(about)) is not None:
            await asyncio.wait({task}, timeout=_PATIENCE_S)
            found, _ = self._known.get(about, (None, 0.0))
        return found or Location(f"{owner}/{adapter}")

    async def close(self) -> None:
        """Ends questions that run."""
        for task in self._asking.values():
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)

    async def _look_up(self, ask: Ask, about: tuple[str, str]) -> None:
        try:
            adapter, owner = about
            last, _ = self._known.get(about, (Location(f"{owner}/{adapter}"), 0.0))
            found = last
            with contextlib.suppress(VeneerError):  # advice: what was known last goes on
                found = await ask(adapter, owner)
            self._known[about] = (found, self._clock() + _FRESH_S * random.uniform(0.8, 1.2))
            self._known.move_to_end(about)
            if len(self._known) > _MAX_ADAPTERS:
                self._known.popitem(last=False)
        finally:
            self._asking.pop(about, None)
