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
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from dataplane.asked import Asked, Echo, GenerationRequest, Part
from dataplane.attempts import Attempt, NotLoadedYetError, NotReadyError, refuse
from dataplane.binding import Binding, Served, activate, bind, previous_of
from dataplane.choices import Choice, ChoiceStreams, samplings_of
from dataplane.claims import Claim
from dataplane.engine.messages import Delta, Submit
from dataplane.fallback import FallbackMode, mode_of
from dataplane.frontend.detokenizer import StopStrings
from dataplane.frontend.prompts import Budget, Prompts
from dataplane.metering import Meter, Metering
from dataplane.metrics import Metrics
from dataplane.outcomes import Outcomes
from dataplane.resolution import Answer, Caller, Resolution, Target, TenantLimits
from dataplane.resolve_cache import Key, ResolveCache
from dataplane.token_stream import Piece, TokenStream
from dataplane.transfer import DeletedVersionError, WithdrawnVersionError
from veneer.access import Identity, set_identity
from veneer.call_records import note
from veneer.errors import ResourceExhaustedError, UnavailableError


class Engine(Protocol):
    """What a generation needs of the engine."""

    def submit(self, submit: Submit, /) -> AsyncIterator[Delta]:
        """Runs a request; closing the iterator aborts it."""


class Loader(Protocol):
    """What a generation needs of the prefetcher."""

    def ensure(self, version: str, tenant: str = "", *, max_bytes: int = 0) -> Claim:
        """Has the version's image brought to host memory, and kept there while the claim is held."""

    def expect(self, version: str, tenant: str = "") -> None:
        """Has it brought there for a tenant if that costs no request anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """Bounds of streams.

    Attributes:
        max_streams: Streams at once.
        max_streams_per_tenant: Streams of one tenant at once.
        max_buffer_bytes: What may wait for one reader.
        max_buffer_tokens: Tokens that may.
        slow_reader_s: How long that may stay full.
        fallback_after_s: How long a version may take to load before something else answers, where that may; never more than
            half of what is left to the deadline.
    """

    max_streams: int = 10_000
    max_streams_per_tenant: int = 2_000
    max_buffer_bytes: int = 256 << 10
    max_buffer_tokens: int = 256
    slow_reader_s: float = 10.0
    fallback_after_s: float = 5.0


class _LogLine:
    """What the log line of a request says, as far as it came. Owned by its handler."""

    def __init__(self, request_id: str, target: Target) -> None:
        self._num_output = 0
        self._reasons: dict[int, str] = {}
        note(request_id=request_id, owner=target.owner, adapter=target.adapter, alias=target.alias, version=target.version)
        note(version_number=0, fallback="", prompt_tokens=0, cached_tokens=0, output_tokens=0, finish_reason="")

    def prompt(self, num_tokens: int) -> None:
        """The prompt has so many tokens."""
        note(prompt_tokens=num_tokens)

    def bound(self, served: Served) -> None:
        """This answers, or is to; where the base does, owner and adapter stay those that were asked for."""
        if served.version is not None:
            note(owner=served.owner, adapter=served.adapter, alias=served.alias)
        fallback = "" if served.fallback is None else served.fallback.value
        note(version=served.version or "", version_number=served.version_number, fallback=fallback)

    def saw(self, part: Part) -> None:
        """A part is about to go out."""
        if part.served is not None:
            self.bound(part.served)
        self._num_output += len(part.piece.ids)
        note(output_tokens=self._num_output)
        if (end := part.piece.end) is not None:
            self._reasons[part.choice] = end.reason
            reasons = ",".join(self._reasons[choice] for choice in sorted(self._reasons))
            note(finish_reason=reasons, cached_tokens=end.cached_tokens)


class Generator:
    """Answers requests. Owned by the event loop; keeps nothing of a request after it ended.

    Args:
        resolver: What the control plane says about callers and references.
        prompts: Prompts to ids, ids to text.
        loader: Brings versions to host memory.
        engine: Runs requests.
        metrics: Counts what happens.
        base_digest: Digest of the base that is served.
        metering: What requests may use and what they did.
        limits: Bounds of streams.
        tenant_limits: What a tenant may use at most of whom the catalogue says nothing else; None for no limit.
        outcomes: Counts how requests ended; None: nobody asks.
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
        metering: Metering,
        limits: StreamLimits,
        tenant_limits: TenantLimits | None = None,
        outcomes: Outcomes | None = None,
    ) -> None:
        self._resolver = resolver
        self._prompts = prompts
        self._loader = loader
        self._engine = engine
        self._metrics = metrics
        self._base_digest = base_digest
        self._metering = metering
        self._limits = limits
        self._tenant_limits = tenant_limits or TenantLimits()
        self._outcomes = outcomes or Outcomes()
        self._streams: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    def busiest_tenants(self, max_tenants: int) -> list[tuple[str, int]]:
        """Tenants with streams that run, and how many; those with the most first."""
        return self._streams.most_common(max_tenants)

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
        request_id = request.request_id or uuid.uuid4().hex
        line = _LogLine(request_id, request.target)
        if self.draining:
            raise UnavailableError("the node is draining", retry_after_s=0.1)
        answer = await self._resolver.resolve(Key(request.key_digest, request.target))
        caller = answer.caller
        set_identity(Identity(kind="tenant", key_digest=request.key_digest, key_id=caller.key_id, tenant=caller.tenant))
        mode = mode_of(request.fallback, caller)
        served = bind(
            answer,
            request_id=request_id,
            base_digest=self._base_digest,
            split_unit=request.split_unit,
            mode=mode,
            priority=min(request.priority, caller.max_priority),
        )
        async with self._admitted(answer, request.choice.n) as meter:
            budget = await self._prompts.prepare(request.prompt, max_tokens=request.choice.max_tokens, tenant=caller.tenant)
            line.prompt(len(budget.ids))
            await meter.reserve(prompt=len(budget.ids), output=budget.max_tokens * request.choice.n)
            constraint = request.choice.constraint
            grammar = "" if constraint is None else await self._prompts.grammars.check(constraint, tenant=caller.tenant)
            if request.deadline_s is not None:
                request = replace(request, deadline_s=max(request.deadline_s - (time.monotonic() - started_s), 0.0))
            bound = activate(served, answer, budget.ids)
            line.bound(bound.served)
            asked = Asked(
                request=request,
                caller=caller,
                mode=mode,
                bound=bound,
                previous=previous_of(bound.served, answer),
                submits=self._submits(request, caller, budget, bound, grammar=grammar),
                started_s=started_s,
                submitted_s=time.monotonic(),
                ending=self._outcomes.of(answer, bound.served),
                meter=meter,
            )
            self._expect_others(answer, bound.served)
            counts = (len(budget.ids), *[0] * (request.choice.n - 1))  # the choices of a request have one prompt
            timers = [self._metrics.timer(caller.tenant, started_s, prompt_tokens=count) for count in counts]
            async with aclosing(asked.ending.watch(self._answer(asked))) as parts:
                async for part in parts:
                    self._metrics.saw(timers[part.choice], part.piece)
                    meter.saw(part.served, part.piece)
                    line.saw(part)
                    yield part

    async def _answer(self, asked: Asked) -> AsyncGenerator[Part]:
        attempt = self._try(asked, asked.bound)
        try:
            try:
                choice, piece = await attempt.first(patience_s=asked.patience_s(self._limits.fallback_after_s))
            except (NotReadyError, DeletedVersionError) as error:
                cause = error.cause if isinstance(error, NotReadyError) else error
                instead = asked.instead() if isinstance(error, NotReadyError) else asked.instead_of_deleted()
                if instead is None:
                    raise cause from cause.__cause__
                asked.ending.could_not_load(cause)
                await attempt.close(is_expected=True)
                attempt = self._try(asked, instead)
                try:
                    choice, piece = await attempt.first(patience_s=None)
                except (NotReadyError, WithdrawnVersionError, DeletedVersionError):
                    raise cause from cause.__cause__
            served = attempt.served
            if served.fallback is not None:
                self._metrics.fell_back(served.fallback.value, by="base" if served.version is None else "previous")
            elif attempt.level is not None:
                self._metrics.first_token(attempt.level, time.monotonic() - asked.started_s)
            prompt = asked.submits[0].prompt
            yield Part(served, piece, choice, self._echo(asked.request.choice, prompt, choice, piece))
            while attempt.is_open:
                choice, piece = await attempt.next()
                yield Part(None, piece, choice, self._echo(asked.request.choice, prompt, choice, piece))
        finally:
            await attempt.close()

    def _try(self, asked: Asked, bound: Binding) -> Attempt:
        """Opens the streams, and has the version loaded that they need.

        Raises:
            VeneerError: The request does not wait for a version, and this one is not there.
        """
        version = bound.served.version
        if version is None:
            return Attempt(bound.served, self._open(asked, bound), None)
        claim = self._loader.ensure(version, asked.caller.tenant, max_bytes=self._limits_of(asked.caller).max_host_bytes)
        try:
            if not claim.loaded.done() or claim.loaded.exception() is not None:
                self._foresee(asked, claim)
            return Attempt(bound.served, self._open(asked, bound), claim)
        except BaseException:
            claim.release(is_expected=True)
            raise

    def _foresee(self, asked: Asked, claim: Claim) -> None:
        """A version is not there: nobody waits who does not want to, and what may take its place is brought too."""
        if asked.mode is FallbackMode.FAIL:
            if not claim.loaded.done():
                raise NotLoadedYetError
            try:
                refuse(claim)
            except NotReadyError as not_ready:
                raise not_ready.cause from not_ready.cause.__cause__
        if asked.mode is FallbackMode.PREVIOUS and asked.previous is not None:
            self._loader.expect(asked.previous.version, asked.caller.tenant)

    def _expect_others(self, answer: Answer, served: Served) -> None:
        """The other arms of a split are asked for next."""
        if served.version is not None and isinstance(answer.outcome, Resolution):
            for arm in answer.outcome.arms:
                if arm.version != served.version and arm.state == "READY":
                    self._loader.expect(arm.version, answer.caller.tenant)

    def _open(self, asked: Asked, bound: Binding) -> ChoiceStreams:
        streams = ChoiceStreams(
            [
                TokenStream(
                    self._engine.submit(submit),
                    detokenizer=self._prompts.detokenizer(),
                    stops=StopStrings(asked.request.choice.stop),
                    stop_ids=submit.sampling.stop_token_ids,
                    min_tokens=submit.sampling.min_tokens,
                    max_bytes=self._limits.max_buffer_bytes,
                    max_waiting=self._limits.max_buffer_tokens,
                    slow_reader_s=self._limits.slow_reader_s,
                )
                for submit in asked.submits_for(bound)
            ]
        )
        asked.meter.began(bound.served)
        return streams

    def _echo(self, asked: Choice, prompt: tuple[int, ...], choice: int, piece: Piece) -> Echo | None:
        if choice or piece.index or not (asked.echo or piece.prompt_logprobs):
            return None
        return Echo(
            prompt if asked.echo else (), self._prompts.tokenizer.decode(prompt) if asked.echo else "", piece.prompt_logprobs
        )

    def _limits_of(self, caller: Caller) -> TenantLimits:
        return caller.limits.over(self._tenant_limits)

    def _submits(
        self, request: GenerationRequest, caller: Caller, budget: Budget, bound: Binding, *, grammar: str
    ) -> list[Submit]:
        choice, limits = request.choice, self._limits_of(caller)
        seed = secrets.randbits(63) if choice.seed is None else choice.seed
        salt = hmac.digest(caller.cache_salt, b"veneer.cache\0" + request.sub_salt, hashlib.sha256).hex()
        samplings = samplings_of(choice, budget, self._prompts, seed=seed, grammar=grammar)
        return [
            Submit(
                request_id=uuid.uuid4().hex,  # the caller's own identifier need not be unique
                tenant=caller.tenant,
                prompt=budget.ids,
                sampling=sampling,
                version=bound.served.version,
                active_from=bound.active_from,
                deadline_s=request.deadline_s,
                weight=caller.weight,
                priority=bound.served.priority,
                rank=bound.rank,
                max_rank_rows=limits.max_rank_rows,
                max_arena_bytes=limits.max_arena_bytes,
                cache_salt=salt,
            )
            for sampling in samplings
        ]

    @asynccontextmanager
    async def _admitted(self, answer: Answer, count: int) -> AsyncIterator[Meter]:
        with self.place(answer.caller.tenant, count):
            async with self._metering.request(answer, count) as meter:
                yield meter

    @contextmanager
    def place(self, tenant: str, count: int) -> Iterator[None]:
        """Places among the running streams, one for each choice; those of probes count too.

        Raises:
            ResourceExhaustedError: The node, or the tenant, has too many.
            UnavailableError: The node is draining.
        """
        if self.draining:
            raise UnavailableError("the node is draining", retry_after_s=0.1)
        limits, running, mine = self._limits, self._streams.total(), self._streams[tenant]
        if running + count > limits.max_streams:
            raise ResourceExhaustedError(f"the node runs {running} streams, at most {limits.max_streams}", retry_after_s=1.0)
        if mine + count > limits.max_streams_per_tenant:
            raise ResourceExhaustedError(
                f"the tenant runs {mine} streams, at most {limits.max_streams_per_tenant}", retry_after_s=1.0
            )
        self._streams[tenant] += count
        self._idle.clear()
        try:
            yield
        finally:
            self._streams[tenant] -= count
            if not self._streams[tenant]:
                del self._streams[tenant]
            if not self._streams:
                self._idle.set()
