"""A reader of what a node holds goes on where it stood, whatever ends its streams."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import pytest

from veneer import operator_client
from veneer.dataplane.v1 import admin_pb2, admin_pb2_grpc
from veneer.errors import PermissionDeniedError, UnavailableError
from veneer.operator_client import OperatorClient


class Admin(admin_pb2_grpc.AdminServiceServicer):
    """A data plane whose streams are as long as the test says, each with the code that it ends with."""

    def __init__(self) -> None:
        self.streams: list[tuple[list[admin_pb2.WatchResidencyResponse], grpc.StatusCode]] = []
        self.asked: list[tuple[int, int] | None] = []

    async def WatchResidency(self, request: Any, context: Any) -> AsyncIterator[admin_pb2.WatchResidencyResponse]:
        after = request.after
        self.asked.append((after.epoch, after.sequence) if request.HasField("after") else None)
        messages, code = self.streams.pop(0)
        for message in messages:
            yield message
        if code is not grpc.StatusCode.OK:
            await context.abort(code, "ended")


def at(sequence: int, **fields: Any) -> admin_pb2.WatchResidencyResponse:
    return admin_pb2.WatchResidencyResponse(position=admin_pb2.ResidencyPosition(epoch=7, sequence=sequence), **fields)


@pytest.fixture
async def admin() -> AsyncIterator[tuple[Admin, str]]:
    made = Admin()
    server = grpc.aio.server()
    admin_pb2_grpc.add_AdminServiceServicer_to_server(made, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield made, f"127.0.0.1:{port}"
    await server.stop(0)


async def test_a_watch_goes_on_over_ended_streams_from_the_last_whole_update(
    admin: tuple[Admin, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_client, "_AGAIN_S", 0.001)
    made, address = admin
    made.streams = [
        ([at(3, snapshot=True)], grpc.StatusCode.OK),
        ([at(4), at(5, more=True)], grpc.StatusCode.UNAVAILABLE),
        ([at(6)], grpc.StatusCode.OK),
    ]
    seen = []
    async with OperatorClient(data=address, key="k") as client, aclosing(client.watch_residency()) as updates:
        async for update in updates:
            seen.append(update.position.sequence)
            if len(seen) == 4:
                break
    assert seen == [3, 4, 5, 6]
    assert made.asked == [None, (7, 3), (7, 4)]


@pytest.mark.parametrize(
    ("code", "kind"),
    [(grpc.StatusCode.PERMISSION_DENIED, PermissionDeniedError), (grpc.StatusCode.UNAVAILABLE, UnavailableError)],
)
async def test_a_watch_that_never_began_says_why(admin: tuple[Admin, str], code: grpc.StatusCode, kind: type[Exception]) -> None:
    made, address = admin
    made.streams = [([], code)] * 10
    async with OperatorClient(data=address, key="k") as client:
        with pytest.raises(kind):
            await anext(client.watch_residency())
