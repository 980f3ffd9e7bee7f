from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from veneer import client as client_module
from veneer.access import Identity, Rule, method_names
from veneer.client import CONFIG_NAME, WEIGHTS_NAME, Client, Event
from veneer.controlplane.v1 import catalog_pb2, catalog_pb2_grpc, tenants_pb2, tenants_pb2_grpc
from veneer.dataplane.v1 import generation_pb2 as pb
from veneer.dataplane.v1 import generation_pb2_grpc
from veneer.errors import (
    AbortedError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
    Violation,
)
from veneer.server import PlaneServer, ServerOptions, Service

KEY = "vnr_" + "k" * 43
SERVED = pb.GenerateResponse(served=pb.Served(base_digest="b"), chunk=pb.Chunk(index=0, ids=[7], text="a"))
LAST = pb.GenerateResponse(chunk=pb.Chunk(index=1, ids=[8], text="b"), finish=pb.Finish(completion_tokens=2))


class Generation(generation_pb2_grpc.GenerationServiceServicer):
    """Plays a script: messages are sent, exceptions raised, events waited for."""

    def __init__(self) -> None:
        self.scripts: list[list[Any]] = []
        self.requests: list[pb.GenerateRequest] = []
        self.ended = asyncio.Event()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:  # type: ignore[override]
        self.requests.append(request)
        try:
            for step in self.scripts.pop(0):
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    yield step
        finally:
            self.ended.set()


class Catalog(catalog_pb2_grpc.CatalogServiceServicer):
    """Keeps what was published; each other method answers as told."""

    def __init__(self) -> None:
        self.received: dict[int, bytes] = {}
        self.headers: list[catalog_pb2.PublishHeader] = []
        self.refuse_after: int | None = None
        self.away: list[UnavailableError] = []
        self.calls: list[str] = []
        self.request_ids: list[str] = []
        self.error: Exception | None = None

    async def Publish(self, request_iterator: Any, context: Any) -> catalog_pb2.PublishResponse:  # type: ignore[override]
        parts = 0
        async for request in request_iterator:
            if request.HasField("header"):
                self.headers.append(request.header)
                continue
            parts += 1
            if self.away:
                raise self.away.pop()
            assert len(request.part.data) <= 1 << 20
            self.received[request.part.file] = self.received.get(request.part.file, b"") + request.part.data
            if parts == self.refuse_after:
                raise InvalidArgumentError.of([Violation("adapter_config.json: r", "is 0"), Violation("lora_A", "has no lora_B")])
        return catalog_pb2.PublishResponse(version=catalog_pb2.Version(number=3))

    async def ListAdapters(self, request: catalog_pb2.ListAdaptersRequest, context: Any) -> catalog_pb2.ListAdaptersResponse:  # type: ignore[override]
        page = int(request.page_token or 0)
        names = [catalog_pb2.Adapter(name=f"adapter-{page}-{index}") for index in range(2)]
        return catalog_pb2.ListAdaptersResponse(adapters=names, next_page_token=str(page + 1) if page < 2 else "")

    async def Rollback(self, request: catalog_pb2.RollbackRequest, context: Any) -> catalog_pb2.RollbackResponse:  # type: ignore[override]
        self.calls.append("Rollback")
        self.request_ids.append(request.request_id)
        raise self.error or AssertionError

    async def GetAdapter(self, request: catalog_pb2.GetAdapterRequest, context: Any) -> catalog_pb2.GetAdapterResponse:  # type: ignore[override]
        self.calls.append("GetAdapter")
        raise self.error or AssertionError

    async def SetAlias(self, request: catalog_pb2.SetAliasRequest, context: Any) -> catalog_pb2.SetAliasResponse:  # type: ignore[override]
        arms = [catalog_pb2.Arm(version=arm.version, weight=arm.weight) for arm in request.arms]
        generation = request.expected_generation + 1 if request.HasField("expected_generation") else 99
        return catalog_pb2.SetAliasResponse(alias=catalog_pb2.Alias(name=request.alias, generation=generation, arms=arms))

    async def ListVersions(self, request: Any, context: Any) -> Any:  # type: ignore[override]
        await asyncio.Event().wait()

    async def RetireVersion(self, request: Any, context: Any) -> Any:  # type: ignore[override]
        raise AssertionError


class Tenants(tenants_pb2_grpc.TenantServiceServicer):
    """Creates keys."""

    async def CreateKey(self, request: tenants_pb2.CreateKeyRequest, context: Any) -> tenants_pb2.CreateKeyResponse:  # type: ignore[override]
        return tenants_pb2.CreateKeyResponse(key=tenants_pb2.Key(roles=request.roles, label=request.label), secret="s")


for _name in (
    "CreateTenant",
    "ListTenants",
    "SetTenantLimits",
    "ListKeys",
    "RevokeKey",
    "CreateGrant",
    "ListGrants",
    "RevokeGrant",
):
    setattr(Tenants, _name, None)
