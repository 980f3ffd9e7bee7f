"""Grammars as token masks: compiled and matched on a thread, so that no step waits for either while it can be helped."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from dataplane.engine.intake import Arrival
from veneer.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    VeneerError,
    Violation,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MAX_COMPILED = 256
_MAX_THREADS = 4


def read_eos_ids(folder: Path) -> tuple[int, ...]:
    """Returns the ids that end a sequence: those of a model folder's generation_config.json, else of its config.json.

    For an engine that was told of none; a node tells it of all that the folder's files name.

    Raises:
        FailedPreconditionError: One of these is no JSON.
    """
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            fields = json.loads(path.read_text("utf-8"))
        except ValueError:
            raise FailedPreconditionError(f"{name} is no JSON") from None
        ids = fields.get("eos_token_id") if isinstance(fields, dict) else None
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (int(ids),)
    return ()


class GrammarCompiler:
    """Turns grammars, as llguidance reads them, into matchers over one model's tokens. Any thread may call it.

    Args:
        folder: Model folder with tokenizer.json. It is read here, which takes a second for a large vocabulary.
        vocab_size: Rows of the model's embedding.
        eos_ids: Ids that end a sequence; None: see `read_eos_ids`.
    """

    def __init__(self, folder: Path, *, vocab_size: int, eos_ids: Sequence[int] | None = None) -> None:
        self._tokenizer = None
        self._missing = ""
        eos_ids = [id_ for id_ in (read_eos_ids(folder) if eos_ids is None else eos_ids) if id_ < vocab_size]
        path = folder / "tokenizer.json"
        if importlib.util.find_spec("llguidance") is None:
            self._missing = "structured outputs need the package llguidance, which is not installed"
        elif not path.is_file() or not eos_ids:
            self._missing = "structured outputs need a tokenizer.json and an end-of-sequence token, which the base does not have"
        else:
            import llguidance

            try:
                self._tokenizer = llguidance.LLTokenizer(str(path), n_vocab=vocab_size, eos_token=eos_ids)
            except Exception as error:  # noqa: BLE001 - the base serves everything else
                self._missing = f"structured outputs cannot use this base's tokenizer: {str(error)[:200]}"

    def compile(self, grammar: str) -> LLMatcher:
        """Returns a matcher at the grammar's start; gives up the interpreter lock while it works.

        Raises:
            FailedPreconditionError: The library or the base's tokenizer is missing.
            InvalidArgumentError: The grammar is wrong or too large.
        """
        if self._tokenizer is None:
            raise FailedPreconditionError(self._missing)
        import llguidance

        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            first_line = matcher.get_error().partition("\n")[0][:200]
            raise InvalidArgumentError.of([Violation("sampling.structured_outputs", first_line)])
        return matcher


class GrammarMask:
    """A `TokenMask` over a matcher of its own."""

    def __init__(self, matcher: LLMatcher, threads: ThreadPoolExecutor) -> None:
        self._matcher = matcher
        self._threads = threads
        self._next: Future[bytes] = threads.submit(self._mask)

    def allowed(self) -> bytes:
        """Returns one bit a token, least significant first.

        Raises:
            ResourceExhaustedError: The grammar takes too much work here.
        """
        return self._next.result()

    def advance(self, token: int) -> None:
        """Takes the chosen token."""
        self._next = self._threads.submit(self._advance, token)

    def _advance(self, token: int) -> bytes:
        with _ends_one_request():
            self._matcher.consume_token(token)
        return self._mask()

    def _mask(self) -> bytes:
        with _ends_one_request():
            mask = self._matcher.compute_bitmask()
            failed = self._matcher.is_error()
        if failed:
            raise ResourceExhaustedError("the grammar takes too much work at this token")
        return mask


@contextlib.contextmanager
def _ends_one_request() -> Iterator[None]:
    """Makes of whatever the library raises, a panic included, an error of the request."""
    try:
        yield
    except VeneerError:
        raise
    except BaseException as error:  # a panic is no Exception
        raise InternalError(f"the grammar's matcher failed: {type(error).__name__}") from error


class Grammars:
    """Compiles the grammars of requests before the scheduler hears of them. Owned by the step loop.

    Args:
        compiler: Compiles them.
        wake: Called, from another thread, when one is done.
        max_pending: Requests whose grammar may wait.
    """

    def __init__(self, compiler: GrammarCompiler, *, wake: Callable[[], None], max_pending: int) -> None:
        self._compiler = compiler
        self._wake = wake
        self._max_pending = max_pending
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._masks = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="masks")
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._pending: dict[str, tuple[Arrival, float]] = {}
        self._done: queue.SimpleQueue[tuple[str, GrammarMask | VeneerError]] = queue.SimpleQueue()

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Requests whose grammar is not compiled yet."""
        return tuple(self._pending)

    def prepare(self, arrival: Arrival, now: float) -> None:
        """Takes a request; `settle` gives it back with its mask.

        Raises:
            InvalidArgumentError: The id is in use.
            ResourceExhaustedError: Too many wait.
        """
        submit = arrival.submit
        if submit.request_id in self._pending:
            raise InvalidArgumentError.of([Violation("request_id", "is in use by a running request")])
        if len(self._pending) >= self._max_pending:
            raise ResourceExhaustedError(f"{len(self._pending)} grammars wait to be compiled", retry_after_s=1.0)
        self._pending[submit.request_id] = (arrival, now)
        self._compiling.submit(self._make, submit.request_id, submit.sampling.grammar)

    def drop(self, request_id: str) -> None:
        """Forgets a request. Unknown ids are ignored."""
        self._pending.pop(request_id, None)

    def settle(self) -> list[tuple[Arrival, float, GrammarMask | VeneerError]]:
        """Returns requests whose grammar is compiled, when they came, and the mask or what is wrong."""
        settled = []
        while not self._done.empty():
            request_id, outcome = self._done.get()
            pending = self._pending.pop(request_id, None)
            if pending is not None:
                settled.append((*pending, outcome))
        return settled

    def stop(self) -> None:
        """Lets the threads end."""
        self._compiling.shutdown(wait=True, cancel_futures=True)
        self._masks.shutdown(wait=True, cancel_futures=True)

    def _make(self, request_id: str, grammar: str) -> None:
        outcome: GrammarMask | VeneerError
        try:
            with _ends_one_request():
                outcome = GrammarMask(self._matcher(grammar), self._masks)
        except VeneerError as error:
            outcome = error
        self._done.put((request_id, outcome))
        self._wake()

    def _matcher(self, grammar: str) -> LLMatcher:
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
                return found.deep_copy()
        made = self._compiler.compile(grammar)
        with self._lock:
            self._compiled[grammar] = made
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
            return made.deep_copy()
