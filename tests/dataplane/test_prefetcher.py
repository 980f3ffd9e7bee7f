"""What requests, the engine, traffic and hints ask for is told to the engine once, failed to everybody who waits, and counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from dataplane.attempts import NotLoadedYetError
from dataplane.engine.messages import Unloaded
from dataplane.lora.host_cache import TenantHostFullError, TenantHostLimitError
from dataplane.transfer import DeletedVersionError
from tests.dataplane.doubles import OTHER, VERSION, until
from tests.dataplane.prefetching import THIRD, Rig, rigged
from veneer.errors import FailedPreconditionError, NotFoundError, PermissionDeniedError, UnavailableError, VeneerError


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rigged(tmp_path) as made:
        yield made


async def test_requests_for_one_version_share_one_load(rig: Rig) -> None:
    claims = [rig.prefetcher.ensure(VERSION) for _ in range(20)]
    await asyncio.gather(*(claim.loaded for claim in claims))
    assert rig.store.started == [VERSION]
    assert rig.engine.calls == [rig.staged(VERSION)]


async def test_what_is_in_host_memory_is_staged_without_a_load_and_only_once(rig: Rig) -> None:
    await rig.prefetcher.ensure(VERSION).loaded
    rig.prefetcher.forget_engine()
    for _ in range(3):
        assert rig.prefetcher.ensure(VERSION).loaded.done()
    assert rig.store.started == [VERSION]
    assert rig.engine.calls == [rig.staged(VERSION)] * 2


async def test_what_is_on_the_device_needs_no_host_image(rig: Rig) -> None:
    rig.prefetcher.moved(VERSION, "device", seconds=0.1)
    assert rig.prefetcher.ensure(VERSION).loaded.done()
    rig.prefetcher.moved(VERSION, "host", seconds=0)
    await rig.prefetcher.ensure(VERSION).loaded
    assert rig.store.started == [VERSION]


async def test_an_image_is_kept_while_a_claim_is_held(rig: Rig) -> None:
    claim = rig.prefetcher.ensure(VERSION)
    await claim.loaded
    assert rig.cache.reserve(OTHER, size_bytes=900) == ()
    rig.cache.cancel(OTHER)
    claim.release()
    claim.release()
    assert rig.cache.reserve(OTHER, size_bytes=1000) == (VERSION,)


async def test_an_image_that_made_room_is_taken_from_the_engine_and_fetched_again_when_wanted(rig: Rig) -> None:
    claim = rig.prefetcher.ensure(VERSION)
    await claim.loaded
    claim.release()
    rig.prefetcher.evicted(rig.cache.reserve(OTHER, size_bytes=1000))
    rig.cache.cancel(OTHER)
    assert rig.engine.calls[-1] == ("unstage", VERSION, "")
    rig.prefetcher.want(VERSION)
    await rig.prefetcher.ensure(VERSION).loaded
    assert rig.store.started == [VERSION] * 2
    assert rig.engine.calls[-1] == rig.staged(VERSION)


async def test_a_store_that_is_away_for_a_while_is_tried_again(rig: Rig) -> None:
    rig.store.errors = [UnavailableError("away")]
    await rig.prefetcher.ensure(VERSION).loaded
    assert rig.store.started == [VERSION] * 2


@pytest.mark.parametrize(
    ("errors", "status"),
    [
        ([UnavailableError("away")] * 20, "UNAVAILABLE"),
        ([FailedPreconditionError("corrupt")], "FAILED_PRECONDITION"),
        ([OSError("disk")], "INTERNAL"),
    ],
)
async def test_a_load_that_fails_for_good_tells_everybody_and_is_forgotten(
    rig: Rig, errors: list[Exception], status: str
) -> None:
    rig.store.errors = list(errors)
    claims = [rig.prefetcher.ensure(VERSION) for _ in range(2)]
    for claim in claims:
        with pytest.raises(VeneerError) as caught:
            await claim.loaded
        assert caught.value.status == status
    assert rig.engine.calls == [("fail", VERSION, status)]
    rig.store.errors = []
    rig.prefetcher.recheck(VERSION)
    await rig.prefetcher.ensure(VERSION).loaded


async def test_a_slow_load_delays_no_other_version(rig: Rig) -> None:
    rig.store.open.clear()
    slow = rig.prefetcher.ensure(VERSION)
    rig.cache.path(OTHER).write_bytes(b"i" * 100)
    rig.cache.add(OTHER, size_bytes=100)
    assert rig.prefetcher.ensure(OTHER).loaded.done()
    assert not slow.loaded.done()
    rig.store.open.set()
    await slow.loaded


async def test_a_corrupt_image_is_fetched_again_once(rig: Rig) -> None:
    await rig.prefetcher.ensure(VERSION).loaded
    rig.prefetcher.moved(VERSION, "corrupt", seconds=0)
    await rig.prefetcher.ensure(VERSION).loaded
    assert rig.store.started == [VERSION] * 2
    rig.prefetcher.moved(VERSION, "corrupt", seconds=0)
    assert rig.engine.calls[-1] == ("fail", VERSION, "FAILED_PRECONDITION")
    assert not rig.cache.path(VERSION).exists()
    await rig.prefetcher.ensure(VERSION).loaded
    rig.prefetcher.moved(VERSION, "device", seconds=0.1)
    assert rig.store.started == [VERSION] * 3


@pytest.mark.parametrize("let_go", [lambda rig: rig.prefetcher.unload(VERSION), lambda rig: rig.prefetcher.evicted((VERSION,))])
async def test_that_an_image_was_corrupt_is_forgotten_with_the_version(rig: Rig, let_go: Callable[[Rig], None]) -> None:
    await rig.prefetcher.ensure(VERSION).loaded
    rig.prefetcher.moved(VERSION, "corrupt", seconds=0)
    await rig.prefetcher.ensure(VERSION).loaded
    let_go(rig)
    await rig.prefetcher.ensure(VERSION).loaded
    rig.prefetcher.moved(VERSION, "corrupt", seconds=0)
    assert "fail" not in {call[0] for call in rig.engine.calls}


async def test_a_claim_says_where_the_version_was(rig: Rig) -> None:
    first = rig.prefetcher.ensure(VERSION)
    await first.loaded
    second = rig.prefetcher.ensure(VERSION)
    rig.prefetcher.moved(VERSION, "device", seconds=0.1)
    third = rig.prefetcher.ensure(VERSION)
    rig.prefetcher.forget_engine()
    levels = [claim.level for claim in (first, second, third, rig.prefetcher.ensure(VERSION))]
    assert levels == ["store", "host", "device", "disk"]


async def test_requests_for_what_fails_again_and_again_are_answered_without_a_load(rig: Rig) -> None:
    rig.store.errors = [FailedPreconditionError("corrupt")]
    with pytest.raises(FailedPreconditionError):
        await rig.prefetcher.ensure(VERSION).loaded
    for _ in range(5):
        claim = rig.prefetcher.ensure(VERSION)
        assert isinstance(claim.loaded.exception(), FailedPreconditionError)
        claim.release()
    rig.prefetcher.want(VERSION)
    assert rig.engine.calls == [("fail", VERSION, "FAILED_PRECONDITION")] * 2
    rig.prefetcher.hint(VERSION)
    assert (rig.ahead("broken"), rig.store.started) == (1, [VERSION])
    await rig.prefetcher.ensure(OTHER).loaded


async def test_a_change_of_the_catalogue_lets_it_be_tried_again(rig: Rig) -> None:
    rig.store.errors = [FailedPreconditionError("corrupt")]
    with pytest.raises(FailedPreconditionError):
        await rig.prefetcher.ensure(VERSION).loaded
    rig.prefetcher.recheck(VERSION)
    await rig.prefetcher.ensure(VERSION).loaded


async def test_an_image_that_is_lost_after_it_was_there_is_told_to_who_holds_a_claim(rig: Rig) -> None:
    claim = rig.prefetcher.ensure(VERSION)
    await claim.loaded
    rig.prefetcher.moved(VERSION, "corrupt", seconds=0)
    await until(lambda: rig.prefetcher.num_loads == 0)
    assert claim.lost is None
    rig.prefetcher.moved(VERSION, "corrupt", seconds=0)
    assert isinstance(claim.lost, FailedPreconditionError)


@pytest.mark.parametrize(
    "error", [NotFoundError("gone"), FailedPreconditionError("quarantined"), PermissionDeniedError("not by this node")]
)
async def test_a_version_that_may_not_be_served_any_more_is_dropped_everywhere(rig: Rig, error: VeneerError) -> None:
    claim = rig.prefetcher.ensure(VERSION)
    await claim.loaded
    claim.release()
    rig.refused[VERSION] = error
    rig.prefetcher.recheck(VERSION)
    await until(lambda: rig.engine.calls[-1][0] == "unstage")
    assert rig.engine.calls[-1] == ("unstage", VERSION, "drop")
    assert not rig.cache.path(VERSION).exists()


async def test_a_version_stays_while_the_control_plane_is_away_or_content(rig: Rig) -> None:
    for version in (VERSION, OTHER):
        await rig.prefetcher.ensure(version).loaded
    rig.refused[VERSION] = UnavailableError("away")
    rig.prefetcher.recheck_all()
    while len(rig.asked) < 2:
        await rig.was_asked.wait()
        rig.was_asked.clear()
    await asyncio.sleep(0)
    assert set(rig.cache.versions()) == {VERSION, OTHER}


async def test_nobody_is_asked_about_a_version_that_is_not_held(rig: Rig) -> None:
    await rig.prefetcher.ensure(VERSION).loaded
    rig.prefetcher.recheck(THIRD)
    rig.prefetcher.recheck(VERSION)
    await rig.was_asked.wait()
    assert rig.asked == [VERSION]


async def test_only_what_is_meant_of_all_that_is_held_is_asked_about(rig: Rig) -> None:
    for version in (VERSION, OTHER):
        await rig.prefetcher.ensure(version).loaded
    rig.prefetcher.recheck_all(where=lambda version: version == OTHER)
    await rig.was_asked.wait()
    assert rig.asked == [OTHER]


async def test_a_version_that_this_node_may_not_read_any_more_ends_its_load_and_may_be_asked_for_again(rig: Rig) -> None:
    rig.store.open.clear()
    claim = rig.prefetcher.ensure(VERSION)
    await until(lambda: rig.store.started)
    rig.prefetcher.recheck(VERSION)
    rig.refused[VERSION] = PermissionDeniedError("not by this node")
    rig.store.open.set()
    with pytest.raises(UnavailableError, match="may not load the version now"):
        await claim.loaded
    assert rig.cache.versions() == ()
    rig.refused.clear()
    await rig.prefetcher.ensure(VERSION).loaded


async def test_closing_ends_loads_and_those_who_wait(rig: Rig) -> None:
    rig.store.open.clear()
    claims = [rig.prefetcher.ensure(VERSION)]
    await until(lambda: rig.store.started)
    claims.append(rig.prefetcher.ensure(OTHER))
    await rig.prefetcher.close()
    assert rig.prefetcher.num_loads == 0
    for claim in claims:
        with pytest.raises(UnavailableError, match="stopping"):
            await claim.loaded


async def test_a_version_that_was_retired_while_it_was_loaded_never_reaches_the_engine(rig: Rig) -> None:
    rig.store.open.clear()
    claim = rig.prefetcher.ensure(VERSION)
    await asyncio.sleep(0)
    rig.prefetcher.recheck(VERSION)
    rig.refused[VERSION] = FailedPreconditionError("retired")
    rig.store.open.set()
    with pytest.raises(FailedPreconditionError, match="any more"):
        await claim.loaded
    assert ("unstage", VERSION, "drop") in rig.engine.calls
    assert rig.staged(VERSION) not in rig.engine.calls
    assert rig.cache.versions() == ()
    rig.prefetcher.unloaded(Unloaded(VERSION))
    unload = rig.unloads.last(VERSION)
    assert unload is not None
    assert unload.disk_bytes == 100


async def test_a_version_that_changed_while_it_was_loaded_is_served_while_nobody_can_be_asked(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataplane.prefetcher._RECHECK_AGAIN_S", 0.01)
    rig.store.open.clear()
    claim = rig.prefetcher.ensure(VERSION)
    await asyncio.sleep(0)
    rig.prefetcher.recheck(VERSION)
    rig.refused[VERSION] = UnavailableError("away")
    rig.store.open.set()
    await claim.loaded
    rig.refused[VERSION] = FailedPreconditionError("retired")
    await until(lambda: ("unstage", VERSION, "drop") in rig.engine.calls)
    assert rig.cache.versions() == ()


async def test_a_version_that_is_unloaded_goes_from_engine_and_disk_and_comes_back_for_a_request(rig: Rig) -> None:
    await rig.prefetcher.ensure(VERSION).loaded
    rig.prefetcher.unload(VERSION)
    assert rig.engine.calls[-1] == ("unstage", VERSION, "drop")
    assert rig.cache.versions() == ()
    assert rig.unloads.num_pending == 1
    await rig.prefetcher.ensure(VERSION).loaded
    assert rig.store.started == [VERSION, VERSION]


async def test_a_question_that_the_control_plane_could_not_answer_is_asked_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataplane.prefetcher._RECHECK_AGAIN_S", 0.01)
    await rig.prefetcher.ensure(VERSION).loaded
    rig.refused[VERSION] = UnavailableError("away")
    rig.prefetcher.recheck(VERSION)
    await until(lambda: len(rig.asked) >= 2)
    rig.refused[VERSION] = FailedPreconditionError("retired")
    await until(lambda: rig.cache.versions() == ())


async def test_an_image_that_made_room_before_it_was_opened_is_not_taken_for_corrupt(rig: Rig) -> None:
    for _ in range(3):
        claim = rig.prefetcher.ensure(VERSION)
        await claim.loaded
        claim.release()
        rig.prefetcher.evicted(rig.cache.reserve(OTHER, size_bytes=1000))
        rig.cache.cancel(OTHER)
        rig.prefetcher.moved(VERSION, "corrupt", seconds=0)
    assert rig.store.started == [VERSION] * 3
    assert ("fail", VERSION, "FAILED_PRECONDITION") not in rig.engine.calls


async def test_what_is_too_large_for_one_tenant_is_loaded_for_another_at_once(rig: Rig) -> None:
    rig.store.errors = [TenantHostLimitError("small may have 60", tenant="small") for _ in range(5)]
    with pytest.raises(TenantHostLimitError):
        await rig.prefetcher.ensure(VERSION, "small", max_bytes=60).loaded
    rig.store.errors.clear()
    await rig.prefetcher.ensure(VERSION, "owner").loaded


@pytest.mark.parametrize("kind", [TenantHostLimitError, TenantHostFullError])
async def test_a_tenant_reads_nothing_of_anothers_limit_that_ends_the_load_for_both(
    rig: Rig, kind: type[TenantHostLimitError | TenantHostFullError]
) -> None:
    rig.store.open.clear()
    rig.store.errors = [kind("small may have 60 and uses 40", tenant="small") for _ in range(100)]
    small = rig.prefetcher.ensure(VERSION, "small", max_bytes=60)
    owner = rig.prefetcher.ensure(VERSION, "owner")
    rig.store.open.set()
    with pytest.raises(kind):
        await small.loaded
    with pytest.raises(NotLoadedYetError) as refused:  # no fault of the version's
        await owner.loaded
    assert "small" not in refused.value.message
    assert refused.value.retry_after_s
    assert rig.engine.calls == [("fail", VERSION, "UNAVAILABLE")]


async def test_what_was_admitted_before_a_deletion_finishes_and_the_version_goes_with_the_last(rig: Rig) -> None:
    first = rig.prefetcher.ensure(VERSION, "acme")
    await first.loaded
    second = rig.prefetcher.ensure(VERSION, "acme")
    first.settle()
    rig.refused[VERSION] = NotFoundError("no such version")
    rig.prefetcher.recheck(VERSION)
    await until(lambda: rig.asked == [VERSION])
    await asyncio.sleep(0)
    dropped = ("unstage", VERSION, "drop")
    assert VERSION in rig.cache
    assert dropped not in rig.engine.calls
    second.settle()
    first.release()
    assert VERSION in rig.cache
    second.release()
    assert VERSION not in rig.cache
    assert rig.engine.calls[-1] == dropped


async def test_a_version_that_comes_back_while_its_last_requests_run_stays(rig: Rig) -> None:
    claim = rig.prefetcher.ensure(VERSION, "acme")
    await claim.loaded
    rig.refused[VERSION] = NotFoundError("no such version")
    rig.prefetcher.recheck(VERSION)
    await until(lambda: rig.asked == [VERSION])
    del rig.refused[VERSION]
    rig.prefetcher.recheck(VERSION)
    await until(lambda: rig.asked == [VERSION] * 2)
    await asyncio.sleep(0)
    claim.release()
    assert VERSION in rig.cache


async def test_a_version_that_is_deleted_while_it_is_loaded_is_not_found(rig: Rig) -> None:
    rig.store.open.clear()
    claim = rig.prefetcher.ensure(VERSION, "acme")
    rig.refused[VERSION] = NotFoundError("no such version")
    rig.prefetcher.recheck(VERSION)
    rig.store.open.set()
    with pytest.raises(DeletedVersionError) as caught:
        await claim.loaded
    assert caught.value.status == "NOT_FOUND"
    assert VERSION not in rig.cache
    assert rig.prefetcher.circuits() == []
    claim.release()


async def test_a_version_that_is_quarantined_goes_at_once(rig: Rig) -> None:
    claim = rig.prefetcher.ensure(VERSION, "acme")
    await claim.loaded
    rig.refused[VERSION] = FailedPreconditionError("the version is quarantined")
    rig.prefetcher.recheck(VERSION)
    await until(lambda: VERSION not in rig.cache)
    claim.release()