Tenants.__abstractmethods__ = frozenset()


class OneTenant:
    async def authenticate(self, key_digest: bytes) -> Identity | None:
        return Identity(kind="tenant", key_digest=key_digest, tenant="acme", roles=frozenset({"caller"}))


@pytest.fixture
async def generation() -> Generation:
    return Generation()


@pytest.fixture
async def catalog() -> Catalog:
    return Catalog()


@pytest.fixture
async def client(generation: Generation, catalog: Catalog) -> AsyncIterator[Client]:
    services = [
        Service(
            pb.DESCRIPTOR.services_by_name["GenerationService"],
            partial(generation_pb2_grpc.add_GenerationServiceServicer_to_server, generation),
        ),
        Service(
            catalog_pb2.DESCRIPTOR.services_by_name["CatalogService"],
            partial(catalog_pb2_grpc.add_CatalogServiceServicer_to_server, catalog),
        ),
        Service(
            tenants_pb2.DESCRIPTOR.services_by_name["TenantService"],
            partial(tenants_pb2_grpc.add_TenantServiceServicer_to_server, Tenants()),
        ),
    ]
    rules = {name: Rule.of("tenant") for name in method_names([service.descriptor for service in services])}
    server = PlaneServer(
        ServerOptions(callers="127.0.0.1:0", operators="127.0.0.1:0"),
        services=services,
        rules=rules,
        authenticators={"callers": OneTenant(), "operators": OneTenant()},
    )
    address = (await server.start()).callers
    async with Client(control=address, data=address, key=KEY, timeout_s=10.0) as client:
        yield client
    await server.stop(grace_s=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / CONFIG_NAME).write_bytes(b'{"r": 8}')
    (tmp_path / WEIGHTS_NAME).write_bytes(bytes(range(256)) * 10_000)
    return tmp_path


async def collect(stream: AsyncIterator[Event], *, into: list[Event] | None = None) -> list[Event]:
    events = [] if into is None else into
    async for event in stream:
        events.append(event)  # kept when the stream ends with an error
    return events


async def test_a_stream_is_served_then_chunks_then_finish(client: Client, generation: Generation) -> None:
    generation.scripts = [[SERVED, LAST]]
    events = await collect(
        client.generate("hi", adapter="tone", alias="beta", sampling=pb.SamplingParams(max_tokens=2), priority=3)
    )
    assert events == [SERVED.served, SERVED.chunk, LAST.chunk, LAST.finish]
    [request] = generation.requests
    assert request.priority == 3
    assert (request.text, request.adapter.adapter, request.adapter.alias, request.sampling.max_tokens) == (
        "hi",
        "tone",
        "beta",
        2,
    )


async def test_prompts_may_be_ids_or_a_conversation(client: Client, generation: Generation) -> None:
    generation.scripts = [[SERVED, LAST], [SERVED, LAST]]
    await collect(client.generate([1, 2, 3]))
    await collect(client.generate([pb.ChatMessage(role="user", content="hi")]))
    assert list(generation.requests[0].tokens.ids) == [1, 2, 3]
    assert generation.requests[1].chat.messages[0].content == "hi"


async def test_a_stream_of_several_choices_is_whole_with_a_finish_for_each(client: Client, generation: Generation) -> None:
    echo = pb.GenerateResponse(echo=pb.Echo(text="a"))
    other = pb.GenerateResponse(finish=pb.Finish(choice=1))
    generation.scripts = [[SERVED, echo, LAST, other], [SERVED, LAST]]
    two = pb.SamplingParams(n=2, echo=True)
    events = [event async for event in client.generate("hi", sampling=two)]
    assert events == [SERVED.served, SERVED.chunk, echo.echo, LAST.chunk, LAST.finish, other.finish]
    with pytest.raises(UnavailableError, match="without a finish"):
        _ = [event async for event in client.generate("hi", sampling=two)]


async def test_a_stream_without_a_finish_is_an_error_after_its_tokens(client: Client, generation: Generation) -> None:
    generation.scripts = [[SERVED]]
    events: list[Event] = []
    with pytest.raises(UnavailableError, match="without a finish"):
        await collect(client.generate("hi"), into=events)
    assert events == [SERVED.served, SERVED.chunk]


async def test_a_name_that_no_header_can_hold_is_refused_by_the_plane(client: Client, generation: Generation) -> None:
    with pytest.raises(InvalidArgumentError, match="does not match"):
        await collect(client.generate("hi", adapter="töne\n"))
    assert generation.requests == []


async def test_unavailable_before_the_first_message_is_tried_again(client: Client, generation: Generation) -> None:
    generation.scripts = [[UnavailableError("starting")], [SERVED, LAST]]
    assert len(await collect(client.generate("hi"))) == 4
    assert len(generation.requests) == 2


