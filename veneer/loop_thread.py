"""One thread with an event loop for all clients of a process that block: they hand it coroutines and wait for the outcome."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine
from queue import SimpleQueue
from typing import Any, ClassVar, Final, Generic, TypeVar

from veneer.errors import FailedPreconditionError, VeneerError

_T = TypeVar("_T")
_EXIT_S = 5.0
_END: Final = object()
_FORKED = (
    "the process was forked after its first client was made, and gRPC does not work in such a child:"
    " make the first client after the fork, or start the child afresh (`multiprocessing` with `spawn`)"
)

Calls = SimpleQueue[Callable[[], None] | None]
"""Calls that a coroutine wants made in the thread that waits for it; None is its end."""


class LoopThread:
    """The thread. Any thread may call it but its own. It ends when the interpreter does.

    There is one in a process, as gRPC's event loops disturb each other where there are several.

    Attributes:
        pid: Process that it is a thread of.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _shared: ClassVar[LoopThread | None] = None

    def __init__(self) -> None:
        """Starts the thread."""
        self.pid = os.getpid()
        started = concurrent.futures.Future[asyncio.AbstractEventLoop]()
        self._thread = threading.Thread(target=_serve, args=(started,), name="veneer-client", daemon=True)
        self._thread.start()
        self._loop = started.result()
        atexit.register(self._end)

    @classmethod
    def shared(cls) -> LoopThread:
        """The process's own, made where there is none.

        Raises:
            FailedPreconditionError: The process was forked off one that had made it: gRPC would hang in this one.
        """
        with cls._lock:
            if cls._shared is None:
                cls._shared = cls()
        cls._shared.check_process()
        return cls._shared

    def run(self, coroutine: Coroutine[Any, Any, _T], *, calls: Calls | None = None) -> _T:
        """Runs a coroutine to its end; an exception that interrupts the wait, such as KeyboardInterrupt, cancels it.

        Args:
            coroutine: What runs in the loop.
            calls: What it puts there is called here, in the waiting thread; an exception of such a call cancels the coroutine.

        Raises:
            FailedPreconditionError: The process was forked since, or the loop itself asks, which would wait for ever.
            VeneerError: CANCELLED: the client was closed meanwhile.
        """
        future = self._start(coroutine)
        try:
            if calls is not None:
                future.add_done_callback(lambda _: calls.put(None))
                while (call := calls.get()) is not None:
                    call()
            return future.result()
        except concurrent.futures.CancelledError:
            raise cancelled() from None
        finally:
            future.cancel()

    def forget(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Runs a coroutine and waits for nothing; for finalizers, which may run in any thread and at any time."""
        with contextlib.suppress(FailedPreconditionError):
            self._start(coroutine, in_any_thread=True)

    def check_process(self) -> None:
        """Raises FailedPreconditionError in a process that was forked off since."""
        if os.getpid() != self.pid:
            raise FailedPreconditionError(_FORKED)

    def _end(self) -> None:
        if os.getpid() == self.pid:  # else the thread is the parent's
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_EXIT_S)

    def _start(self, coroutine: Coroutine[Any, Any, _T], *, in_any_thread: bool = False) -> concurrent.futures.Future[_T]:
        try:
            self._check(in_any_thread=in_any_thread)
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except (FailedPreconditionError, RuntimeError) as error:
            coroutine.close()
            if isinstance(error, RuntimeError):  # the loop is closed: the interpreter ends
                raise FailedPreconditionError("the client's thread has ended with the interpreter") from error
            raise

    def _check(self, *, in_any_thread: bool) -> None:
        self.check_process()
        if not in_any_thread and threading.current_thread() is self._thread:
            raise FailedPreconditionError("the client's own thread cannot wait for the client: call it from another")


class Stream(Generic[_T]):
    """What an asynchronous generator yields, in a thread that blocks. Closing it, or dropping it, closes the generator.

    Also a context manager. Threads may share it: each item goes to one of them, and any may close it.
    """

    def __init__(self, thread: LoopThread, items: AsyncGenerator[_T]) -> None:
        self._loop_thread = thread
        self._reader = _Reader(items)
        self._lock = threading.Lock()
        self._finalize = weakref.finalize(self, _abandon, thread, self._reader)
        self._finalize.atexit = False

    def __iter__(self) -> Stream[_T]:
        return self

    def __next__(self) -> _T:
        with self._lock:
            try:
                item = self._loop_thread.run(self._reader.next())
            except BaseException:
                _abandon(self._loop_thread, self._reader)  # wherever in here Ctrl-C came
                raise
        if item is _END:
            raise StopIteration
        return item  # type: ignore[return-value]  # the other value is the end

    def __enter__(self) -> Stream[_T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends it; a thread that waits for an item gets an error of status CANCELLED. A second time does nothing."""
        if self._finalize.detach() is not None:
            self._loop_thread.run(self._reader.close())


class _Reader(Generic[_T]):
    """The generator on its loop. Owned by the loop."""

    def __init__(self, items: AsyncGenerator[_T]) -> None:
        self._items = items
        self._reading: asyncio.Task[Any] | None = None

    async def next(self) -> _T | object:
        self._reading = asyncio.current_task()
        try:
            return await anext(self._items, _END)
        finally:
            self._reading = None

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        await self._items.aclose()


def cancelled() -> VeneerError:
    """The error of a call that its own side ended."""
    error = VeneerError("the call was cancelled: its stream or client was closed")
    error.status = "CANCELLED"
    return error


def _abandon(thread: LoopThread, reader: _Reader[Any]) -> None:
    thread.forget(reader.close())


def _serve(started: concurrent.futures.Future[asyncio.AbstractEventLoop]) -> None:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.call_soon(started.set_result, loop)
    loop.run_forever()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:  # cancels what runs, then closes the loop
        runner.get_loop()
