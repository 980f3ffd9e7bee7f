"""One request's tokens on their way to the wire: detokenized, cut at stop strings, merged while the reader is busy, bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from dataplane.engine.messages import Delta, FinishReason, Logprobs
from dataplane.frontend.detokenizer import Detokenizer, StopStrings
from veneer.errors import InternalError, ResourceExhaustedError, VeneerError

_CLOSE_S = 5.0
_LOGPROB_BYTES = 12  # of a token and a number on the wire


class SlowReaderError(ResourceExhaustedError):
    """The caller did not read its stream for too long."""


@dataclass(frozen=True, slots=True)
class End:
    """How a stream ended well.

    Attributes:
        reason: Why it ended.
        prompt_tokens: Tokens of the prompt.
        completion_tokens: Tokens generated, a final stop token included.
        cached_tokens: Of the prompt's, those that the prefix cache held.
    """

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """The next tokens of a stream.

    Attributes:
        index: Index of the first id; the next piece's index is this one's plus the number of ids.
        ids: Token ids.
        text: Text that became certain.
        end: Set in the last piece only.
        logprobs: One for each id where asked for.
        prompt_logprobs: One for each token of the prompt but the first, in the first piece, where asked for.
    """

    index: int
    ids: tuple[int, ...]
    text: str
    end: End | None
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()


class TokenStream:
    """Reads the engine's deltas of one request and keeps what the caller has not read yet.

    Owned by the request's handler; its own task reads the engine, so that a slow reader never holds up more than itself: when
    its buffer stays full for `slow_reader_s` the request ends, whether or not the caller ever reads again. Tokens that wait
    become one piece.

    Args:
        deltas: The engine's deltas; closing the iterator aborts the request.
        detokenizer: Detokenizer of this request.
        stops: Stop strings of this request.
        stop_ids: Tokens whose text is not sent when one of them ends the sequence.
        min_tokens: A stop string counts if it ends in the text of a later token, wherever it begins.
        max_bytes: Size of the buffer.
        max_waiting: Tokens in the buffer.
        slow_reader_s: How long the buffer may stay full.
    """

    def __init__(
        self,
        deltas: AsyncIterator[Delta],
        *,
        detokenizer: Detokenizer,
        stops: StopStrings,
        stop_ids: Sequence[int],
        max_bytes: int,
        slow_reader_s: float,
        max_waiting: int = 256,
        min_tokens: int = 0,
    ) -> None:
        self._deltas = deltas
        self._detokenizer = detokenizer
        self._stops = stops
        self._stop_ids = frozenset(stop_ids)
        self._max_bytes = max_bytes
        self._slow_reader_s = slow_reader_s
        self._max_waiting = max_waiting
        self._min_tokens = min_tokens
        self._ids: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[Logprobs] = []
        self._prompt_logprobs: tuple[Logprobs, ...] = ()
        self._num_bytes = 0
        self._num_read = 0
        self._num_generated = 0
        self._end: End | None = None
        self._error: VeneerError | None = None
        self._filled = asyncio.Event()
        self._drained = asyncio.Event()
        self._task = asyncio.create_task(self._pump(), name="token-stream")

    @property
    def num_generated(self) -> int:
        """Tokens that the engine gave so far."""
        return self._num_generated

    async def next(self) -> Piece:
        """Returns all that waits, or waits for more. The last piece has an `end`; do not call again after it.

        Raises:
            VeneerError: The stream ended badly; what was buffered before that has been returned.
        """
        await self._filled.wait()
        self._filled.clear()
        if not self._ids and not self._text and self._end is None:
            assert self._error is not None
            raise self._error
        piece = Piece(
            self._num_read,
            tuple(self._ids),
            "".join(self._text),
            self._end,
            tuple(self._logprobs),
            self._prompt_logprobs,
        )
        self._num_read += len(self._ids)
        self._empty()
        self._drained.set()
        if self._error is not None:
            self._filled.set()
        return piece

    async def close(self) -> None:
        """Aborts the request if it still runs, and waits (for a bounded time) until that is done. Idempotent."""
        self._task.cancel()
        await asyncio.wait({self._task}, timeout=_CLOSE_S)

    async def _pump(self) -> None:
        try:
            async for delta in self._deltas:
                await self._wait_for_space()
                if self._take(delta):
                    break
            if self._end is None:
                self._error = InternalError("the engine ended the request without a reason")
        except VeneerError as error:
            self._error = error
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001  whatever it is, it ends this request only
            self._error = InternalError(f"the stream broke: {type(error).__name__}")
        finally:
            self._filled.set()
            close = getattr(self._deltas, "aclose", None)
            if close is not None:
                await close()

    async def _wait_for_space(self) -> None:
        if self._num_bytes < self._max_bytes and len(self._ids) < self._max_waiting:
            return
        self._drained.clear()
        try:
            async with asyncio.timeout(self._slow_reader_s):
                await self._drained.wait()
        except TimeoutError:
            self._empty()
            raise SlowReaderError(f"the stream was not read for {self._slow_reader_s:g} s") from None

    def _take(self, delta: Delta) -> bool:
        """Adds a delta to the buffer; returns whether it was the last."""
        reason = delta.finish
        for place, id_ in enumerate(delta.ids):
            self._num_generated += 1
            self._ids.append(id_)
            is_stop_token = delta.finish == "stop" and place == len(delta.ids) - 1 and id_ in self._stop_ids
            text = "" if is_stop_token else self._detokenizer.add(id_)
            self._write(text)
            if self._stops.found:
                reason = "stop"
                break
        if reason is not None:
            self._write(self._detokenizer.finish())
            if self._stops.found:
                reason = "stop"
            else:
                self._append(self._stops.finish())
            self._end = End(reason, delta.prompt_tokens, self._num_generated, delta.cached_tokens)
        if delta.logprobs:
            taken = delta.logprobs[: len(self._ids) - len(self._logprobs)]
            self._logprobs += taken
            self._num_bytes += sum(_LOGPROB_BYTES * (1 + len(one.top)) for one in taken)
        if delta.prompt_logprobs:
            self._prompt_logprobs = delta.prompt_logprobs
        self._num_bytes += 4 * len(delta.ids)
        self._filled.set()
        return reason is not None

    def _empty(self) -> None:
        self._ids, self._text, self._logprobs, self._prompt_logprobs, self._num_bytes = [], [], [], (), 0

    def _write(self, text: str) -> None:
        if text:
            self._append(self._stops.add(text, counts=self._num_generated > self._min_tokens))

    def _append(self, text: str) -> None:
        if text:
            self._text.append(text)
            self._num_bytes += len(text)
