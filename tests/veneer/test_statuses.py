from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from tests.veneer.raw_server import ENDINGS, RawServer
from veneer import errors
from veneer.channel import open_channel, typed_errors
from veneer.errors import (
    ANSWERED,
    AlreadyExistsError,
    DeadlineExceededError,
    InvalidArgumentError,
    UnavailableError,
    VeneerError,
    Violation,
)
from veneer.statuses import code_of, error_of, message_of, trailers_of

FAMILIES = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, VeneerError) and kind is not VeneerError
]


def travel(error: VeneerError) -> VeneerError:
    """The error as the other side gets it."""
    trailers = grpc.aio.Metadata(*trailers_of(error))
    return error_of(grpc.aio.AioRpcError(code_of(error), grpc.aio.Metadata(), trailers, message_of(error)))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_arrives_as_itself(family: type[VeneerError]) -> None:
    arrived = travel(family("because", retry_after_s=0.25))
    assert type(arrived) is family
    assert (arrived.message, arrived.retry_after_s, arrived.violations) == ("because", 0.25, ())


@given(st.lists(st.builds(Violation, st.text(max_size=40), st.text(max_size=80)), max_size=8))
def test_violations_arrive_in_order(violations: list[Violation]) -> None:
    clean = [Violation(*(part.encode(errors="replace").decode() for part in (one.field, one.description))) for one in violations]
    assert travel(InvalidArgumentError.of(clean)).violations == tuple(clean)


@given(st.lists(st.builds(Violation, st.text(min_size=1), st.text(min_size=50)), min_size=30, max_size=200))
def test_trailers_stay_below_what_any_client_takes(violations: list[Violation]) -> None:
    error = InvalidArgumentError.of(violations)
    trailers = trailers_of(error)
    base64_growth = 4 / 3
    size = sum(len(value) * base64_growth if isinstance(value, bytes) else len(value) for _, value in trailers)
    assert size + 3 * len(message_of(error).encode()) < 7500


def test_what_does_not_fit_is_counted() -> None:
    arrived = travel(InvalidArgumentError.of([Violation(f"field {index}", "x" * 100) for index in range(500)]))
    kept = len(arrived.violations) - 1
    assert kept > 20
    assert f"and {500 - kept} more violations" in arrived.violations[-1].description


def test_a_retry_delay_is_also_a_pushback_for_grpc() -> None:
    assert ("grpc-retry-pushback-ms", "1500") in trailers_of(UnavailableError("busy", retry_after_s=1.5))
    assert "grpc-retry-pushback-ms" not in dict(trailers_of(UnavailableError("busy")))


def test_a_kind_arrives_and_an_answer_is_told_from_a_connection_that_fails() -> None:
    class KnownError(AlreadyExistsError):
        kind = "KNOWN"

    assert travel(KnownError("because")).kind == "KNOWN"
    assert travel(AlreadyExistsError("because")).kind == ""
    assert travel(UnavailableError("busy")).kind == ANSWERED
    empty = grpc.aio.Metadata()
    assert error_of(grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, empty, empty, "failed to connect")).kind == ""
    strange = status_pb2.Status(code=14)
    strange.details.add().Pack(error_details_pb2.ErrorInfo(reason="KNOWN", domain="proxy"))
    trailers = grpc.aio.Metadata(("grpc-status-details-bin", strange.SerializeToString()))
    assert error_of(grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, empty, trailers, "")).kind == ""


@pytest.mark.parametrize("name", ENDINGS)
async def test_a_call_that_the_connection_ends_is_unavailable(name: str) -> None:
    async with RawServer([ENDINGS[name]]) as server, open_channel(server.address, tls=None, retries=False) as channel:
        with pytest.raises(UnavailableError), typed_errors():
            await channel.unary_unary("/veneer.controlplane.v1.NodeService/Resolve")(b"", timeout=20)
    assert server.num_calls == 1


async def test_a_deadline_stays_a_deadline() -> None:
    async with RawServer([lambda stream: b""]) as server, open_channel(server.address, tls=None) as channel:
        with pytest.raises(DeadlineExceededError), typed_errors():
            await channel.unary_unary("/veneer.controlplane.v1.NodeService/Resolve")(b"", timeout=0.2)


@pytest.mark.parametrize("code", ["INTERNAL", "RESOURCE_EXHAUSTED", "PERMISSION_DENIED"])
def test_what_a_plane_says_itself_stays_as_it_said_it(code: str) -> None:
    empty = grpc.aio.Metadata()
    assert error_of(grpc.aio.AioRpcError(grpc.StatusCode[code], empty, empty, "because")).status == code


def test_a_code_without_a_family_names_itself() -> None:
    empty = grpc.aio.Metadata()
    arrived = error_of(grpc.aio.AioRpcError(grpc.StatusCode.UNIMPLEMENTED, empty, empty, "no such method"))
    assert (type(arrived), arrived.status, arrived.message) == (VeneerError, "UNIMPLEMENTED", "no such method")
    assert VeneerError.status == "INTERNAL"


def test_broken_details_do_not_hide_the_error() -> None:
    trailers = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff\xff"))
    arrived = error_of(grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailers, "away"))
    assert isinstance(arrived, UnavailableError)
