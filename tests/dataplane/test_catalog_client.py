"""Calls to the control plane over a real channel: what is sent, what failures mean, where the key is kept."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from dataplane.blob_grants import LostFileError
from dataplane.catalog_client import CatalogClient, EnrollmentError, open_channel
from dataplane.enrollment import NotEnrolledError
from dataplane.resolution import Arm, Refusal, Resolution, Target
from dataplane.resolve_cache import Key
from tests.dataplane.doubles import BASE, OTHER, VERSION
from tests.veneer.raw_server import ENDINGS, RawServer
from veneer.controlplane.v1 import bases_pb2, bases_pb2_grpc, nodes_pb2, nodes_pb2_grpc
from veneer.errors import (
    FailedPreconditionError,
    InternalError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    VeneerError,
)


class Nodes(nodes_pb2_grpc.NodeServiceServicer):
    """The control plane's node service, as the test wants it."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.requests: list[Any] = []
        self.code: grpc.StatusCode | None = None
        self.resolve = nodes_pb2.ResolveResponse()
        self.hang = False
        self.refused_keys: set[bytes] = set()
        self.changes_code: grpc.StatusCode | None = None

    async def _heard(self, request: Any, context: Any) -> None:
        self.keys.append(dict(context.invocation_metadata())["authorization"])
        self.requests.append(request)
        if self.hang:
            await asyncio.Event().wait()
        if self.code is not None:
            await context.abort(self.code, "said by the control plane")
        if getattr(request, "key_digest", b"") in self.refused_keys:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no valid credential")

    async def EnrollNode(self, request: Any, context: Any) -> Any:
        await self._heard(request, context)
        return nodes_pb2.EnrollNodeResponse(secret="first")

    async def RotateNodeKey(self, request: Any, context: Any) -> Any:
        await self._heard(request, context)
        return nodes_pb2.RotateNodeKeyResponse(secret="second")

    async def Resolve(self, request: Any, context: Any) -> Any:
        await self._heard(request, context)
        return self.resolve

    async def Introspect(self, request: Any, context: Any) -> Any:
        await self._heard(request, context)
        return nodes_pb2.IntrospectResponse(kind="operator", key_id="op")

    async def GrantBlobs(self, request: Any, context: Any) -> Any:
        await self._heard(request, context)
        blob = nodes_pb2.Blob(name="adapter_config.json", digest="1" * 64, size_bytes=10)
        return nodes_pb2.GrantBlobsResponse(grant="grant", blobs=[blob], base_digest=BASE, owner="acme")

    async def ReadBlob(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield nodes_pb2.ReadBlobResponse(data=b"0123456789"[request.offset :])
        await self._heard(request, context)

    async def ListChanges(self, request: Any, context: Any) -> Any:
        await self._heard(request, context)
        if self.changes_code is not None:
            await context.abort(self.changes_code, "said by the control plane")
        change = nodes_pb2.Change(kind=nodes_pb2.CHANGE_KIND_ALIAS, tenant="acme", adapter="bot", generation=4)
        return nodes_pb2.ListChangesResponse(changes=[change], next_cursor="7", reset=True)

    async def ReportVersion(self, request: Any, context: Any) -> Any:
        await self._heard(request, context)
        return nodes_pb2.ReportVersionResponse()


class Bases(bases_pb2_grpc.BaseServiceServicer):
    """Lists one base a page, the node's own last."""

    def __init__(self) -> None:
        self.bases: list[bases_pb2.Base] = []

    async def ListBases(self, request: Any, context: Any) -> Any:
        place = int(request.page_token or 0)
        following = str(place + 1) if place + 1 < len(self.bases) else ""
        return bases_pb2.ListBasesResponse(bases=self.bases[place : place + 1], next_page_token=following)


@pytest.fixture
def listed() -> Bases:
    return Bases()


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


@pytest.fixture
async def client(nodes: Nodes, listed: Bases) -> AsyncIterator[CatalogClient]:
    server = grpc.aio.server()
    bases_pb2_grpc.add_BaseServiceServicer_to_server(listed, server)
    nodes_pb2_grpc.add_NodeServiceServicer_to_server(nodes, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}", ca_pem=None) as channel:
        yield CatalogClient(channel, base_digest=BASE, timeout_s=60)
    await server.stop(0)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return tmp_path / "node" / "key"


async def test_the_first_start_enrols_and_keeps_the_key_for_its_owner_only(
    client: CatalogClient, nodes: Nodes, key_file: Path
) -> None:
    await client.enroll(key_file, token="token")
    assert nodes.keys == ["Bearer token"]
    assert nodes.requests[0].base_digest == BASE
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert [path.name for path in key_file.parent.iterdir()] == ["key"]
    await client.introspect(b"k" * 32)
    assert nodes.keys[-1] == "Bearer first"


async def test_a_later_start_uses_the_kept_key_and_no_token(client: CatalogClient, nodes: Nodes, key_file: Path) -> None:
    await client.enroll(key_file, token="token")
    await client.enroll(key_file, token="token")
    assert nodes.keys[1:] == ["Bearer first"]
    nodes.code = grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(UnauthenticatedError, match=r"the node was revoked.*remove the node key file and enrol again"):
        await client.enroll(key_file, token=None)


async def test_a_token_that_was_used_is_refused_with_the_remedy(client: CatalogClient, nodes: Nodes, key_file: Path) -> None:
    nodes.code = grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(UnauthenticatedError, match=r"enrolment token is not valid.*make a new one"):
        await client.enroll(key_file, token="token")
    assert client.is_enrolled


async def test_a_start_without_key_and_token_is_refused(client: CatalogClient, nodes: Nodes, key_file: Path) -> None:
    with pytest.raises(EnrollmentError, match="enrolment token"):
        await client.enroll(key_file, token=None)
    assert nodes.keys == []


async def test_an_unknown_base_is_refused_in_the_control_planes_words(
    client: CatalogClient, nodes: Nodes, key_file: Path
) -> None:
    nodes.code = grpc.StatusCode.FAILED_PRECONDITION
    with pytest.raises(FailedPreconditionError, match="said by the control plane"):
        await client.enroll(key_file, token="token")
    assert not key_file.exists()


@pytest.mark.parametrize("text", ["", "{}", json.dumps({"secret": "x", "base_digest": "0" * 64})])
async def test_a_key_file_that_does_not_fit_is_refused(client: CatalogClient, key_file: Path, text: str) -> None:
    key_file.parent.mkdir()
    key_file.write_text(text)
    with pytest.raises(EnrollmentError, match="enrol again"):
        await client.enroll(key_file, token="token")


async def test_a_rotated_key_is_kept_and_used(client: CatalogClient, nodes: Nodes, key_file: Path) -> None:
    await client.enroll(key_file, token="token")
    await client.rotate_key(key_file)
    assert json.loads(key_file.read_text())["secret"] == "second"
    await client.introspect(b"k" * 32)
    assert nodes.keys == ["Bearer token", "Bearer first", "Bearer second"]


async def test_a_resolution_arrives_whole(client: CatalogClient, nodes: Nodes) -> None:
    nodes.resolve.caller.tenant = "acme"
    nodes.resolve.caller.fallback_allowed = True
    nodes.resolve.caller.cache_salt = b"s" * 32
    nodes.resolve.caller.max_priority = 50
    nodes.resolve.caller.expire_time.FromSeconds(77)
    nodes.resolve.resolution.MergeFrom(
        nodes_pb2.Resolution(owner="other", adapter="bot", alias="stable", generation=4, split_salt=b"p")
    )
    nodes.resolve.resolution.arms.add(
        digest=VERSION, number=3, weight=2, max_rank=8, size_bytes=9, state="READY", invocation_tokens=[5, 6]
    )
    nodes.resolve.resolution.arms[0].previous.MergeFrom(nodes_pb2.ServableVersion(digest=OTHER, number=2, state="READY"))
    nodes.resolve.caller.previous_allowed = True
    nodes.resolve.caller.default_fallback = "PREVIOUS"
    found = await client.resolve(Key(b"k" * 32, Target("bot", "other")))
    before = Arm(OTHER, 2, 1, 0, 0, "READY")
    assert found.outcome == Resolution("other", "bot", "stable", 4, (Arm(VERSION, 3, 2, 8, 9, "READY", (5, 6), before),), b"p")
    who = found.caller
    assert (who.fallback_allowed, who.previous_allowed, who.default_fallback) == (True, True, "PREVIOUS")
    assert (who.tenant, who.weight, who.expire_unix_s, who.max_priority) == ("acme", 1, 77, 50)
    (request,) = nodes.requests
    assert (request.key_digest, request.base_digest, request.target.adapter) == (b"k" * 32, BASE, "bot")
    assert request.target.WhichOneof("target") is None


@pytest.mark.parametrize(
    ("target", "field"), [(Target("bot", alias="canary"), "alias"), (Target("bot", version=VERSION), "version")]
)
async def test_alias_and_version_are_passed_on_as_such(client: CatalogClient, nodes: Nodes, target: Target, field: str) -> None:
    await client.resolve(Key(b"k" * 32, target))
    assert nodes.requests[0].target.WhichOneof("target") == field


@pytest.mark.parametrize("refusal", list(Refusal))
async def test_a_refusal_arrives_with_its_caller(client: CatalogClient, nodes: Nodes, refusal: Refusal) -> None:
    nodes.resolve.caller.tenant = "acme"
    nodes.resolve.refusal = nodes_pb2.RefusalReason.Value(f"REFUSAL_REASON_{refusal.name}")
    found = await client.resolve(Key(b"k" * 32, Target("bot")))
    assert (found.outcome, found.caller.tenant) == (refusal, "acme")


async def test_an_answer_without_outcome_is_no_permission(client: CatalogClient) -> None:
    assert (await client.resolve(Key(b"k" * 32, Target("bot")))).outcome is Refusal.NOT_FOUND


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, UnavailableError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, UnavailableError),
        (grpc.StatusCode.UNAUTHENTICATED, NotEnrolledError),
        (grpc.StatusCode.PERMISSION_DENIED, PermissionDeniedError),
        (grpc.StatusCode.NOT_FOUND, NotFoundError),
        (grpc.StatusCode.FAILED_PRECONDITION, FailedPreconditionError),
        (grpc.StatusCode.DATA_LOSS, LostFileError),
        (grpc.StatusCode.INTERNAL, InternalError),
        (grpc.StatusCode.UNIMPLEMENTED, InternalError),
    ],
)
async def test_a_failed_call_has_its_meaning(
    client: CatalogClient, nodes: Nodes, code: grpc.StatusCode, kind: type[VeneerError]
) -> None:
    nodes.code = code
    with pytest.raises(kind):
        await client.grant_blobs(VERSION)


