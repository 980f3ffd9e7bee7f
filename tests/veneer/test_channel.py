from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor

from tests.veneer.raw_server import ENDINGS, RawServer
from veneer import channel, server
from veneer.access import method_names
from veneer.channel import ClientTls, bearer, open_channel, pages, typed_errors
from veneer.controlplane.v1 import (
    bases_pb2,
    catalog_pb2,
    nodes_pb2,
    organizations_pb2,
    placement_pb2,
    signatures_pb2,
    tenants_pb2,
    tenants_pb2_grpc,
)
from veneer.dataplane.v1 import admin_pb2, generation_pb2
from veneer.errors import InvalidArgumentError, UnavailableError

FILES: list[FileDescriptor] = [
    module.DESCRIPTOR
    for module in (
        bases_pb2,
        catalog_pb2,
        nodes_pb2,
        organizations_pb2,
        placement_pb2,
        signatures_pb2,
        tenants_pb2,
        admin_pb2,
        generation_pb2,
    )
]
NEVER_REPEATED = {
    "CatalogService/Publish",  # the client sends it again itself
    "NodeService/CreateEnrollmentToken",
    "NodeService/EnrollNode",
    "NodeService/RotateNodeKey",
    "NodeService/Resolve",  # these are the data planes' own calls, with retries of their own
    "NodeService/Introspect",
    "NodeService/GrantBlobs",
    "NodeService/ReadBlob",
    "NodeService/ListChanges",
    "NodeService/ReportVersion",
    "NodeService/LeaseQuotas",
    "NodeService/ReportOutcomes",
    "NodeService/ReportUsage",
    "NodeService/TakeProbe",
    "NodeService/ReportProbe",
    "AdminService/Drain",
    "AdminService/WatchResidency",  # who comes back says where it was
}


def test_every_method_is_either_repeated_or_never() -> None:
    served = {name.rpartition(".")[2] for name in method_names(one for file in FILES for one in file.services_by_name.values())}
    repeated = {
        f"{service.rpartition('.')[2]}/{method}" for service, methods in channel._REPEATABLE.items() for method in methods
    }
    assert repeated | NEVER_REPEATED == served
    assert not repeated & NEVER_REPEATED


@pytest.mark.parametrize("name", ["reset 7", "reset 8", "close"])
async def test_a_call_that_a_stopping_server_reset_is_made_again(name: str) -> None:
    async with RawServer([ENDINGS[name]]) as server, open_channel(server.address, tls=None) as channel:
        stub = tenants_pb2_grpc.TenantServiceStub(channel)
        with pytest.raises(UnavailableError), typed_errors():
            await stub.ListKeys(tenants_pb2.ListKeysRequest(), timeout=20)
    assert server.num_calls >= 3


def test_clients_ping_no_oftener_than_servers_allow() -> None:
    ours, theirs = dict(channel._OPTIONS), dict(server._OPTIONS)
    assert int(ours["grpc.keepalive_time_ms"]) > theirs["grpc.http2.min_recv_ping_interval_without_data_ms"]


def test_a_key_is_shown_as_a_bearer_and_no_key_not_at_all() -> None:
    assert bearer("vnr_x") == (("authorization", "Bearer vnr_x"),)
    assert bearer("") == ()


@pytest.mark.parametrize("key", ["vnr_abc\n", "vnr_\r\nx-more: 1", "schlüssel", "a\0b"])
def test_a_key_that_no_header_can_hold_is_refused_by_name_and_not_shown(key: str) -> None:
    with pytest.raises(InvalidArgumentError, match="key: holds a character") as caught:
        bearer(key)
    assert key not in str(caught.value)


async def test_a_missing_certificate_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"absent\.pem"):
        open_channel("127.0.0.1:1", tls=ClientTls(ca=tmp_path / "absent.pem"))


async def test_pages_end_with_the_page_that_names_no_next() -> None:
    async def fetch(token: str) -> tenants_pb2.ListTenantsResponse:
        return {
            "": tenants_pb2.ListTenantsResponse(tenants=[tenants_pb2.Tenant(name="a")], next_page_token="2"),
            "2": tenants_pb2.ListTenantsResponse(next_page_token="3"),
            "3": tenants_pb2.ListTenantsResponse(tenants=[tenants_pb2.Tenant(name="b")]),
        }[token]

    assert [one.name async for one in pages(fetch, "tenants")] == ["a", "b"]
