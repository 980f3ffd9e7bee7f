"""Grammars as token masks: compiled and matched beside the steps, within limits of work and memory for each tenant."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dataplane.engine.grammar_work import GrammarWork
from veneer.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    VeneerError,
    Violation,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

INITIAL_LEXER_FUEL = 200_000
"""Work to build a grammar's lexer: nodes of its regular expressions. Values of a schema's enum need 2 for each character."""
STEP_LEXER_FUEL = 20_000
"""Work of the lexer for one token. Schemas and expressions of daily use need less than 2,000."""
STEP_MAX_ITEMS = 10_000
"""Items of the parser for one token: how many ways there are to read the text so far. A schema of 300 properties needs 5,000."""
MAX_ITEMS_IN_ROW = 2_000
"""Items of the parser at one place of the text."""
MAX_LEXER_STATES = 100_000
"""States of a lexer; a string of a schema with a `maxLength` needs one for each of its characters."""
MAX_GRAMMAR_SYMBOLS = 100_000
"""Symbols in all rules of a grammar."""

_NO_FORCING = '%llguidance {"no_forcing": true}'
_LEXER_BYTES = 512 << 10
_BYTES_PER_S = 256 << 20
"""What a lexer is taken to grow by while it works, in bytes a second of a core.

Measured: 34 to 60 MiB/s for compilations, 20 to 60 for masks (x86-64, llguidance 1.9); the rest is for faster cores.
"""
_MAX_LEXER_PART = 8


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


def parser_limits() -> LLParserLimits:
    """Returns what bounds the library's work, each call by itself."""
    import llguidance

    return llguidance.LLParserLimits(
        initial_lexer_fuel=INITIAL_LEXER_FUEL,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        max_items_in_row=MAX_ITEMS_IN_ROW,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SYMBOLS,
        verbose_errors=False,
    )


def without_forcing(grammar: str) -> str:
    """Returns a grammar whose masks are found token by token.

    Otherwise the library looks ahead, before each token, to the end of the text that can only go on in one way, which none of its
    limits bounds: `(g{500}){800}` took 0.7 s and 120 MiB before the first token and 0.1 s before each other one.
    """
    try:
        parts = json.loads(grammar)["grammars"][0]
        if (rules := parts.get("lark_grammar")) is None:
            rules = f"start: %json {json.dumps(parts['json_schema'])}"
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        rules = grammar  # written as rules already, or wrong, which the library says
    return f"{rules}\n{_NO_FORCING}\n"


