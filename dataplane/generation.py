"""One request from its identity to its last token: resolve, draw the arm, bind to a version, run, fall back, stream.

Nothing is yielded before the first token is there; until then every refusal may still be the whole answer, and the base may
still take over where request and tenant allow it. Whatever ends the request, its engine request, its claim on the host image and
its place among the streams are given back in `finally`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dataplane.binding import Binding, Served, activate, bind
from dataplane.choices import Choice, ChoiceStreams, sampling_of
from dataplane.engine.messages import Delta, Logprobs, Submit
from dataplane.fallback import FallbackMode, on_not_ready
from dataplane.frontend.detokenizer import StopStrings
from dataplane.frontend.prompts import Budget, Prompt, Prompts
from dataplane.metrics import Metrics
from dataplane.prefetcher import Claim
from dataplane.resolution import Caller, Target
from dataplane.resolve_cache import Key, ResolveCache
from dataplane.token_stream import Piece, TokenStream
from veneer.access import Identity, set_identity
from veneer.errors import ResourceExhaustedError, UnavailableError, VeneerError


class Engine(Protocol):
    """What a generation needs of the engine."""

    def submit(self, submit: Submit, /) -> AsyncIterator[Delta]:
        """Runs a request; closing the iterator aborts it."""


class Loader(Protocol):
    """What a generation needs of the prefetcher."""

    def ensure(self, version: str) -> Claim:
        """Has the version's image brought to host memory, and kept there while the claim is held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request.

    Attributes:
        key_digest: SHA-256 of the caller's key; the tenant follows from it and from nothing else.
        target: What to generate with.
        prompt: What to continue.
        choice: How tokens are chosen.
        fallback: When the base may answer instead.
        request_id: Caller's own identifier; empty: one is made.
        split_unit: Unit of a traffic split; empty: the arm is drawn from the request's identifier.
        sub_salt: Mixed into the cache key beside the tenant's own secret.
        deadline_s: Seconds that are left; None for no limit.
        priority: Place among the waiting requests of the caller's tenant; capped by the key's role.
    """

    key_digest: bytes
    target: Target
    prompt: Prompt
    choice: Choice = field(default_factory=Choice)
    fallback: FallbackMode = FallbackMode.NONE
    request_id: str = ""
    split_unit: str = ""
    sub_salt: bytes = b""
    deadline_s: float | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt, sent back: ids and text with `echo`, logprobs of all tokens but the first with `prompt_logprobs`."""

    ids: tuple[int, ...]
    text: str
    logprobs: tuple[Logprobs, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One message of the answer.

    Attributes:
        served: What answers; in the first message only.
        piece: The next tokens of a choice.
        choice: Which one.
        echo: In the first message of choice 0, where asked for.
    """

    served: Served | None
    piece: Piece
    choice: int = 0
    echo: Echo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """Bounds of streams.

    Attributes:
        max_streams: Streams at once.
        max_streams_per_tenant: Streams of one tenant at once.
        max_buffer_bytes: What may wait for one reader.
        max_buffer_tokens: Tokens that may.
        slow_reader_s: How long that may stay full.
        fallback_after_s: How long a version may take to load before the base answers, where it may; never more than half of
            what is left to the deadline.
    """

    max_streams: int = 10_000
    max_streams_per_tenant: int = 2_000
    max_buffer_bytes: int = 256 << 10
    max_buffer_tokens: int = 256
    slow_reader_s: float = 10.0
    fallback_after_s: float = 5.0


class Generator:
    """Answers requests. Owned by the event loop; keeps nothing of a request after it ended.

    Args:
        resolver: What the control plane says about callers and references.
        prompts: Prompts to ids, ids to text.
        loader: Brings versions to host memory.
        engine: Runs requests.
        metrics: Counts what happens.
        base_digest: Digest of the base that is served.
        limits: Bounds of streams.
    """

    def __init__(
        self,
        *,
        resolver: ResolveCache,
        prompts: Prompts,
        loader: Loader,
        engine: Engine,
        metrics: Metrics,
        base_digest: str,
        limits: StreamLimits,
    ) -> None:
        self._resolver = resolver
        self._prompts = prompts
        self._loader = loader
        self._engine = engine
        self._metrics = metrics
        self._base_digest = base_digest
        self._limits = limits
        self._streams: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    @property
    def num_streams(self) -> int:
        """Streams that run."""
        return self._streams.total()

    async def wait_idle(self) -> None:
        """Waits until no stream runs."""
        await self._idle.wait()

    async def run(self, request: GenerationRequest) -> AsyncGenerator[Part]:
        """Yields the answer's parts, the first one with what is served and the first tokens.

        Raises:
            VeneerError: The request is refused, or the stream ended badly.
        """
        started_s = time.monotonic()
        if self.draining:
            raise UnavailableError("the node is draining", retry_after_s=0.1)
        answer = await self._resolver.resolve(Key(request.key_digest, request.target))
        caller = answer.caller
        set_identity(Identity(kind="tenant", key_digest=request.key_digest, key_id=caller.key_id, tenant=caller.tenant))
        served = bind(
            answer,
            request_id=request.request_id or uuid.uuid4().hex,
            base_digest=self._base_digest,
            split_unit=request.split_unit,
            mode=request.fallback,
            priority=min(request.priority, caller.max_priority),
        )
        with self._place(caller, request.choice.n):
            budget = await self._prompts.prepare(request.prompt, max_tokens=request.choice.max_tokens)
            constraint = request.choice.constraint
            grammar = "" if constraint is None else await self._prompts.grammars.check(constraint)
            if request.deadline_s is not None:
                request = replace(request, deadline_s=max(request.deadline_s - (time.monotonic() - started_s), 0.0))
            bound = activate(served, answer, budget.ids)
            submits = self._submits(request, caller, budget, bound, grammar=grammar)
            counts = (len(budget.ids), *[0] * (len(submits) - 1))  # the choices of a request have one prompt
            timers = [self._metrics.timer(caller.tenant, started_s, prompt_tokens=count) for count in counts]
            async with aclosing(self._answer(request, caller, bound.served, submits)) as parts:
                async for part in parts:
                    self._metrics.saw(timers[part.choice], part.piece)
                    yield part

    async def _answer(
        self, request: GenerationRequest, caller: Caller, served: Served, submits: Sequence[Submit]
    ) -> AsyncGenerator[Part]:
        claim = None if served.version is None else self._loader.ensure(served.version)
        streams: ChoiceStreams | None = None
        try:
            streams = self._open(request, submits)
            if claim is None:
                choice, piece = await streams.next()
            else:
                try:
                    choice, piece = await self._first(request, caller, streams, claim)
                except _NotReadyError as not_ready:
                    reason = on_not_ready(request.fallback, caller)
                    if reason is None:
                        raise not_ready.cause from not_ready.cause.__cause__
                    await streams.close()
                    served = served.by_base(reason)
                    streams = self._open(
                        request,
                        [replace(submit, request_id=uuid.uuid4().hex, version=None, active_from=0) for submit in submits],
                    )
                    choice, piece = await streams.next()
                claim.release()  # with a first token the engine holds a copy and a lease of its own
            if served.fallback is not None:
                self._metrics.fell_back(served.fallback.value)
            yield Part(served, piece, choice, self._echo(request.choice, submits[0].prompt, choice, piece))
            while streams.is_open:
                choice, piece = await streams.next()
                yield Part(None, piece, choice, self._echo(request.choice, submits[0].prompt, choice, piece))
        finally:
            if claim is not None:
                claim.release()
            if streams is not None:
                await streams.close()

    async def _first(self, request: GenerationRequest, caller: Caller, streams: ChoiceStreams, claim: Claim) -> tuple[int, Piece]:
        """Waits for the first tokens, the failure of the load, or the end of patience."""
        patience_s = None
        if on_not_ready(request.fallback, caller) is not None:
            patience_s = self._limits.fallback_after_s
            if request.deadline_s is not None:
                patience_s = min(patience_s, request.deadline_s / 2)
        first = asyncio.ensure_future(streams.next())
        try:
            waited: set[asyncio.Future[Any]] = {first, claim.loaded}
            await asyncio.wait(waited, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if first.done() and first.exception() is None:
                return first.result()
            error = claim.loaded.exception() if claim.loaded.done() else None
            if isinstance(error, VeneerError):
                raise _NotReadyError(error)
            if not claim.loaded.done() and not first.done():
                raise _NotReadyError(UnavailableError("the version is not loaded yet", retry_after_s=1.0))
            return await first
        finally:
            first.cancel()

    def _open(self, request: GenerationRequest, submits: Sequence[Submit]) -> ChoiceStreams:
        return ChoiceStreams(
            [
                TokenStream(
                    self._engine.submit(submit),
                    detokenizer=self._prompts.detokenizer(),
                    stops=StopStrings(request.choice.stop),
                    stop_ids=submit.sampling.stop_token_ids,
                    min_tokens=submit.sampling.min_tokens,
                    max_bytes=self._limits.max_buffer_bytes,
                    max_waiting=self._limits.max_buffer_tokens,
                    slow_reader_s=self._limits.slow_reader_s,
                )
                for submit in submits
            ]
        )

    def _echo(self, asked: Choice, prompt: tuple[int, ...], choice: int, piece: Piece) -> Echo | None:
        if choice or piece.index or not (asked.echo or piece.prompt_logprobs):
            return None
        return Echo(
            prompt if asked.echo else (), self._prompts.tokenizer.decode(prompt) if asked.echo else "", piece.prompt_logprobs
        )

    def _submits(
        self, request: GenerationRequest, caller: Caller, budget: Budget, bound: Binding, *, grammar: str
    ) -> list[Submit]:
        choice = request.choice
        seed = secrets.randbits(63) if choice.seed is None else choice.seed
        salt = hmac.digest(caller.cache_salt, b"veneer.cache\0" + request.sub_salt, hashlib.sha256).hex()
        return [
            Submit(
                request_id=uuid.uuid4().hex,  # the caller's own identifier need not be unique
                tenant=caller.tenant,
                prompt=budget.ids,
                sampling=sampling_of(choice, budget, self._prompts, seed=seed, index=index, grammar=grammar),
                version=bound.served.version,
                active_from=bound.active_from,
                deadline_s=request.deadline_s,
                weight=caller.weight,
                priority=bound.served.priority,
                cache_salt=salt,
            )
            for index in range(choice.n)
        ]

    @contextmanager
    def _place(self, caller: Caller, count: int) -> Iterator[None]:
        """Places among the running streams, one for each choice."""
        if self.draining:
            raise UnavailableError("the node is draining", retry_after_s=0.1)
        limits, running, mine = self._limits, self._streams.total(), self._streams[caller.tenant]
        if running + count > limits.max_streams:
            raise ResourceExhaustedError(f"the node runs {running} streams, at most {limits.max_streams}", retry_after_s=1.0)
        if mine + count > limits.max_streams_per_tenant:
            raise ResourceExhaustedError(
                f"the tenant runs {mine} streams, at most {limits.max_streams_per_tenant}", retry_after_s=1.0
            )
        self._streams[caller.tenant] += count
        self._idle.clear()
        try:
            yield
        finally:
            self._streams[caller.tenant] -= count
            if not self._streams[caller.tenant]:
                del self._streams[caller.tenant]
            if not self._streams:
                self._idle.set()


class _NotReadyError(Exception):
    """The version cannot be loaded in time; `cause` is the answer where the base must not take over."""

    def __init__(self, cause: VeneerError) -> None:
        super().__init__(cause.message)
        self.cause = cause