ASKS: dict[str, Callable[[CatalogClient], Awaitable[object]]] = {
    "resolve": lambda client: client.resolve(Key(b"k" * 32, Target("bot"))),
    "introspect": lambda client: client.introspect(b"k" * 32),
    "grant": lambda client: client.grant_blobs(VERSION),
    "changes": lambda client: client.list_changes("3"),
    "report": lambda client: client.report_corrupt(VERSION),
    "rotate": lambda client: client.rotate_key(Path("unused")),
}


@pytest.mark.parametrize("name", ASKS)
async def test_a_node_that_was_revoked_learns_it_from_its_next_call_and_blames_no_caller(
    client: CatalogClient, nodes: Nodes, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[bool] = []
    client.on_refused = lambda: told.append(client.is_enrolled)
    assert client.is_enrolled
    nodes.code = grpc.StatusCode.UNAUTHENTICATED
    for _ in range(2):
        with pytest.raises(NotEnrolledError, match="not enrolled any more") as caught:
            await ASKS[name](client)
        assert caught.value.status == "UNAVAILABLE"
    assert (client.is_enrolled, told) == (False, [False])
    assert [record.message for record in caplog.records] == ["the control plane refuses this node's key: it serves no longer"]


async def test_a_node_whose_key_is_taken_again_says_so(client: CatalogClient, nodes: Nodes) -> None:
    nodes.code = grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(NotEnrolledError):
        await client.list_changes("")
    nodes.code = None
    await client.list_changes("")
    assert client.is_enrolled


@pytest.mark.parametrize("name", ["resolve", "introspect"])
async def test_a_callers_key_that_is_wrong_is_no_fault_of_the_node_and_is_not_looked_into_each_time(
    client: CatalogClient, nodes: Nodes, name: str
) -> None:
    nodes.refused_keys = {b"k" * 32}
    for _ in range(20):
        with pytest.raises(UnauthenticatedError, match="no valid credential"):
            await ASKS[name](client)
    assert client.is_enrolled
    assert 1 <= sum(isinstance(request, nodes_pb2.ListChangesRequest) for request in nodes.requests) < 10


async def test_a_control_plane_that_goes_away_says_nothing_about_the_nodes_key(client: CatalogClient, nodes: Nodes) -> None:
    nodes.refused_keys, nodes.changes_code = {b"k" * 32}, grpc.StatusCode.UNAVAILABLE
    with pytest.raises(UnauthenticatedError):
        await client.resolve(Key(b"k" * 32, Target("bot")))
    assert client.is_enrolled


async def test_a_control_plane_that_hangs_is_unreachable_after_the_deadline(nodes: Nodes, client: CatalogClient) -> None:
    nodes.hang = True
    client._timeout_s = 0.1
    with pytest.raises(UnavailableError):
        await client.resolve(Key(b"k" * 32, Target("bot")))


async def test_a_control_plane_that_is_not_there_is_unreachable() -> None:
    async with open_channel("127.0.0.1:1", ca_pem=None) as channel:
        with pytest.raises(UnavailableError):
            await CatalogClient(channel, base_digest=BASE).introspect(b"k" * 32)


async def test_a_file_is_read_from_its_offset_on(client: CatalogClient) -> None:
    grant = await client.grant_blobs(VERSION)
    (blob,) = grant.blobs
    assert (grant.token, grant.owner, blob.size_bytes) == ("grant", "acme", 10)
    assert b"".join([part async for part in client.read_blob(grant, blob, offset=4, idle_s=5)]) == b"456789"


async def test_a_transfer_that_hangs_is_given_up(client: CatalogClient, nodes: Nodes) -> None:
    grant = await client.grant_blobs(VERSION)
    nodes.hang = True
    received = b""
    with pytest.raises(UnavailableError, match=r"no bytes for 1 s"):
        async for part in client.read_blob(grant, grant.blobs[0], offset=0, idle_s=1):
            received += part
    assert received == b"0123456789"


async def test_changes_and_reports_go_through(client: CatalogClient, nodes: Nodes) -> None:
    page = await client.list_changes("3")
    assert (page.next_cursor, page.reset, page.changes[0].adapter, page.changes[0].generation) == ("7", True, "bot", 4)
    await client.report_corrupt(VERSION)
    await client.report_not_finite(VERSION)
    assert [request.fault for request in nodes.requests[1:]] == [
        nodes_pb2.VERSION_FAULT_CORRUPT,
        nodes_pb2.VERSION_FAULT_NOT_FINITE,
    ]


@pytest.mark.parametrize(
    ("stored", "contents"),
    [
        (bases_pb2.CHAT_CONTENTS_UNSPECIFIED, "text"),  # a control plane of before
        (bases_pb2.CHAT_CONTENTS_TEXT, "text"),
        (bases_pb2.CHAT_CONTENTS_TOKENS, "tokens"),
    ],
)
async def test_what_control_tokens_in_contents_are_is_asked_of_the_nodes_own_base(
    client: CatalogClient, listed: Bases, stored: bases_pb2.ChatContents.ValueType, contents: str
) -> None:
    assert await client.chat_contents() == "text", "there is no such base"
    listed.bases = [bases_pb2.Base(digest="e" * 64, chat_contents=bases_pb2.CHAT_CONTENTS_TOKENS)]
    assert await client.chat_contents() == "text"
    listed.bases.append(bases_pb2.Base(digest=BASE, chat_contents=stored))
    assert await client.chat_contents() == contents


@pytest.mark.parametrize("name", ENDINGS)
async def test_a_call_that_a_restart_of_the_control_plane_ends_is_unavailable(name: str) -> None:
    async with RawServer([ENDINGS[name]]) as server:
        channel = open_channel(server.address, ca_pem=None)
        client = CatalogClient(channel, base_digest=BASE, timeout_s=20.0)
        with pytest.raises(UnavailableError) as caught:
            await client.resolve(Key(b"k" * 32, Target()))
        await channel.close()
    assert caught.value.retry_after_s == 1.0
