"""One try to answer a request: what serves it, its streams, and its claim on the version's image."""

from __future__ import annotations

import asyncio
from typing import Any

from dataplane.binding import Served
from dataplane.choices import ChoiceStreams
from dataplane.claims import Claim, Level
from dataplane.token_stream import Piece
from dataplane.transfer import DeletedVersionError, WithdrawnVersionError
from veneer.errors import UnavailableError, VeneerError


class NotReadyError(Exception):
    """The version cannot be had in time; `cause` is the request's answer where nothing else may answer."""

    def __init__(self, cause: VeneerError) -> None:
        super().__init__(cause.message)
        self.cause = cause


class NotLoadedYetError(UnavailableError):
    """The version is on its way: nothing is wrong with it."""

    def __init__(self) -> None:
        super().__init__("the version is not loaded yet", retry_after_s=1.0)


class Attempt:
    """Owned by the request's handler, which closes it.

    Args:
        served: What answers.
        streams: The streams of the request's choices.
        claim: On the version's image; None for the base.
    """

    def __init__(self, served: Served, streams: ChoiceStreams, claim: Claim | None) -> None:
        self.served = served
        self._streams = streams
        self._claim = claim

    @property
    def is_open(self) -> bool:
        """Whether `next` may be called again."""
        return self._streams.is_open

    @property
    def level(self) -> Level | None:
        """Where the version was when the attempt began; None for the base."""
        return None if self._claim is None else self._claim.level

    async def first(self, *, patience_s: float | None) -> tuple[int, Piece]:
        """Waits for the first tokens, the failure of the load, or the end of patience.

        Args:
            patience_s: How long to wait until the version is on the device; None without end. What the engine takes then is
                another matter: a queue is no reason for another answer.

        Raises:
            NotReadyError: The version cannot be had (in time).
            VeneerError: Anything else; also that the version may not be served any more, whose place nothing takes.
        """
        claim = self._claim
        if claim is None:
            return await self.next()
        clock = asyncio.get_running_loop().time
        end_s = None if patience_s is None else clock() + patience_s
        first = asyncio.ensure_future(self._streams.next())
        try:
            for step in (claim.loaded, claim.placed):
                waited: set[asyncio.Future[Any]] = {first, step}
                timeout_s = None if end_s is None else max(0.0, end_s - clock())
                await asyncio.wait(waited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if first.done() and first.exception() is None:
                    return self._settle(first.result())
                refuse(claim)
                if first.done():
                    break
                if not step.done():
                    raise NotReadyError(NotLoadedYetError())
            try:
                return self._settle(await first)
            except VeneerError:
                refuse(claim)
                raise
        finally:
            first.cancel()

    async def next(self) -> tuple[int, Piece]:
        """Returns the next piece of any choice; see `ChoiceStreams.next`."""
        return await self._streams.next()

    async def close(self, *, is_expected: bool = False) -> None:
        """Gives everything back. Idempotent.

        Args:
            is_expected: Whether the request stopped waiting only because something else answers.
        """
        if self._claim is not None:
            self._claim.release(is_expected=is_expected)
        await self._streams.close()

    def _settle(self, first: tuple[int, Piece]) -> tuple[int, Piece]:
        """With a first token the engine holds a copy and a lease of its own."""
        if self._claim is not None:
            self._claim.settle()
        return first


def refuse(claim: Claim) -> None:
    """Says that what is claimed cannot be had, if that is known.

    Raises:
        NotReadyError: It cannot be loaded.
        WithdrawnVersionError: It may not be served any more.
        DeletedVersionError: There is no such version any more.
    """
    error = claim.lost or (claim.loaded.exception() if claim.loaded.done() else None)
    if isinstance(error, WithdrawnVersionError | DeletedVersionError):
        raise error
    if isinstance(error, VeneerError):
        raise NotReadyError(error)