async def test_the_longest_prompt_is_tried_again_too(client: Client, generation: Generation) -> None:
    generation.scripts = [[UnavailableError("starting")], [SERVED, LAST]]
    assert len(await collect(client.generate([200_000] * (1 << 20)))) == 4  # as many ids as one may have: 3 MiB
    assert len(generation.requests) == 2


async def test_unavailable_after_the_first_message_is_not_tried_again(client: Client, generation: Generation) -> None:
    generation.scripts = [[SERVED, UnavailableError("gone")], [SERVED, LAST]]
    with pytest.raises(UnavailableError, match="gone"):
        await collect(client.generate("hi"))
    assert len(generation.requests) == 1


async def test_other_errors_are_not_tried_again_and_carry_their_delay(client: Client, generation: Generation) -> None:
    generation.scripts = [[ResourceExhaustedError("full", retry_after_s=2.0)], [SERVED, LAST]]
    with pytest.raises(ResourceExhaustedError) as caught:
        await collect(client.generate("hi"))
    assert caught.value.retry_after_s == 2.0
    assert len(generation.requests) == 1


async def test_closing_the_iterator_cancels_the_request(client: Client, generation: Generation) -> None:
    generation.scripts = [[SERVED, asyncio.Event()]]
    stream = client.generate("hi")
    await anext(stream)
    await stream.aclose()
    await asyncio.wait_for(generation.ended.wait(), 10)


async def test_a_stream_has_a_deadline(client: Client, generation: Generation) -> None:
    generation.scripts = [[asyncio.Event()]]
    with pytest.raises(DeadlineExceededError):
        await collect(client.generate("hi", timeout_s=0.1))


async def test_every_other_call_has_a_deadline_too(client: Client) -> None:
    client._timeout_s = 0.1
    with pytest.raises(DeadlineExceededError):
        await client.versions("tone")


async def test_bad_requests_carry_every_violation(client: Client) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await collect(client.generate([], sampling=pb.SamplingParams(max_tokens=0, top_k=1)))
    assert {violation.field for violation in caught.value.violations} == {"tokens.ids", "sampling.max_tokens"}


async def test_an_alias_and_a_version_at_once_are_refused(client: Client) -> None:
    with pytest.raises(InvalidArgumentError, match="not both"):
        await collect(client.generate("hi", adapter="tone", alias="a", version="0" * 64))


async def test_publish_sends_both_files_whole_and_reports_progress(client: Client, catalog: Catalog, folder: Path) -> None:
    progress: list[tuple[int, int]] = []
    response = await client.publish(
        folder, adapter="tone", base="smol", progress=lambda sent, total: progress.append((sent, total))
    )
    assert response.version.number == 3
    assert catalog.received == {
        catalog_pb2.ADAPTER_FILE_CONFIG: (folder / CONFIG_NAME).read_bytes(),
        catalog_pb2.ADAPTER_FILE_WEIGHTS: (folder / WEIGHTS_NAME).read_bytes(),
    }
    assert progress[-1] == (2_560_008, 2_560_008)
    assert catalog.headers[0].request_id


async def test_publish_sends_the_signature_that_is_in_the_folder_or_named(
    client: Client, catalog: Catalog, folder: Path, tmp_path: Path
) -> None:
    async def sent(signature: Path | None = None) -> bytes:
        await client.publish(folder, adapter="tone", base="smol", signature=signature)
        return catalog.headers[-1].signature

    assert await sent() == b""
    (folder / "model.sig").write_bytes(b"in the folder")
    (tmp_path / "elsewhere.sig").write_bytes(b"named")
    assert await sent() == b"in the folder"
    assert await sent(tmp_path / "elsewhere.sig") == b"named"
    for size_bytes in (0, (64 << 10) + 1):
        (folder / "model.sig").write_bytes(bytes(size_bytes))
        with pytest.raises(InvalidArgumentError, match=f"has {size_bytes} bytes"):
            await sent()
    with pytest.raises(InvalidArgumentError, match="is no file"):
        await sent(tmp_path / "absent.sig")


async def test_a_publish_that_is_refused_halfway_tells_every_fault(client: Client, catalog: Catalog, folder: Path) -> None:
    catalog.refuse_after = 1
    with pytest.raises(InvalidArgumentError) as caught:
        await client.publish(folder, adapter="tone", base="smol")
    assert [violation.field for violation in caught.value.violations] == ["adapter_config.json: r", "lora_A"]


async def test_a_publish_whose_answer_was_lost_is_sent_again_under_its_identifier(
    client: Client, catalog: Catalog, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = grpc.aio.Metadata()
    lost = [grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, metadata, metadata, details="Internal error from Core")]
    answer = client_module._answer

    async def lose_first(upload: Any) -> Any:
        async def first() -> Any:
            await upload
            raise lost.pop()

        return await answer(first() if lost else upload)

    monkeypatch.setattr(client_module, "_answer", lose_first)
    await client.publish(folder, adapter="tone", base="smol")
    first, second = catalog.headers
    assert first.request_id == second.request_id


