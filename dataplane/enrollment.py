"""A node's own key for the control plane: had for a token once, and renewed from time to time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, TypeVar

from veneer.errors import UnavailableError, VeneerError

T = TypeVar("T")

_log = logging.getLogger(__name__)
_PATIENCE_S = 60.0
_MAX_PAUSE_S = 60.0


class NotEnrolledError(UnavailableError):
    """The control plane refuses this node's own key: the node was revoked. Another data plane may answer."""

    def __init__(self) -> None:
        super().__init__("this data plane is not enrolled any more: the control plane refuses its key", retry_after_s=1.0)


class KeyHolder(Protocol):
    """Who uses the key; the catalogue's client."""

    async def enroll(self, key_file: Path, *, token: str | None) -> None:
        """Reads the key from its file, or has one made for a token."""

    async def rotate_key(self, key_file: Path) -> None:
        """Has a new key made in place of the one in the file."""


class Enrollment:
    """Owned by the event loop.

    Args:
        client: Who uses the key.
        key_file: Where it is kept.
        token: For what a key is had where there is none.
        rotate_s: Time after which a key is renewed.
        pause_s: Time between tries to reach the control plane.
    """

    def __init__(self, client: KeyHolder, *, key_file: Path, token: str | None, rotate_s: float, pause_s: float = 1.0) -> None:
        self._client = client
        self._key_file = key_file
        self._token = token
        self._rotate_s = rotate_s
        self._pause_s = pause_s

    async def enroll(self) -> None:
        """Has the client use the node's key; waits for a while for a control plane that is away.

        Raises:
            VeneerError: There is no key, and none to be had.
        """
        await self.ask(lambda: self._client.enroll(self._key_file, token=self._token))

    async def ask(self, call: Callable[[], Awaitable[T]]) -> T:
        """Returns what the control plane answers at the start; waits for a while for one that is away.

        Raises:
            VeneerError: It refuses the call, or is away for too long.
        """
        end_s = asyncio.get_running_loop().time() + _PATIENCE_S
        while True:
            try:
                return await call()
            except UnavailableError:
                if asyncio.get_running_loop().time() > end_s:
                    raise
                _log.warning("the control plane is unreachable; trying again")
            await asyncio.sleep(self._pause_s)

    async def run(self) -> None:
        """Renews the key until cancelled; what fails is tried again soon."""
        pause_s = self._rotate_s
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self._client.rotate_key(self._key_file)
                pause_s = self._rotate_s
            except VeneerError as error:
                _log.warning("the node's key could not be rotated", extra={"status": error.status})
                pause_s = min(_MAX_PAUSE_S, self._rotate_s)
