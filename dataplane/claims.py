"""Who waits for a version's image, and where it was found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from veneer.errors import VeneerError

Level = Literal["device", "host", "disk", "store"]


class Claim:
    """One request's interest in a version, from admission to its end. Owned by the request.

    The version's image stays in host memory until the claim is settled or released; until it is released, the version is in use.

    Args:
        release: Told that the claim ends, and whether its version is expected to be asked for again.
        settle: Told that the image is not needed any more.

    Attributes:
        tenant: Whose request it is; empty for nobody in particular.
        level: Where the version was when the request came: on the `device`, in `host` memory, on the `disk` as an image file that
            the engine was not told of, or in the `store` alone.
        loaded: Done when the image (or a device copy) is there; its exception says why it cannot be had.
        placed: Done when a device copy is there.
        lost: Why the image cannot be had any more although it was there.
        is_settled: Whether the image is not needed any more.
    """

    def __init__(
        self,
        release: Callable[[Claim, bool], None],
        *,
        settle: Callable[[Claim], None] | None = None,
        tenant: str = "",
        level: Level = "store",
    ) -> None:
        self.tenant = tenant
        self.level = level
        self.loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.loaded.add_done_callback(lambda future: future.cancelled() or future.exception())  # seen, though nobody may ask
        self.placed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lost: VeneerError | None = None
        self.is_settled = False
        self._settle = settle
        self._release: Callable[[Claim, bool], None] | None = release

    def settle(self) -> None:
        """Gives the image back: the engine has a copy and a lease of its own. Idempotent."""
        if self._release is not None and not self.is_settled:
            self.is_settled = True
            if self._settle is not None:
                self._settle(self)

    def release(self, *, is_expected: bool = False) -> None:
        """Gives the claim back. Idempotent.

        Args:
            is_expected: Whether the caller stopped waiting but will want the version again: its load goes on, less urgently.
        """
        if self._release is not None:
            self._release(self, is_expected)
            self._release = None

    def fail(self, error: VeneerError) -> None:
        """Notes that the image cannot be had."""
        if self.loaded.done():
            self.lost = error
        else:
            self.loaded.set_exception(error)