class GrammarCompiler:
    """Turns grammars, as llguidance reads them, into matchers over one model's tokens. Any thread may call it.

    Args:
        folder: Model folder with tokenizer.json. It is read here, which takes a second for a large vocabulary.
        vocab_size: Rows of the model's embedding.
        eos_ids: Ids that end a sequence; None: see `read_eos_ids`.

    Attributes:
        eos_ids: Tokens that end a sequence.
    """

    def __init__(self, folder: Path, *, vocab_size: int, eos_ids: Sequence[int] | None = None) -> None:
        self._tokenizer = None
        ids = read_eos_ids(folder) if eos_ids is None else eos_ids
        self.eos_ids = tuple(id_ for id_ in ids if id_ < vocab_size)
        self._missing = why_missing(folder, self.eos_ids)
        if not self._missing:
            import llguidance

            try:
                self._tokenizer = llguidance.LLTokenizer(
                    str(folder / "tokenizer.json"), n_vocab=vocab_size, eos_token=list(self.eos_ids)
                )
            except Exception as error:  # noqa: BLE001 - the base serves everything else
                self._missing = f"structured outputs cannot use this base's tokenizer: {str(error)[:200]}"

    def check(self) -> None:
        """Does nothing where grammars can be compiled.

        Raises:
            FailedPreconditionError: The library or the base's tokenizer is missing.
        """
        if self._tokenizer is None:
            raise FailedPreconditionError(self._missing)

    def compile(self, grammar: str) -> LLMatcher:
        """Returns a matcher at the grammar's start; gives up the interpreter lock while it works.

        Raises:
            FailedPreconditionError: The library or the base's tokenizer is missing.
            InvalidArgumentError: The grammar is wrong or too large.
        """
        self.check()
        import llguidance

        assert self._tokenizer is not None, "checked"
        matcher = llguidance.LLMatcher(self._tokenizer, without_forcing(grammar), log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise InvalidArgumentError.of([Violation("sampling.structured_outputs", explain(matcher.get_error()))])
        return matcher


def why_missing(folder: Path, eos_ids: tuple[int, ...]) -> str:
    """Returns why a base cannot have structured outputs; empty where nothing is missing."""
    if importlib.util.find_spec("llguidance") is None:
        return "structured outputs need the package llguidance, which is not installed"
    if not (folder / "tokenizer.json").is_file() or not eos_ids:
        return "structured outputs need a tokenizer.json and an end-of-sequence token, which the base does not have"
    return ""


_LIMITS = (
    ("too many expressions constructed", "the expressions in it take more than {} units of work", STEP_LEXER_FUEL),
    ("initial lexer configuration", "the expressions in it take more than {} units of work to compile", INITIAL_LEXER_FUEL),
    ("lexer precomputation", "the expressions in it take more than {} units of work to compile", INITIAL_LEXER_FUEL),
    ("too many states", "the expressions in it take more than {} states", MAX_LEXER_STATES),
    ("Too many items", "its rules can be read in more than {} ways before one token", STEP_MAX_ITEMS),
    ("Current row has", "its rules can be read in more than {} ways at one place", MAX_ITEMS_IN_ROW),
    ("grammar size", "its rules have more than {} symbols", MAX_GRAMMAR_SYMBOLS),
)


def explain(error: str) -> str:
    """Returns the first line of what the library says, and the limit that it means where it is one of ours."""
    lines = [line for line in error.split("\n") if line.strip()]
    first = (lines or ["it is not valid"])[0]
    if first.startswith("at ") and ": failed to compile JSON schema: " in first:  # the place is one of our own wrapping
        first = first.partition(": failed to compile JSON schema: ")[2]
    if first.endswith("regex parse error:") and (causes := [line for line in lines if line.startswith("error: ")]):
        return f"{first[:200]} {causes[0].removeprefix('error: ')[:120]}"
    if first == "NoExtensionBias":
        return "its rules or references lead in a circle, so that no text matches"
    for sign, words, limit in _LIMITS:
        if sign in error:
            return f"takes too much work: {words.format(f'{limit:,}')} ({first[:120]})"
    return first[:200]


class _Lexer:
    """A compiled grammar of one tenant. What its matchers find out about its expressions they keep here, together.

    Attributes:
        matcher: At the grammar's start; each request takes a copy.
        num_bytes: What it is taken to hold.
        num_users: Requests that match with it.
        is_retired: It is too large, or a limit stopped it: nothing new begins with it, and its users compile anew.
    """

    __slots__ = ("grammar", "is_retired", "matcher", "num_bytes", "num_users", "tenant")

    def __init__(self, tenant: str, grammar: str, matcher: LLMatcher, seconds: float) -> None:
        self.tenant, self.grammar, self.matcher = tenant, grammar, matcher
        self.num_bytes = _LEXER_BYTES + len(grammar) + int(seconds * _BYTES_PER_S)
        self.num_users = 0
        self.is_retired = False


class Lexers:
    """Compiled grammars, by tenant, within a budget of bytes. Any thread may call it.

    The library does not say what a lexer holds, so it is taken to grow with the work that was done on it. Beyond the budget the
    tenant that holds most loses first what it does not use, oldest first, and then its largest lexer, whose users begin again
    with a small one. No tenant's lexer is another's: what one does to it, a limit that it runs into included, others never see.

    Args:
        compiler: Compiles.
        max_bytes: The budget.
    """

    def __init__(self, compiler: GrammarCompiler, *, max_bytes: int) -> None:
        self._compiler = compiler
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._ready: OrderedDict[tuple[str, str], _Lexer] = OrderedDict()
        self._held: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        """What all are taken to hold."""
        return sum(self._held.values())

    def open(self, tenant: str, grammar: str) -> tuple[_Lexer, bool]:
        """Returns a lexer for one more user, and whether it was compiled just now.

        Raises:
            VeneerError: The grammar does not compile.
        """
        with self._lock:
            found = self._ready.get((tenant, grammar))
            if found is not None:
                self._ready.move_to_end((tenant, grammar))
                found.num_users += 1
                return found, False
        started = time.thread_time()
        matcher = self._compiler.compile(grammar)
        lexer = _Lexer(tenant, grammar, matcher, time.thread_time() - started)
        lexer.num_users = 1
        with self._lock:
            before = self._ready.pop((tenant, grammar), None)
            self._ready[tenant, grammar] = lexer
            self._held[tenant] = self._held.get(tenant, 0) + lexer.num_bytes
            if before is not None:
                self._retire(before)
            self._shrink()
        return lexer, True

    def without_ends(self, mask: bytes) -> bytes:
        """Returns a mask without the tokens that end a sequence; one that is not special stands for its own text too."""
        return _without(mask, self._compiler.eos_ids)

    def worked(self, lexer: _Lexer, seconds: float) -> None:
        """Notes work on a lexer."""
        grown = int(seconds * _BYTES_PER_S)
        with self._lock:
            lexer.num_bytes += grown
            self._held[lexer.tenant] += grown
            if lexer.num_bytes > self._max_bytes // _MAX_LEXER_PART:
                self._retire(lexer)
            self._shrink()

    def retire(self, lexer: _Lexer) -> None:
        """Lets nothing new begin with a lexer."""
        with self._lock:
            self._retire(lexer)

    def close(self, lexer: _Lexer) -> None:
        """Notes that a user is done with it."""
        with self._lock:
            lexer.num_users -= 1
            self._free(lexer)

    def _retire(self, lexer: _Lexer) -> None:
        lexer.is_retired = True
        if self._ready.get((lexer.tenant, lexer.grammar)) is lexer:
            del self._ready[lexer.tenant, lexer.grammar]
            self._free(lexer)

    def _free(self, lexer: _Lexer) -> None:
        """Counts it no more once nothing can use it."""
        if lexer.is_retired and not lexer.num_users and lexer.num_bytes:
            left = self._held[lexer.tenant] - lexer.num_bytes
            lexer.num_bytes = 0
            if left:
                self._held[lexer.tenant] = left
            else:
                del self._held[lexer.tenant]

    def _shrink(self) -> None:
        while sum(self._held.values()) > self._max_bytes:
            heaviest = max(self._held, key=self._held.__getitem__)
            mine = [lexer for lexer in self._ready.values() if lexer.tenant == heaviest]
            unused = next((lexer for lexer in mine if not lexer.num_users), None)
            if unused is None:
                if mine:
                    self._retire(max(mine, key=lambda lexer: lexer.num_bytes))
                return
            self._retire(unused)


class GrammarMask:
    """A `TokenMask` of one request. The step loop's side of it never waits; the matcher is touched by one thread at a time.

    Its grammar is compiled when the request first has a seat, so that no more grammars are compiled than requests run. A matcher
    that cannot go on with what others of the tenant left in its lexer begins again alone, so what comes of a request does not
    depend on them. After a token that ends the sequence there is nothing to find: a matcher that is complete takes such a token
    for a fault, for which its lexer would be given up.

    Args:
        tenant: Who asks.
        grammar: As llguidance reads it.
        lexers: Compiles it, or has it compiled.
        work: Where it is compiled and matched.
        wake: Called, from another thread, when a mask is there.
        ends: Tokens that end a sequence.
    """

    def __init__(
        self,
        tenant: str,
        grammar: str,
        *,
        lexers: Lexers,
        work: GrammarWork,
        wake: Callable[[], None],
        ends: Collection[int],
    ) -> None:
        self._tenant, self._grammar = tenant, grammar
        self._lexers, self._work, self._wake = lexers, work, wake
        self._ends = ends
        self._tokens: list[int] = []
        self._num_taken = 0
        self._lexer: _Lexer | None = None
        self._matcher: LLMatcher | None = None
        self._mask: bytes | None = None
        self._error: VeneerError | None = None
        self._has_begun = self._is_stopped = self._is_busy = False
        self._lock = threading.Lock()

    @property
    def is_ready(self) -> bool:
        """Whether the next mask is there, or the reason why there is none."""
        return self._mask is not None or self._error is not None

    def begin(self) -> None:
        """Starts the work for the first mask."""
        if not self._has_begun:
            self._has_begun = True
            self._submit()

    def allowed(self, index: int) -> bytes | None:
        """Returns one bit a token, least significant first; None while the mask of that token is not there.

        Raises:
            InvalidArgumentError: The grammar is wrong.
            ResourceExhaustedError: It takes too much work here.
        """
        if index != len(self._tokens):
            return None
        if self._error is not None:
            raise self._error
        return self._mask

    def advance(self, token: int) -> None:
        """Takes the chosen token."""
        self._tokens.append(token)
        self._mask = None
        if token in self._ends:
            self._error = InvalidArgumentError(f"structured_outputs: the text ended at output token {len(self._tokens) - 1}")
        else:
            self._submit()

    def stop(self) -> None:
        """Ends the work; what runs at the moment is finished first."""
        with self._lock:
            self._is_stopped = True
            if not self._is_busy:
                self._let_go()

    def _submit(self) -> None:
        if not self._is_stopped:
            self._work.submit(self._tenant, self._run)

    def _run(self) -> None:
        with self._lock:
            if self._is_stopped:
                return
            self._is_busy = True
        mask: bytes | None = None
        try:
            with _ends_one_request():
                mask = self._find()
        except VeneerError as error:
            self._error = error
        with self._lock:
            self._is_busy = False
            if self._is_stopped:
                self._let_go()
        self._mask = mask
        self._wake()

    def _find(self) -> bytes:
        while True:
            is_alone = False
            if self._lexer is None or self._lexer.is_retired:
                self._let_go()
                is_alone = self._open()
            assert self._lexer is not None, "opened"
            started = time.thread_time()
            mask, error = self._step()
            self._lexers.worked(self._lexer, time.thread_time() - started)
            if mask is not None:
                return mask
            self._lexers.retire(self._lexer)
            if is_alone:
                index = len(self._tokens)
                raise ResourceExhaustedError(f"structured_outputs: at output token {index} the grammar {explain(error)}")

    def _open(self) -> bool:
        """Takes a matcher at the grammar's start; returns whether no other has used its lexer."""
        self._lexer, is_new = self._lexers.open(self._tenant, self._grammar)
        self._matcher = self._lexer.matcher.deep_copy()
        self._num_taken = 0
        return is_new

    def _step(self) -> tuple[bytes | None, str]:
        """Returns the next mask, or why there is none."""
        matcher = self._matcher
        assert matcher is not None, "opened"
        count = len(self._tokens)
        if matcher.consume_tokens(self._tokens[self._num_taken : count]):
            self._num_taken = count
            mask = matcher.compute_bitmask()
            if not matcher.is_error():
                return (mask if matcher.is_accepting() else self._lexers.without_ends(mask)), ""
        return None, matcher.get_error()

    def _let_go(self) -> None:
        lexer, self._lexer, self._matcher = self._lexer, None, None
        if lexer is not None:
            self._lexers.close(lexer)


def _without(mask: bytes, ids: Sequence[int]) -> bytes:
    held = [id_ for id_ in ids if mask[id_ >> 3] & (1 << (id_ & 7))]
    if not held:
        return mask
    cleared = bytearray(mask)
    for id_ in held:
        cleared[id_ >> 3] &= ~(1 << (id_ & 7)) & 0xFF
    return bytes(cleared)


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
    """Masks for the requests of one engine. Owned by the step loop.

    Args:
        compiler: Compiles.
        wake: Called, from another thread, when a mask is there.
        max_bytes: What compiled grammars may hold.
    """

    def __init__(self, compiler: GrammarCompiler, *, wake: Callable[[], None], max_bytes: int) -> None:
        self._compiler = compiler
        self._wake = wake
        self._work = GrammarWork()
        self.lexers = Lexers(compiler, max_bytes=max_bytes)

    def mask(self, tenant: str, grammar: str) -> GrammarMask:
        """Returns the mask of a new request; nothing is compiled before it has a seat.

        Raises:
            FailedPreconditionError: This base cannot have structured outputs.
        """
        self._compiler.check()
        return GrammarMask(tenant, grammar, lexers=self.lexers, work=self._work, wake=self._wake, ends=self._compiler.eos_ids)

    def take_costs(self) -> dict[str, float]:
        """Returns seconds of a core that grammars took since the last call, by tenant."""
        return self._work.take_costs()

    def stop(self) -> None:
        """Lets the threads end."""
        self._work.stop()
