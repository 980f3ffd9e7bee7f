"""A generator with everything around it scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

from prometheus_client import CollectorRegistry

from dataplane.asked import GenerationRequest, Part
from dataplane.binding import Served
from dataplane.claims import Claim
from dataplane.frontend.prompts import Prompts, TokenPrompt
from dataplane.generation import Generator, StreamLimits
from dataplane.metering import Metering
from dataplane.metrics import Metrics
from dataplane.outcomes import Outcomes
from dataplane.quotas import Demand, Leased, Quotas
from dataplane.resolution import Answer, Target
from dataplane.resolve_cache import Key, ResolveCache
from dataplane.usage import Use
from tests.dataplane.doubles import BASE, VERSION, ScriptedEngine, answer, delta, resolution
from veneer.errors import VeneerError

REQUEST = GenerationRequest(key_digest=b"k" * 32, target=Target("bot"), prompt=TokenPrompt((5, 6)), request_id="mine")


class Loader:
    """A prefetcher whose loads end when the test says.

    Attributes:
        ready: Whether everything is loaded but what is `missing`: versions that never come, and why if that is known.
        crowded: Versions that the device has no room for.
        expected: Versions that traffic expects.
        kept: Of each claim that was given back, whether its load should go on.
    """

    def __init__(self) -> None:
        self.claims: list[Claim] = []
        self.asked: list[tuple[str, str]] = []
        self.expected: list[str] = []
        self.kept: list[bool] = []
        self.held = 0
        self.ready = True
        self.missing: dict[str, VeneerError | None] = {}
        self.crowded: set[str] = set()

    def ensure(self, version: str, tenant: str = "", *, max_bytes: int = 0) -> Claim:
        self.held += 1
        self.asked.append((version, tenant))
        ready = self.ready and version not in self.missing
        claim = Claim(self._let_go, level="host" if ready else "store")
        self.claims.append(claim)
        if ready:
            claim.loaded.set_result(None)
            if version not in self.crowded:
                claim.placed.set_result(None)
        elif (error := self.missing.get(version)) is not None:
            claim.fail(error)
        return claim

    def expect(self, version: str, tenant: str = "") -> None:
        self.expected.append(version)

    def _let_go(self, claim: Claim, is_expected: bool) -> None:
        self.held -= 1
        self.kept.append(is_expected)


class Entry:
    """What a request says of its use, kept in lists."""

    def __init__(self, told: list[Use], ended: list[Use]) -> None:
        self.tell = told.append
        self.end = ended.append


class Stage:
    """A generator over a scripted engine, a scripted control plane and a scripted loader."""

    def __init__(self, model_dir: Path) -> None:
        self.says: Answer | VeneerError = answer(resolution(1))
        self.engine = ScriptedEngine((delta(70), delta(71, 72, index=1, finish="length")))
        self.loader = Loader()
        self.prompts = Prompts(model_dir, max_context=64, vocab_size=500)
        self.limits = StreamLimits(max_streams=3, max_streams_per_tenant=2, fallback_after_s=30)
        self.registry = CollectorRegistry()
        self.quotas = Quotas(lease_nothing)
        self.told: list[Use] = []
        self.uses: list[Use] = []
        self.metrics = Metrics(self.registry, base_name="tiny")
        self.outcomes = Outcomes()
        self.generator = self.build()

    def counter(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)

    def build(self) -> Generator:
        return Generator(
            resolver=ResolveCache(self._ask, soft_age_s=0),
            prompts=self.prompts,
            loader=self.loader,
            engine=self.engine,
            metrics=self.metrics,
            base_digest=BASE,
            metering=Metering(self.quotas, lambda: Entry(self.told, self.uses)),
            limits=self.limits,
            outcomes=self.outcomes,
        )

    async def _ask(self, key: Key) -> Answer:
        if isinstance(self.says, VeneerError):
            raise self.says
        return self.says

    async def run(self, request: GenerationRequest = REQUEST) -> list[Part]:
        async with aclosing(self.generator.run(request)) as parts:
            return [part async for part in parts]

    async def served(self, request: GenerationRequest = REQUEST) -> Served:
        served = (await self.run(request))[0].served
        assert served is not None
        return served

    def holds_nothing(self) -> bool:
        return self.loader.held == 0 and self.generator.num_streams == 0 and len(asyncio.all_tasks()) == 1


async def lease_nothing(demands: Sequence[Demand]) -> Leased:
    """A control plane that is never asked, since no tenant has quotas."""
    raise AssertionError(demands)


def hang_in_engine(stage: Stage) -> None:
    stage.engine.gates[VERSION] = asyncio.Event()


def hang_in_load(stage: Stage) -> None:
    stage.loader.ready = False
    hang_in_engine(stage)


def hang_after_first_token(stage: Stage) -> None:
    stage.engine.script = (delta(70),)
