"""Probes of versions that were just published: prompts on version and base, and samples of what the engine computes.

The control plane asks through the change feed; the first node of the base that takes a probe on does it, and says what it
measured. The control plane judges. A node that cannot do it now says nothing, and another may take it on after a while. One probe
at a time runs on a node, within the limits of the tenant whose version it is: its prompts have places among the tenant's streams,
and the version is loaded and run as for a request of that tenant.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from dataplane.claims import Claim
from dataplane.engine.messages import MAX_LOGPROBS, Delta, Logprobs, Sampling, Submit
from dataplane.engine.samples import sample_columns, sample_input
from dataplane.frontend.prompts import Prompts, TextPrompt
from dataplane.invocation import find_start
from dataplane.report_client import ProbeMeasures, ProbeOrder
from dataplane.resolution import TenantLimits
from dataplane.store import StoredVersion
from veneer.artifact import Pair
from veneer.errors import (
    DataLossError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    VeneerError,
)

_log = logging.getLogger(__name__)

TEXTS: Final = ("The answer is", "1, 2, 3,", "Dear customer")
"""What the prompts say; short enough for every base."""
TOLERANCES: Final = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2, "fp8": 0.15}
"""Difference of a sample from its float32 reference, as a part of the reference's norm, that rounding alone can make."""

_MAX_ASKED = 64
_MAX_PAIRS = 6
_MAX_TOKENS = 4
_LOAD_S = 30.0
_RUN_S = 30.0
_MAX_FAULT = 500
_NO_NUMBER = 1e30  # stands for an error that is not finite, which a report cannot hold


class Catalog(Protocol):
    """Where probes come from."""

    async def take_probe(self, version: str) -> ProbeOrder:
        """Takes one on; NotFoundError when there is none to take."""

    async def report_probe(self, version: str, measures: ProbeMeasures) -> None:
        """Says what it gave."""


class Engine(Protocol):
    """What a probe needs of the engine."""

    def submit(self, submit: Submit, /) -> AsyncIterator[Delta]:
        """Runs a request."""

    async def take_samples(self, version: str, places: tuple[tuple[int, int], ...]) -> tuple[tuple[float, ...], ...]:
        """Has the engine's form compute pairs of a version that a request runs on."""


class Loader(Protocol):
    """Who brings versions to host memory; the prefetcher."""

    def ensure(self, version: str, tenant: str = "", *, max_bytes: int = 0) -> Claim:
        """Has a version's image brought there, and kept while the claim is held."""


class Store(Protocol):
    """Where the stored files are read."""

    async def read(self, version: str) -> AbstractContextManager[StoredVersion]:
        """Reads and checks a version's files."""


@dataclass(frozen=True, slots=True)
class _Run:
    """What one prompt gave: logprobs of the prompt's tokens but the first, and of the first token of the output."""

    prompt: tuple[Logprobs, ...]
    first: Logprobs


