"""What counts as failed by a version and what does not, and that a batch is told until it is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import replace

import pytest

from dataplane.attempts import NotLoadedYetError
from dataplane.fallback import FallbackMode
from dataplane.lora.holdings import TenantLimitError
from dataplane.lora.host_cache import TenantHostLimitError
from dataplane.outcomes import Arm, OutcomeReporter, Outcomes, is_failure
from dataplane.report_client import ArmOutcomes
from dataplane.resolution import Target
from dataplane.transfer import UnloadableVersionError, WithdrawnVersionError
from tests.dataplane.doubles import VERSION, answer, delta, resolution
from tests.dataplane.stage import REQUEST, Stage, hang_after_first_token, hang_in_engine
from veneer import errors
from veneer.errors import VeneerError

ARM = Arm("acme", "bot", "stable", 1, VERSION)


@pytest.fixture(autouse=True)
def split(stage: Stage) -> None:
    """Every request is for the first arm of a split."""
    stage.says = answer(resolution(9_999, 1))


def counted(stage: Stage) -> list[tuple[int, int]]:
    return [(one.ok, one.failed) for one in stage.outcomes.take()]


@pytest.mark.parametrize(
    ("error", "is_counted"),
    [
        (errors.InternalError("x"), True),
        (errors.UnavailableError("x"), True),
        (errors.FailedPreconditionError("x"), True),
        (errors.DataLossError("x"), True),
        (UnloadableVersionError("x"), True),
        (ValueError("not one of ours"), True),
        (errors.InvalidArgumentError("x"), False),
        (errors.UnauthenticatedError("x"), False),
        (errors.PermissionDeniedError("x"), False),
        (errors.NotFoundError("x"), False),
        (errors.AlreadyExistsError("x"), False),
        (errors.AbortedError("x"), False),
        (errors.ResourceExhaustedError("quota"), False),
        (errors.DeadlineExceededError("x"), False),
        (NotLoadedYetError(), False),
        (TenantLimitError("rank rows"), False),
        (TenantHostLimitError("bytes", tenant="acme"), False),
        (WithdrawnVersionError("x"), False),
        (asyncio.CancelledError(), False),
        (GeneratorExit(), False),
    ],
)
def test_what_the_service_or_the_version_did_counts_and_what_the_caller_did_does_not(
    error: BaseException, *, is_counted: bool
) -> None:
    assert is_failure(error) is is_counted


async def test_an_answer_that_comes_to_its_end_is_counted_for_the_arm_at_its_generation(stage: Stage) -> None:
    await stage.run()
    await stage.run()
    assert stage.outcomes.take() == [
        ArmOutcomes(owner="acme", adapter="bot", alias="stable", generation=1, version=VERSION, ok=2, failed=0)
    ]
    assert stage.outcomes.take() == []


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize(
    ("error", "counts"), [(errors.InternalError("x"), [(0, 1)]), (errors.ResourceExhaustedError("slow reader"), [])]
)
async def test_one_that_ends_badly_is_counted_by_why(
    stage: Stage, error: VeneerError, counts: list[tuple[int, int]], tokens: int
) -> None:
    stage.engine.script = (*[delta(70)] * tokens, error)
    with pytest.raises(type(error)):
        await stage.run()
    assert counted(stage) == counts


async def test_a_caller_that_goes_away_is_not_counted(stage: Stage) -> None:
    hang_after_first_token(stage)
    async with aclosing(stage.generator.run(REQUEST)) as parts:
        await anext(parts)
    assert counted(stage) == []
    hang_in_engine(stage)
    running = asyncio.create_task(stage.run())
    await asyncio.sleep(0)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert counted(stage) == []


async def test_without_a_split_without_an_alias_and_on_the_base_nothing_is_counted(stage: Stage) -> None:
    for says in (answer(resolution(1)), answer(resolution()), answer(replace(resolution(1, 1), alias=""))):
        stage.says = says
        await stage.run(replace(REQUEST, target=Target("bot")))
    assert counted(stage) == []


@pytest.mark.parametrize("mode", [FallbackMode.NONE, FallbackMode.NOT_READY, FallbackMode.FAIL])
async def test_a_version_that_cannot_be_loaded_failed_even_where_the_base_answers(stage: Stage, mode: FallbackMode) -> None:
    stage.loader.missing[VERSION] = UnloadableVersionError("broken")
    hang_in_engine(stage)
    with suppress(VeneerError):
        await stage.run(replace(REQUEST, fallback=mode))
    assert counted(stage) == [(0, 1)]


async def test_a_version_that_cannot_be_loaded_counts_once_where_what_should_answer_fails_too(stage: Stage) -> None:
    stage.loader.missing[VERSION] = UnloadableVersionError("broken")
    hang_in_engine(stage)
    stage.engine.script = (errors.InternalError("the base too"),)
    with pytest.raises(VeneerError):
        await stage.run(replace(REQUEST, fallback=FallbackMode.NOT_READY))
    assert counted(stage) == [(0, 1)]


@pytest.mark.parametrize("mode", [FallbackMode.NOT_READY, FallbackMode.FAIL])
async def test_a_version_that_is_only_cold_did_not_fail(stage: Stage, mode: FallbackMode) -> None:
    stage.loader.missing[VERSION] = None
    hang_in_engine(stage)
    stage.limits = replace(stage.limits, fallback_after_s=0.01)
    stage.generator = stage.build()
    with suppress(NotLoadedYetError):
        await stage.run(replace(REQUEST, fallback=mode))
    assert counted(stage) == []


async def test_a_prompt_that_does_not_invoke_the_version_says_nothing_of_it(stage: Stage) -> None:
    stage.says = answer(resolution(9_999, 1, invocation=(400, 401)))
    await stage.run()
    assert counted(stage) == []


class Plane:
    """Takes batches, or not."""

    def __init__(self, *fates: VeneerError | None) -> None:
        self.fates = list(fates)
        self.batches: list[tuple[str, int, Sequence[ArmOutcomes]]] = []

    async def take(self, epoch: str, sequence: int, outcomes: Sequence[ArmOutcomes]) -> None:
        self.batches.append((epoch, sequence, tuple(outcomes)))
        if self.fates and (fate := self.fates.pop(0)) is not None:
            raise fate


async def test_a_batch_goes_as_it_is_until_it_is_taken_and_the_next_one_after_it() -> None:
    outcomes, plane = Outcomes(), Plane(errors.UnavailableError("away"), errors.InternalError("x"))
    reporter = OutcomeReporter(outcomes, plane.take)
    outcomes.count(ARM, is_ok=True)
    for _ in range(2):
        with suppress(VeneerError):
            await reporter.flush()
        outcomes.count(ARM, is_ok=False)
    await reporter.flush()
    await reporter.flush()
    assert [sequence for _, sequence, _ in plane.batches] == [1, 1, 1, 2]
    assert plane.batches[0] == plane.batches[1] == plane.batches[2]
    assert [(one.ok, one.failed) for _, _, batch in plane.batches[2:] for one in batch] == [(1, 0), (0, 2)]


async def test_a_batch_that_waited_for_longer_than_it_is_remembered_is_lost_and_the_next_one_is_told() -> None:
    outcomes, plane, now = Outcomes(), Plane(errors.UnavailableError("away"), errors.UnavailableError("away")), [0.0]
    reporter = OutcomeReporter(outcomes, plane.take, clock=lambda: now[0])
    outcomes.count(ARM, is_ok=True)
    for hours in (0, 11):
        now[0] = hours * 3600
        with suppress(VeneerError):
            await reporter.flush()
    outcomes.count(ARM, is_ok=False)
    now[0] = 13 * 3600
    await reporter.flush()
    assert [sequence for _, sequence, _ in plane.batches] == [1, 1, 2]
    assert [(one.ok, one.failed) for _, _, batch in plane.batches[2:] for one in batch] == [(0, 1)]
    assert outcomes.num_lost == 1


async def test_each_start_has_an_epoch_of_its_own_and_batches_are_bounded() -> None:
    outcomes, plane = Outcomes(), Plane()
    for place in range(2_500):
        outcomes.count(replace(ARM, adapter=f"bot-{place}"), is_ok=True)
    await OutcomeReporter(outcomes, plane.take).flush()
    outcomes.count(ARM, is_ok=True)
    await OutcomeReporter(outcomes, plane.take).flush()
    assert [len(batch) for _, _, batch in plane.batches] == [1000, 1000, 500, 1]
    assert len({epoch for epoch, _, _ in plane.batches}) == 2


async def test_counts_of_more_arms_than_may_wait_are_lost_and_that_is_counted() -> None:
    outcomes = Outcomes()
    for place in range(10_001):
        outcomes.count(replace(ARM, generation=place), is_ok=True)
    outcomes.count(ARM, is_ok=True)
    assert outcomes.num_lost == 1


async def test_telling_goes_on_after_failures() -> None:
    outcomes, plane = Outcomes(), Plane(errors.UnavailableError("away"))
    outcomes.count(ARM, is_ok=True)
    running = asyncio.create_task(OutcomeReporter(outcomes, plane.take, interval_s=0.001).run())
    while len(plane.batches) < 2:  # noqa: ASYNC110  the reporter tells nobody when it has told
        await asyncio.sleep(0.001)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert plane.batches[0] == plane.batches[1]
