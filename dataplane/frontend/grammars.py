"""What a text must match, checked before anything is queued: JSON schema, regular expression, grammar."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dataplane.engine.grammar import GrammarCompiler
from dataplane.engine.messages import MAX_GRAMMAR_BYTES
from veneer.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError, Violation

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_JSON: JsonCompileOptions = {"whitespace_pattern": r"[ \t\r\n]{0,32}", "lenient": False}
"""White space between the parts of a JSON text: any, but not without end, which some models write. No keyword is passed over."""
_MAX_BYTES = {"json": 64 << 10, "regex": 1 << 10, "grammar": 16 << 10}


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a text must match; see `veneer.dataplane.v1.StructuredOutputs`."""

    kind: Literal["json", "regex", "grammar"]
    text: str


class Grammars:
    """Checks constraints on threads of its own and remembers the verdicts. Owned by the event loop.

    Args:
        compiler: Compiles grammars.
        timeout_s: How long one may take, its wait for a thread included.
        max_pending: Constraints that may wait.
        max_entries: Verdicts that are kept.
    """

    def __init__(
        self, compiler: GrammarCompiler, *, timeout_s: float = 5.0, max_pending: int = 64, max_entries: int = 256
    ) -> None:
        self._compiler = compiler
        self._timeout_s = timeout_s
        self._max_pending = max_pending
        self._max_entries = max_entries
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._verdicts: OrderedDict[Constraint, str | tuple[Violation, ...]] = OrderedDict()
        self._pending: dict[Constraint, asyncio.Future[str | tuple[Violation, ...]]] = {}

    def close(self) -> None:
        """Lets the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def check(self, constraint: Constraint) -> str:
        """Returns the grammar as the engine takes it.

        Raises:
            InvalidArgumentError: It is wrong, too large, or asks for what cannot be enforced.
            FailedPreconditionError: This base cannot have structured outputs.
            ResourceExhaustedError: It takes too long, or too many wait.
        """
        size, most = len(constraint.text.encode()), _MAX_BYTES[constraint.kind]
        field = f"sampling.structured_outputs.{constraint.kind}"
        if not 1 <= size <= most:
            raise InvalidArgumentError.of([Violation(field, f"must have 1 to {most} bytes, has {size}")])
        verdict = self._verdicts.get(constraint)
        if verdict is None:
            verdict = await self._compile(constraint)
        else:
            self._verdicts.move_to_end(constraint)
        if isinstance(verdict, str):
            return verdict
        raise InvalidArgumentError.of([Violation(field, violation.description) for violation in verdict])

    async def _compile(self, constraint: Constraint) -> str | tuple[Violation, ...]:
        """Compiles on the thread; equal constraints that come meanwhile wait for the same compilation."""
        running = self._pending.get(constraint)
        if running is None:
            if len(self._pending) >= self._max_pending:
                raise ResourceExhaustedError(f"{self._max_pending} grammars wait to be compiled", retry_after_s=1.0)
            running = asyncio.get_running_loop().run_in_executor(self._threads, self._verdict, constraint)
            self._pending[constraint] = running
            running.add_done_callback(lambda done: self._keep(constraint, done))
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(running)
        except TimeoutError:
            raise ResourceExhaustedError(f"the grammar did not compile within {self._timeout_s:g} s") from None

    def _keep(self, constraint: Constraint, done: asyncio.Future[str | tuple[Violation, ...]]) -> None:
        del self._pending[constraint]
        if done.cancelled() or done.exception() is not None:
            return
        self._verdicts[constraint] = done.result()
        while len(self._verdicts) > self._max_entries:
            self._verdicts.popitem(last=False)

    def _verdict(self, constraint: Constraint) -> str | tuple[Violation, ...]:
        try:
            grammar = _translate(constraint)
            if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
                return (Violation(constraint.kind, f"comes to more than {MAX_GRAMMAR_BYTES} bytes"),)
            self._compiler.compile(grammar)
        except InvalidArgumentError as error:
            return tuple(error.violations)
        except ValueError as error:
            return (Violation(constraint.kind, str(error).partition("\n")[0][:200]),)
        return grammar


def _translate(constraint: Constraint) -> str:
    """Returns the constraint as llguidance reads it.

    Raises:
        ValueError: It is none.
    """
    try:
        import llguidance
    except ImportError:
        raise FailedPreconditionError("structured outputs need the package llguidance, which is not installed") from None

    if constraint.kind == "json":
        schema = "{}" if constraint.text.strip() == "true" else constraint.text  # options are kept in an object
        return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_JSON)
    if constraint.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(constraint.text)
    return llguidance.grammar_from("grammar", constraint.text)