class Prober:
    """Does probes, one after the other. Owned by the event loop; `run` is its one task.

    Args:
        catalog: Where they come from.
        engine: Runs them.
        loader: Brings versions.
        store: Reads the stored files.
        prompts: Texts to ids.
        dtype: Type in which adapters are held.
        place: Holds so many places among a tenant's streams.
        limits: What a tenant may use at most of whom the catalogue says nothing else.
    """

    def __init__(
        self,
        catalog: Catalog,
        *,
        engine: Engine,
        loader: Loader,
        store: Store,
        prompts: Prompts,
        dtype: str,
        place: Callable[[str, int], AbstractContextManager[None]],
        limits: TenantLimits,
    ) -> None:
        self._catalog = catalog
        self._engine = engine
        self._loader = loader
        self._store = store
        self._prompts = prompts
        self._tolerance = TOLERANCES[dtype]
        self._place = place
        self._limits = limits
        self._asked: asyncio.Queue[tuple[str, str]] = asyncio.Queue(_MAX_ASKED)

    def ask(self, tenant: str, version: str) -> None:
        """Notes that a probe of a tenant's version is asked for; beyond what may wait, other nodes take it on, or nobody."""
        with suppress(asyncio.QueueFull):
            self._asked.put_nowait((tenant, version))

    async def run(self) -> None:
        """Does what is asked for until cancelled."""
        while True:
            tenant, version = await self._asked.get()
            try:
                with self._place(tenant, len(TEXTS)):
                    await self.probe(version)
            except NotFoundError:  # another node has it, or it is for another base
                continue
            except (VeneerError, TimeoutError) as error:
                _log.warning("a probe was not done", extra={"version": version, "cause": type(error).__name__})
            except Exception:  # noqa: BLE001  whatever one version brings about, the next has its probe
                _log.exception("a probe broke off", extra={"version": version})

    async def probe(self, version: str) -> None:
        """Takes a probe on, does it and says what it gave.

        Raises:
            NotFoundError: There is none to take.
            VeneerError: It could not be done now.
        """
        order = await self._catalog.take_probe(version)
        order = replace(order, limits=order.limits.over(self._limits))
        claim = self._loader.ensure(version, order.owner, max_bytes=order.limits.max_host_bytes)
        try:
            async with asyncio.timeout(_LOAD_S):
                await asyncio.shield(claim.loaded)
            measures = await self._measure(order)
        except (FailedPreconditionError, InvalidArgumentError, DataLossError) as error:  # it would be so on every node
            measures = ProbeMeasures(fault=f"{error.status}: {error.message}"[:_MAX_FAULT])
        finally:
            claim.release()
        await self._catalog.report_probe(version, measures)

    async def _measure(self, order: ProbeOrder) -> ProbeMeasures:
        prompts = [(*await self._ids(text), *order.invocation_tokens) for text in TEXTS]
        with await self._store.read(order.version) as stored:
            pairs = _choose(stored)
            references = await asyncio.to_thread(_references, stored, pairs)
        places = tuple((pair.layer, pair.slice) for pair in pairs)
        async with asyncio.timeout(_RUN_S):
            of_base = await self._all(order, prompts, None)
            samples = asyncio.ensure_future(self._samples(order.version, places))
            try:
                runs = await self._all(order, prompts, order.version)
                values = await samples
            except InternalError:
                return self._not_finite()
            finally:
                samples.cancel()
        compared = [_difference(run, base) for run, base in zip(runs, of_base, strict=True)]
        if not all(math.isfinite(most) for _, most in compared):  # logits so large that a token has no probability at all
            return self._not_finite()
        errors = [_error(np.asarray(found, np.float32), right) for found, right in zip(values, references, strict=False)]
        return ProbeMeasures(
            finite=True,
            num_prompts=len(prompts),
            num_tokens=sum(count for count, _ in compared),
            max_difference=max(most for _, most in compared),
            num_samples=len(errors),
            max_error=max(errors, default=0.0),
            tolerance=self._tolerance,
        )

    def _not_finite(self) -> ProbeMeasures:
        return ProbeMeasures(finite=False, num_prompts=len(TEXTS), tolerance=self._tolerance)

    async def _ids(self, text: str) -> tuple[int, ...]:
        return (await self._prompts.prepare(TextPrompt(text), max_tokens=_MAX_TOKENS)).ids

    async def _samples(self, version: str, places: tuple[tuple[int, int], ...]) -> tuple[tuple[float, ...], ...]:
        return await self._engine.take_samples(version, places) if places else ()

    async def _all(self, order: ProbeOrder, prompts: Sequence[Sequence[int]], version: str | None) -> list[_Run]:
        return await asyncio.gather(*(self._run(order, ids, version) for ids in prompts))

    async def _run(self, order: ProbeOrder, ids: Sequence[int], version: str | None) -> _Run:
        sampling = Sampling(max_tokens=_MAX_TOKENS, temperature=0.0, logprobs=MAX_LOGPROBS, prompt_logprobs=0)
        submit = Submit(
            request_id=uuid.uuid4().hex,
            tenant=order.owner,
            prompt=tuple(ids),
            sampling=sampling,
            version=version,
            active_from=0 if version is None else find_start(ids, order.invocation_tokens) or 0,
            max_rank_rows=order.limits.max_rank_rows,
            max_arena_bytes=order.limits.max_arena_bytes,
        )
        deltas = [delta async for delta in self._engine.submit(submit)]
        first = deltas[0]
        return _Run(first.prompt_logprobs, first.logprobs[0])


def _choose(stored: StoredVersion) -> list[Pair]:
    """Picks pairs whose product alone is what the engine adds: inside the layers, without magnitude or bias; spread over all."""
    biased = {(bias.layer, bias.slice) for bias in stored.artifact.biases}
    plain = [
        pair
        for pair in stored.artifact.pairs
        if pair.layer < stored.num_layers
        and pair.magnitude is None
        and pair.lora_bias is None
        and (pair.layer, pair.slice) not in biased
    ]
    places = np.linspace(0, len(plain) - 1, min(_MAX_PAIRS, len(plain))).astype(int)
    return [plain[place] for place in places]


def _references(stored: StoredVersion, pairs: Sequence[Pair]) -> list[npt.NDArray[np.float32]]:
    """Computes the samples in float32 from the stored files alone."""
    found = []
    for pair, a, b in replace(stored.artifact, pairs=tuple(pairs)).read(stored.weights):
        product = np.float32(pair.scaling) * (sample_input(a.shape[1]) @ a.T) @ b.T
        found.append(product[:, sample_columns(b.shape[0])].ravel())
    return found


def _difference(run: _Run, base: _Run) -> tuple[int, float]:
    """Counts the tokens that both rate, and returns the largest difference; infinite where one is no number."""
    differences = [abs(ours.logprob - theirs.logprob) for ours, theirs in zip(run.prompt, base.prompt, strict=True)]
    theirs = dict(base.first.top)
    differences += [abs(logprob - theirs[token]) for token, logprob in run.first.top if token in theirs]
    if not all(map(math.isfinite, differences)):
        return len(differences), math.inf
    return len(differences), max(differences, default=0.0)


def _error(found: npt.NDArray[np.float32], right: npt.NDArray[np.float32]) -> float:
    """Returns the difference's norm over the reference's; 1 at most where the reference is zero and the sample is not."""
    right, found = right.astype(np.float64), found.astype(np.float64)  # squares of what float32 holds
    if not (np.isfinite(found).all() and np.isfinite(right).all()):
        return _NO_NUMBER
    size, difference = float(np.linalg.norm(right)), float(np.linalg.norm(found - right))
    return difference / size if size else float(difference > 0)