async def test_a_large_upload_to_a_plane_that_goes_away_is_sent_again_under_its_identifier(
    client: Client, catalog: Catalog, folder: Path
) -> None:
    (folder / WEIGHTS_NAME).write_bytes(bytes(3 << 20))  # more than gRPC keeps to send again by itself
    catalog.away = [UnavailableError("restarts", retry_after_s=0.05), UnavailableError("goes away")]
    assert (await client.publish(folder, adapter="tone", base="smol")).version.number == 3
    assert len(catalog.headers) == 3
    assert len({header.request_id for header in catalog.headers}) == 1
    assert len(catalog.received[catalog_pb2.ADAPTER_FILE_WEIGHTS]) == 3 << 20


async def test_an_upload_to_a_plane_that_stays_away_ends_with_its_error(client: Client, catalog: Catalog, folder: Path) -> None:
    (folder / WEIGHTS_NAME).write_bytes(bytes(3 << 20))
    catalog.away = [UnavailableError("is away") for _ in range(9)]
    with pytest.raises(UnavailableError):  # what it said, or that its answer was lost
        await client.publish(folder, adapter="tone", base="smol")
    assert len(catalog.headers) == 4


async def test_missing_files_are_all_named_before_anything_is_sent(client: Client, catalog: Catalog, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await client.publish(tmp_path, adapter="tone", base="smol")
    assert [violation.field for violation in caught.value.violations] == [CONFIG_NAME, WEIGHTS_NAME]
    assert catalog.headers == []


async def test_lists_go_through_all_pages(client: Client) -> None:
    names = [adapter.name for adapter in await client.adapters()]
    assert names == [f"adapter-{page}-{index}" for page in range(3) for index in range(2)]


async def test_a_split_and_the_expected_generation_travel(client: Client) -> None:
    alias = await client.set_alias("tone", {"a" * 64: 9, "b" * 64: 1}, alias="beta", expected_generation=0)
    assert (alias.name, alias.generation, [arm.weight for arm in alias.arms]) == ("beta", 1, [9, 1])
    assert (await client.set_alias("tone", {"a" * 64: 1})).generation == 99


def test_whatever_a_write_of_the_catalogue_offers_its_method_offers() -> None:
    shared = {"dry_run", "expected_generation", "request_id", "force"}
    for rpc in catalog_pb2.DESCRIPTOR.services_by_name["CatalogService"].methods:
        offered = shared & set(rpc.input_type.fields_by_name)
        name = {"RetireVersion": "retire", "FreezeAlias": "freeze"}.get(
            rpc.name, re.sub(r"(?<!^)(?=[A-Z])", "_", rpc.name).lower()
        )
        assert not offered or offered <= set(inspect.signature(getattr(Client, name)).parameters), rpc.name


@pytest.mark.parametrize("call", ["adapter", "rollback"])
async def test_reads_are_tried_again_and_so_are_writes_under_their_identifier(
    client: Client, catalog: Catalog, call: str
) -> None:
    catalog.error = UnavailableError("restarting")
    with pytest.raises(UnavailableError):
        await getattr(client, call)("tone")
    assert catalog.calls == [{"adapter": "GetAdapter", "rollback": "Rollback"}[call]] * 3
    assert len(set(catalog.request_ids)) == (1 if call == "rollback" else 0)
    assert "" not in catalog.request_ids


async def test_a_lost_compare_and_swap_is_an_aborted_error(client: Client, catalog: Catalog) -> None:
    catalog.error = AbortedError("moved")
    with pytest.raises(AbortedError, match="moved"):
        await client.rollback("tone")


async def test_roles_are_named_in_words(client: Client) -> None:
    response = await client.create_key(roles=["caller", "owner"], label="ci", lifetime_s=60)
    assert list(response.key.roles) == [tenants_pb2.ROLE_CALLER, tenants_pb2.ROLE_OWNER]
    with pytest.raises(InvalidArgumentError, match="`admin` is no role; there are auditor, caller, owner, publisher"):
        await client.create_key(roles=["admin"])


async def test_a_plane_without_an_address_is_named() -> None:
    async with Client(data="127.0.0.1:1", key=KEY) as client:
        with pytest.raises(FailedPreconditionError, match="no address of the control plane"):
            await client.adapters()


async def test_nobody_listens_is_unavailable_and_names_no_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with Client(control="127.0.0.1:1", key=KEY, timeout_s=5) as client:
        with pytest.raises(UnavailableError) as caught:
            await client.adapters()
    assert KEY not in str(caught.value) + caplog.text
