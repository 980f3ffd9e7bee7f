"""Publishing over the wire: whole or not at all, once for every request_id."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest

from controlplane import catalog_servicer
from controlplane.settings import Settings
from tests.fixtures.controlplane import BASE_DIGEST, Client, Files, World, adapter_files, refused, upload
from tests.fixtures.services import TestDatabase
from veneer.artifact import version_digest
from veneer.controlplane.v1 import catalog_pb2

HEADER = {"adapter": "style", "base": BASE_DIGEST, "request_id": "once"}


@pytest.fixture
async def acme(world: World) -> Client:
    """A tenant, and a base to publish for."""
    await world.base()
    return await world.tenant("acme")


def rows(database: TestDatabase, table: str, where: str = "true") -> int:
    with database.connect() as connection:
        found = connection.execute(f"SELECT count(*) FROM {table} WHERE {where}").fetchone()
    assert found is not None
    return int(found[0])


def stored(settings: Settings) -> list[Path]:
    folder = Path(settings.store_url.removeprefix("file://"))
    return sorted(path for path in folder.rglob("*") if path.is_file())


async def test_a_version_is_what_its_files_and_owner_make_it(world: World, acme: Client) -> None:
    files = adapter_files(1, rank=3)
    response = await acme.catalog.Publish(upload(files, label="first try", **HEADER))
    version = response.version
    digests = {
        "adapter_config.json": hashlib.sha256(files.config).hexdigest(),
        "adapter_model.safetensors": hashlib.sha256(files.weights).hexdigest(),
    }

    assert version.digest == version_digest("acme", BASE_DIGEST, digests)
    assert (version.owner, version.adapter, version.number, version.label) == ("acme", "style", 1, "first try")
    assert version.state == catalog_pb2.VERSION_STATE_READY
    assert version.size_bytes == len(files.config) + len(files.weights)
    assert (version.report.num_pairs, version.report.max_rank, version.report.modules) == (1, 3, ["q_proj"])


async def test_the_first_version_becomes_stable_and_a_later_one_moves_nothing_unless_asked(world: World, acme: Client) -> None:
    first = await world.publish(acme, seed=1)
    second = await world.publish(acme, seed=2)
    third = await world.publish(acme, seed=3, alias="canary")

    assert (first.alias.name, first.alias.generation) == ("stable", 1)
    assert not second.HasField("alias")
    assert (third.alias.name, third.alias.arms[0].version) == ("canary", third.version.digest)
    aliases = (await acme.catalog.GetAdapter(catalog_pb2.GetAdapterRequest(adapter="style"))).adapter.aliases
    assert [(alias.name, alias.arms[0].version) for alias in aliases] == [
        ("canary", third.version.digest),
        ("stable", first.version.digest),
    ]


async def test_a_base_may_be_named(world: World, acme: Client) -> None:
    assert (await world.publish(acme, base="tiny")).version.base_digest == BASE_DIGEST
    code, text = await refused(world.publish(acme, base="huge"))
    assert code == grpc.StatusCode.NOT_FOUND
    assert "base" in text


async def test_the_same_request_again_gives_the_same_answer_and_one_version(
    acme: Client, database: TestDatabase, settings: Settings
) -> None:
    first = await acme.catalog.Publish(upload(adapter_files(1), **HEADER))
    again = await acme.catalog.Publish(upload(adapter_files(1), **HEADER))

    assert again == first
    assert rows(database, "versions") == rows(database, "requests") == 1
    assert rows(database, "changes", "kind = 1") == 1
    assert len(stored(settings)) == 2


async def test_a_request_id_with_other_content_is_refused(acme: Client, database: TestDatabase) -> None:
    await acme.catalog.Publish(upload(adapter_files(1), **HEADER))
    others: list[tuple[Files, dict[str, str]]] = [
        (adapter_files(2), {}),
        (adapter_files(1), {"label": "other"}),
        (adapter_files(1), {"alias": "other"}),
        (adapter_files(1), {"adapter": "other"}),
    ]
    for files, changed in others:
        code, text = await refused(
            lambda files=files, changed=changed: acme.catalog.Publish(upload(files, **{**HEADER, **changed}))
        )
        assert (code, "request_id" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True), changed
    assert rows(database, "versions") == 1


async def test_the_same_content_under_a_new_request_id_names_the_version(world: World, acme: Client) -> None:
    first = await world.publish(acme, seed=1)
    for adapter in ("style", "another"):
        code, text = await refused(world.publish(acme, adapter, seed=1))
        assert code == grpc.StatusCode.ALREADY_EXISTS
        assert first.version.digest in text
        assert "version 1 of adapter 'style'" in text


async def test_equal_content_of_two_tenants_is_two_versions_and_two_objects(
    world: World, acme: Client, settings: Settings
) -> None:
    rival = await world.tenant("rival")
    mine, theirs = await world.publish(acme, seed=1), await world.publish(rival, seed=1)

    assert mine.version.digest != theirs.version.digest
    assert mine.version.number == theirs.version.number == 1
    assert len(stored(settings)) == 4


async def test_fifty_publishes_at_once_are_numbered_without_gaps(world: World, acme: Client, database: TestDatabase) -> None:
    published = await asyncio.gather(*(world.publish(acme, seed=seed) for seed in range(50)))

    assert sorted(one.version.number for one in published) == list(range(1, 51))
    assert [one.alias.name for one in published if one.HasField("alias")] == ["stable"]
    assert rows(database, "changes", "kind = 1") == 50


async def test_fifty_duplicates_at_once_have_one_effect(acme: Client, database: TestDatabase) -> None:
    answers = await asyncio.gather(*(acme.catalog.Publish(upload(adapter_files(1), **HEADER)) for _ in range(50)))

    assert all(answer == answers[0] for answer in answers)
    assert rows(database, "versions") == rows(database, "requests") == 1
    assert rows(database, "changes", "kind = 1") == rows(database, "changes", "kind = 2") == 1


async def test_duplicates_in_two_processes_have_one_effect(
    settings: Settings, world: World, acme: Client, database: TestDatabase
) -> None:
    from controlplane.service import ControlPlane
    from controlplane.vault import open_vault
    from tests.fixtures.controlplane import check_here

    async with ControlPlane(settings, open_vault(settings), check=check_here) as second_plane:
        addresses = await second_plane.server.start()
        async with grpc.aio.insecure_channel(addresses.callers) as channel:
            second = Client.on(channel, acme.secret)
            clients = [acme, second] * 10
            answers = await asyncio.gather(*(client.catalog.Publish(upload(adapter_files(1), **HEADER)) for client in clients))
        await second_plane.server.stop(grace_s=0)

    assert all(answer == answers[0] for answer in answers)
    assert rows(database, "versions") == 1


async def test_a_refused_adapter_leaves_nothing_and_lists_every_fault(
    acme: Client, database: TestDatabase, settings: Settings
) -> None:
    good = adapter_files(1)
    bad = Files(b'{"peft_type": "LORA", "r": 3, "lora_alpha": "x"}', good.weights[:-8])
    code, text = await refused(lambda: acme.catalog.Publish(upload(bad, **HEADER)))

    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "lora_alpha" in text
    assert "adapter_model.safetensors" in text
    assert rows(database, "adapters") == rows(database, "versions") == rows(database, "requests") == 0
    assert stored(settings) == []
    assert (await acme.catalog.Publish(upload(good, **HEADER))).version.number == 1


def part(file: int, data: bytes = b"x") -> catalog_pb2.PublishRequest:
    return catalog_pb2.PublishRequest(part=catalog_pb2.PublishPart(file=file, data=data))


CONFIG, WEIGHTS = catalog_pb2.ADAPTER_FILE_CONFIG, catalog_pb2.ADAPTER_FILE_WEIGHTS
HEAD = catalog_pb2.PublishRequest(header=catalog_pb2.PublishHeader(**HEADER))


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "header"),
        ([part(CONFIG)], "header"),
        ([HEAD, HEAD], "header"),
        ([HEAD], "adapter_config.json"),
        ([HEAD, part(CONFIG)], "adapter_model.safetensors"),
        ([HEAD, part(WEIGHTS)], "adapter_config.json"),
        ([HEAD, part(WEIGHTS), part(CONFIG)], "adapter_config.json"),
        ([HEAD, part(0)], "part.file"),
        ([HEAD, part(CONFIG, b"")], "part.data"),
        ([HEAD, *[part(CONFIG, bytes(1 << 20))] * 2], "adapter_config.json"),
    ],
)
async def test_a_stream_out_of_order_is_refused_by_field(
    acme: Client, messages: Iterable[catalog_pb2.PublishRequest], field: str
) -> None:
    code, text = await refused(lambda: acme.catalog.Publish(iter(messages)))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert field in text


async def test_a_stream_without_a_header_ends(acme: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_servicer, "_HEADER_TIMEOUT_S", 0.05)
    never = asyncio.Event()

    async def silence() -> AsyncIterator[catalog_pb2.PublishRequest]:
        await never.wait()
        yield catalog_pb2.PublishRequest()

    assert await refused(acme.catalog.Publish(silence())) == (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "no header came for 0.05 s",
    )


async def test_an_upload_that_stalls_ends_and_gives_its_place_back(world: World, acme: Client, settings: Settings) -> None:
    world.shorten_waits(part_timeout_s=0.05)

    async def stalling() -> AsyncIterator[catalog_pb2.PublishRequest]:
        yield HEAD
        await asyncio.Event().wait()

    calls: list[Any] = [acme.catalog.Publish(stalling()) for _ in range(settings.max_publishes + 1)]
    answers = await asyncio.gather(*(refused(call) for call in calls))
    assert {code for code, _ in answers} == {grpc.StatusCode.DEADLINE_EXCEEDED}
    world.shorten_waits(part_timeout_s=settings.part_timeout_s)
    assert (await acme.catalog.Publish(upload(adapter_files(1), **HEADER))).version.number == 1


async def test_a_tenant_whose_uploads_stall_holds_nobody_else_up(world: World, acme: Client, settings: Settings) -> None:
    async def stalling() -> AsyncIterator[catalog_pb2.PublishRequest]:
        yield HEAD
        await asyncio.Event().wait()

    calls: list[Any] = [acme.catalog.Publish(stalling()) for _ in range(2 * settings.max_publishes)]
    other = await world.tenant("other")
    assert (await world.publish(other)).version.number == 1
    for call in calls:
        call.cancel()


async def test_dripping_uploads_of_two_tenants_leave_a_third_its_place(world: World, acme: Client) -> None:
    rival, third = await world.tenant("rival"), await world.tenant("third")
    begun = asyncio.Semaphore(0)

    async def dripping() -> AsyncIterator[catalog_pb2.PublishRequest]:
        yield HEAD
        begun.release()
        await asyncio.Event().wait()

    calls: list[Any] = [tenant.catalog.Publish(dripping()) for tenant in (acme, rival) for _ in range(6)]
    for _ in calls:
        await begun.acquire()
    assert (await world.publish(third)).version.number == 1
    for call in calls:
        call.cancel()


async def test_an_upload_without_a_place_is_refused_soon_and_told_when_to_try_again(
    world: World, acme: Client, settings: Settings
) -> None:
    world.shorten_waits(upload_wait_s=0.2)

    async def dripping() -> AsyncIterator[catalog_pb2.PublishRequest]:
        yield HEAD
        await asyncio.Event().wait()

    calls: list[Any] = [acme.catalog.Publish(dripping()) for _ in range(settings.max_publishes_per_tenant + 1)]
    done, _ = await asyncio.wait([asyncio.ensure_future(_outcome(call)) for call in calls], return_when=asyncio.FIRST_COMPLETED)
    [error] = [one.result() for one in done]
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max_publishes_per_tenant is 4" in str(error.details())
    assert ("grpc-retry-pushback-ms", "200") in tuple(error.trailing_metadata())
    for call in calls:
        call.cancel()


async def test_a_slow_upload_ends_and_names_the_least_rate(world: World, acme: Client) -> None:
    world.shorten_waits(upload_rate_grace_s=0.05, min_upload_bytes_per_s=1 << 20)

    async def dripping() -> AsyncIterator[catalog_pb2.PublishRequest]:
        yield HEAD
        yield part(CONFIG, b"{")
        await asyncio.Event().wait()

    code, text = await refused(acme.catalog.Publish(dripping()))
    assert (code, "min_upload_bytes_per_s" in text) == (grpc.StatusCode.DEADLINE_EXCEEDED, True)


async def _outcome(call: Any) -> grpc.aio.AioRpcError:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("it was not refused")


async def test_a_publish_that_its_caller_cancels_leaves_nothing(acme: Client, database: TestDatabase, world: World) -> None:
    first_part_sent = asyncio.Event()

    async def endless() -> AsyncIterator[catalog_pb2.PublishRequest]:
        yield HEAD
        yield part(CONFIG)
        first_part_sent.set()
        await asyncio.Event().wait()

    call = acme.catalog.Publish(endless())
    await first_part_sent.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await world.plane.server.stop(grace_s=None)

    assert rows(database, "adapters") == 0
    pool = world.plane.database.app.sync_engine.pool
    async with asyncio.timeout(60):
        while pool.checkedout():  # noqa: ASYNC110  the plane's own loops borrow connections too, for a moment
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("alias", ["Stable", "a b", "-x", "x-", "../x"])
async def test_an_alias_that_none_can_have_is_refused_before_the_upload(acme: Client, alias: str) -> None:
    code, text = await refused(
        lambda: acme.catalog.Publish(iter([catalog_pb2.PublishRequest(header=catalog_pb2.PublishHeader(alias=alias, **HEADER))]))
    )
    assert (code, text.startswith("header.alias")) == (grpc.StatusCode.INVALID_ARGUMENT, True)
