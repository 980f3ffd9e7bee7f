from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.veneer.plane import until
from tests.veneer.raw_client import RawClient
from veneer.access import Identity, ListenerName, Rule, RuleError, Rules, method_names
from veneer.channel import typed_errors
from veneer.dataplane.v1 import admin_pb2, admin_pb2_grpc
from veneer.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError
from veneer.running_calls import CallLimits
from veneer.server import Addresses, PlaneServer, ServerOptions, Service, Tls

ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
RESIDENCY = "/veneer.dataplane.v1.AdminService/GetResidency"
INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNAVAILABLE, UNAUTHENTICATED = (
    grpc.StatusCode[name].value[0] for name in ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "UNAUTHENTICATED")
)
OPERATOR = "vnr_" + "o" * 43
RULES: Rules = dict.fromkeys(method_names([ADMIN]), Rule.of("operator"))


class Admin(admin_pb2_grpc.AdminServiceServicer):
    """Answers at once, except that Drain waits until it is let go."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.let_go = asyncio.Event()
        self.ended = asyncio.Event()

    async def GetResidency(self, request: admin_pb2.GetResidencyRequest, context: Any) -> admin_pb2.GetResidencyResponse:  # type: ignore[override]
        return admin_pb2.GetResidencyResponse(base_digest="b")

    async def Drain(self, request: admin_pb2.DrainRequest, context: Any) -> admin_pb2.DrainResponse:  # type: ignore[override]
        self.started.set()
        try:
            await self.let_go.wait()
        finally:
            self.ended.set()
        return admin_pb2.DrainResponse(remaining=3)


class EveryoneIsAnOperator:
    async def authenticate(self, key_digest: bytes) -> Identity | None:
        return Identity(kind="operator", key_digest=key_digest)


AUTHENTICATORS: Mapping[ListenerName, EveryoneIsAnOperator] = {
    "callers": EveryoneIsAnOperator(),
    "operators": EveryoneIsAnOperator(),
}


def plane(admin: Admin | None = None, *, rules: Rules = RULES, **options: Any) -> PlaneServer:
    add = partial(admin_pb2_grpc.add_AdminServiceServicer_to_server, admin or Admin())
    return PlaneServer(
        ServerOptions(**{"callers": "127.0.0.1:0", "operators": "127.0.0.1:0", **options}),
        services=[Service(ADMIN, add, ("operators",))],
        rules=rules,
        authenticators=AUTHENTICATORS,
    )


@pytest.fixture
async def admin() -> Admin:
    return Admin()


@pytest.fixture
async def server(admin: Admin, tmp_path: Path) -> AsyncIterator[PlaneServer]:
    server = plane(admin, metrics="127.0.0.1:0", reflection=True, ready_file=tmp_path / "ready.json", drain_grace_s=5.0)
    await server.start()
    yield server
    await server.stop(grace_s=0)


async def residency(channel: grpc.aio.Channel) -> str:
    stub = admin_pb2_grpc.AdminServiceStub(channel)
    metadata = (("authorization", f"Bearer {OPERATOR}"),)
    response = await stub.GetResidency(admin_pb2.GetResidencyRequest(), metadata=metadata, timeout=60)
    return str(response.base_digest)


async def health(channel: grpc.aio.Channel, service: str = "") -> str:
    request = health_pb2.HealthCheckRequest(service=service)
    response = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def own_connection(address: str) -> grpc.aio.Channel:
    """A channel that shares its connection with no other, and repeats nothing."""
    return grpc.aio.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)))


def addresses(server: PlaneServer) -> Addresses:
    assert server.addresses is not None
    return server.addresses


async def test_each_listener_serves_only_its_own_services(server: PlaneServer) -> None:
    async with grpc.aio.insecure_channel(addresses(server).operators) as channel:
        assert await residency(channel) == "b"
    async with grpc.aio.insecure_channel(addresses(server).callers) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await residency(channel)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_the_ready_file_tells_where_it_listens(server: PlaneServer, tmp_path: Path) -> None:
    found = addresses(server)
    expected = {"callers": found.callers, "operators": found.operators, "metrics": found.metrics}
    assert json.loads((tmp_path / "ready.json").read_text()) == expected
    assert all(not address.endswith(":0") for address in expected.values())


async def test_health_needs_no_credential_and_knows_each_service(server: PlaneServer) -> None:
    async with grpc.aio.insecure_channel(addresses(server).operators) as channel:
        assert await health(channel) == "SERVING"
        assert await health(channel, ADMIN.full_name) == "SERVING"
        await server.set_serving(False)
        assert await health(channel, ADMIN.full_name) == "NOT_SERVING"


async def test_reflection_lists_the_services(server: PlaneServer) -> None:
    async with grpc.aio.insecure_channel(addresses(server).operators) as channel:
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]), timeout=60)
        [response] = [response async for response in call]
    names = {service.name for service in response.list_services_response.service}
    assert {ADMIN.full_name, "grpc.health.v1.Health"} <= names


async def test_reflection_is_off_unless_asked_for() -> None:
    server = plane()
    found = await server.start()
    async with grpc.aio.insecure_channel(found.operators) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    await server.stop(grace_s=0)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_the_metrics_page_counts_calls(server: PlaneServer) -> None:
    async with grpc.aio.insecure_channel(addresses(server).operators) as channel:
        await residency(channel)
    page = (await asyncio.to_thread(_read, f"http://{addresses(server).metrics}/metrics")).decode()
    assert 'veneer_grpc_calls_running{listener="operators",method="/veneer.dataplane.v1.AdminService/GetResidency"}' in page


async def test_a_drain_says_not_serving_while_calls_go_on_to_their_end(server: PlaneServer, admin: Admin, tmp_path: Path) -> None:
    async with grpc.aio.insecure_channel(addresses(server).operators) as channel:
        metadata = (("authorization", f"Bearer {OPERATOR}"),)
        call = admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest(), metadata=metadata, timeout=60)
        await admin.started.wait()
        await server.drain()
        assert await health(channel) == "NOT_SERVING"
        assert not (tmp_path / "ready.json").exists()
        assert await residency(channel) == "b"
        stopping = asyncio.create_task(server.stop())
        admin.let_go.set()
        assert (await call).remaining == 3
        await stopping


async def test_a_call_that_outlives_the_grace_ends_unavailable(admin: Admin) -> None:
    server = plane(admin)
    found = await server.start()
    async with grpc.aio.insecure_channel(found.operators) as channel:
        metadata = (("authorization", f"Bearer {OPERATOR}"),)
        call = admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest(), metadata=metadata, timeout=60)
        await admin.started.wait()
        await server.stop(grace_s=0.05)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert admin.ended.is_set()


async def test_a_watch_of_health_neither_delays_a_stop_nor_ends_cancelled() -> None:
    server = plane(drain_grace_s=600.0)
    found = await server.start()
    async with grpc.aio.insecure_channel(found.callers) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=20)
        await watch.read()
        await asyncio.wait_for(server.stop(), 10)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watch.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_call_whose_request_has_not_come_when_a_plane_stops_ends_unavailable() -> None:
    server = plane()
    found = await server.start()
    async with RawClient(found.operators) as client:
        client.open(1, RESIDENCY, key=OPERATOR)
        await until(lambda: len(server._running) == 1)
        await server.stop(grace_s=0)
        assert await client.status() == UNAVAILABLE


async def test_a_call_within_the_grace_is_waited_for(admin: Admin) -> None:
    server = plane(admin, drain_grace_s=600.0)
    found = await server.start()
    async with grpc.aio.insecure_channel(found.operators) as channel, own_connection(found.operators) as late:
        metadata = (("authorization", f"Bearer {OPERATOR}"),)
        call = admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest(), metadata=metadata, timeout=60)
        await admin.started.wait()
        stopping = asyncio.create_task(server.stop())
        with pytest.raises(UnavailableError, match="shutting down"), typed_errors():
            while True:
                await residency(late)
        assert not stopping.done()
        admin.let_go.set()
        assert (await call).remaining == 3
        await stopping


@pytest.mark.parametrize("attempt", range(5))
async def test_calls_that_arrive_while_a_plane_stops_end_unavailable_and_not_cancelled(attempt: int) -> None:
    server = plane()
    found = await server.start()
    codes = Counter[grpc.StatusCode]()
    async with contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(own_connection(found.operators)) for _ in range(4)]
        is_over = False

        async def go_on_calling(channel: grpc.aio.Channel) -> None:
            while not is_over:
                try:
                    await residency(channel)
                    codes[grpc.StatusCode.OK] += 1
                except grpc.aio.AioRpcError as error:
                    codes[error.code()] += 1

        callers = [asyncio.create_task(go_on_calling(channel)) for channel in channels for _ in range(25)]
        await until(lambda: codes[grpc.StatusCode.OK] >= 200)
        await server.stop(grace_s=5.0)
        is_over = True
        await asyncio.gather(*callers)
    assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}


async def test_a_second_stop_does_nothing(server: PlaneServer) -> None:
    await server.stop(grace_s=0)
    await server.stop()


async def test_a_second_signal_cuts_the_delay_short(admin: Admin) -> None:
    server = plane(admin, drain_delay_s=600.0)
    await server.start()
    running = asyncio.create_task(server.run())
    await asyncio.sleep(0)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)  # two of a kind at the same time are one
    await asyncio.wait_for(running, 10)


async def test_more_calls_than_a_plane_takes_are_exhausted_with_a_delay_and_health_answers(admin: Admin) -> None:
    server = plane(admin, calls=CallLimits(max_calls=2, retry_after_s=0.25))
    found = await server.start()
    metadata = (("authorization", f"Bearer {OPERATOR}"),)
    async with grpc.aio.insecure_channel(found.operators) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        running = [stub.Drain(admin_pb2.DrainRequest(), metadata=metadata, timeout=20) for _ in range(2)]
        await until(lambda: len(server._running) == 2)
        with pytest.raises(ResourceExhaustedError, match="runs 2 calls, at most 2") as caught, typed_errors():
            await residency(channel)
        assert caught.value.retry_after_s == 0.25
        assert await health(channel) == "SERVING"
        admin.let_go.set()
        assert [(await call).remaining for call in running] == [3, 3]
        await until(lambda: len(server._running) == 0)
        assert await residency(channel) == "b"
    await server.stop(grace_s=0)


class NeverKnows:
    """Knows no caller, and takes for ever to say so."""

    async def authenticate(self, key_digest: bytes) -> Identity | None:
        await asyncio.Event().wait()
        raise AssertionError


async def test_calls_of_callers_never_keep_operators_out() -> None:
    add = partial(admin_pb2_grpc.add_AdminServiceServicer_to_server, Admin())
    server = PlaneServer(
        ServerOptions(callers="127.0.0.1:0", operators="127.0.0.1:0", calls=CallLimits(max_calls=2)),
        services=[Service(ADMIN, add)],
        rules=RULES,
        authenticators={**AUTHENTICATORS, "callers": NeverKnows()},
    )
    found = await server.start()
    async with own_connection(found.callers) as callers, own_connection(found.operators) as operators:
        waiting = [asyncio.create_task(residency(callers)) for _ in range(2)]
        await until(lambda: len(server._running) == 2)
        with pytest.raises(ResourceExhaustedError, match="runs 2 calls"), typed_errors():
            await residency(callers)
        assert await residency(operators) == "b"
        await server.stop(grace_s=0)
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_calls_that_send_no_request_end_before_others_are_refused() -> None:
    server = plane(calls=CallLimits(max_unheard=2))
    found = await server.start()
    async with grpc.aio.insecure_channel(found.operators) as channel, RawClient(found.operators) as client:
        for stream in (1, 3):
            client.open(stream, RESIDENCY, key=OPERATOR)
        await until(lambda: len(server._running) == 2)
        assert await residency(channel) == "b"
        assert await client.status() == RESOURCE_EXHAUSTED
        assert await residency(channel) == "b", "there is room for its request"
    await server.stop(grace_s=0)


async def test_watches_of_health_without_end_end_the_oldest_and_checks_are_answered() -> None:
    server = plane(calls=CallLimits(max_open=3))
    found = await server.start()
    async with grpc.aio.insecure_channel(found.callers) as channel, own_connection(found.callers) as other:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = []
        for _ in range(5):
            watches.append(stub.Watch(health_pb2.HealthCheckRequest(), timeout=60))
            await watches[-1].read()
        for watch in watches[:2]:
            with pytest.raises(ResourceExhaustedError) as caught, typed_errors():
                await watch.read()
            assert caught.value.retry_after_s == 1.0
        assert await health(other) == "SERVING"
        assert not watches[-1].done()
    await server.stop(grace_s=0)


async def test_a_call_without_a_key_is_refused_before_its_request_comes(server: PlaneServer) -> None:
    async with RawClient(addresses(server).operators) as client:
        client.open(1, RESIDENCY)
        assert await client.status() == UNAUTHENTICATED


async def test_a_call_that_ends_without_a_request_is_refused(server: PlaneServer) -> None:
    async with RawClient(addresses(server).operators) as client:
        client.open(1, RESIDENCY, key=OPERATOR)
        client.finish(1)
        assert await client.status() == INVALID_ARGUMENT


async def test_sigterm_drains_and_stops(admin: Admin) -> None:
    server = plane(admin)
    await server.start()
    order: list[str] = []

    async def on_drain() -> None:
        order.append("drain")

    running = asyncio.create_task(server.run(on_drain=on_drain))
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 60)
    assert order == ["drain"]


async def test_a_second_signal_cuts_the_grace_short(admin: Admin) -> None:
    server = plane(admin, drain_grace_s=600.0)
    found = await server.start()
    async with grpc.aio.insecure_channel(found.operators) as channel:
        metadata = (("authorization", f"Bearer {OPERATOR}"),)
        call = admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest(), metadata=metadata, timeout=60)
        await admin.started.wait()
        draining = asyncio.Event()

        async def on_drain() -> None:
            draining.set()

        running = asyncio.create_task(server.run(on_drain=on_drain))
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(draining.wait(), 60)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(running, 60)
        with pytest.raises(grpc.aio.AioRpcError):
            await call


def test_a_method_without_a_rule_stops_the_start() -> None:
    with pytest.raises(RuleError, match=r"no rule for /veneer\.dataplane\.v1\.AdminService/Drain"):
        plane(rules={name: rule for name, rule in RULES.items() if not name.endswith("Drain")})


def test_a_rule_without_a_method_or_without_anyone_stops_the_start() -> None:
    with pytest.raises(RuleError, match="Drane, which is not served"):
        plane(rules={**RULES, "/veneer.dataplane.v1.AdminService/Drane": Rule.of("operator")})
    with pytest.raises(RuleError, match="admits nobody"):
        plane(rules={**RULES, "/veneer.dataplane.v1.AdminService/Drain": Rule()})


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:7600", "example.org:7600"])
@pytest.mark.parametrize("listener", ["callers", "operators"])
def test_plaintext_beyond_loopback_is_refused_unless_allowed(listener: str, address: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{listener}: .*not a loopback address"):
        plane(**{listener: address})
    plane(**{listener: address}, allow_plaintext=True)


@pytest.mark.parametrize("address", ["127.0.0.1", "nonsense", ":7600", "127.0.0.1:http"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(InvalidArgumentError, match="not an address"):
        plane(callers=address)


async def test_a_port_that_is_taken_fails_the_start(server: PlaneServer) -> None:
    with pytest.raises(UnavailableError, match="cannot listen for operators"):
        await plane(operators=addresses(server).operators).start()
    with pytest.raises(UnavailableError, match="cannot listen for metrics"):
        await plane(metrics=addresses(server).metrics).start()


async def test_tls_serves_who_trusts_it_and_client_certificates_are_checked(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    tls = Tls(certificate=certificate, key=key)
    server = plane(tls=tls, operators_tls=Tls(certificate=certificate, key=key, client_ca=certificate))
    found = await server.start()
    trusting = grpc.ssl_channel_credentials(certificate.read_bytes())
    known = grpc.ssl_channel_credentials(certificate.read_bytes(), key.read_bytes(), certificate.read_bytes())
    async with grpc.aio.secure_channel(found.callers, trusting) as channel:
        assert await health(channel) == "SERVING"
    async with grpc.aio.secure_channel(found.operators, known) as channel:
        assert await residency(channel) == "b"
    for refused in (grpc.aio.secure_channel(found.operators, trusting), grpc.aio.insecure_channel(found.callers)):
        async with refused as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await health(channel)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop(grace_s=0)


async def test_a_missing_tls_file_is_named(tmp_path: Path) -> None:
    server = plane(tls=Tls(certificate=tmp_path / "absent.pem", key=tmp_path / "absent.key"))
    with pytest.raises(InvalidArgumentError, match=r"absent\.key"):
        await server.start()


async def test_a_message_above_the_limit_is_refused(server: PlaneServer) -> None:
    async with grpc.aio.insecure_channel(addresses(server).operators) as channel:
        method = channel.unary_unary("/veneer.dataplane.v1.AdminService/GetResidency")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(b"x" * ((4 << 20) + 1), metadata=(("authorization", f"Bearer {OPERATOR}"),), timeout=60)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that is its own authority."""
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "veneer test")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, private.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
    builder = builder.add_extension(
        x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
    )
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    certificate, key = folder / "server.pem", folder / "server.key"
    certificate.write_bytes(builder.sign(private, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    no_password = serialization.NoEncryption()
    key.write_bytes(private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, no_password))
    return certificate, key


def _read(url: str) -> bytes:
    with urlopen(url, timeout=60) as response:
        return bytes(response.read())
