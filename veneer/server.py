"""The serving frame that both planes share: two listeners, TLS, health, reflection, metrics, drain and stop.

A plane builds a `PlaneServer` from its services, its table of rules and its authenticators, and calls `run`. Tests call `start`
and `stop` in their own event loop, on port 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import importlib.util
import ipaddress
import json
import logging
import os
import signal
import socket
import threading
import urllib.parse
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIServer

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry, start_http_server

from veneer.access import OPEN_RULES, Authenticator, ListenerName, Rules, check_rules
from veneer.call_records import CallMetrics
from veneer.errors import InvalidArgumentError, UnavailableError, Violation
from veneer.heap import bound_heap, keep_trimmed
from veneer.interceptors import CallInterceptor, Shortcut
from veneer.running_calls import MAX_CALLS, CallLimits, RunningCalls
from veneer.settings import host_of, is_loopback

_LOG = logging.getLogger(__name__)

MAX_RECEIVE_BYTES = 4 << 20
MAX_STREAMS_PER_CONNECTION = 2_048
"""Streams that a connection may have open, among them those that it has reset and the plane has not forgotten yet."""
_MINUTE_MS = 60_000
_END_S = 15.0
"""How long a process may take to end once its work is done."""

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
    # A silent client is found within 40 s; clients may ping each 20 s (the default minimum of 300 s answers them with GOAWAY).
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 20_000),
    ("grpc.http2.max_ping_strikes", 2),
    # Connections are renewed (gRPC adds the jitter) so that callers spread again over replicas; running streams keep theirs.
    ("grpc.max_connection_age_ms", 30 * _MINUTE_MS),
    ("grpc.max_connection_age_grace_ms", 60 * _MINUTE_MS),
    # A connection that opens more streams than this, or resets them faster than the plane forgets them, is refused the others
    # (REFUSED_STREAM, which clients read as UNAVAILABLE) before they reach the event loop. Clients that heed SETTINGS wait.
    ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
    # Calls that wait for the event loop. Beyond the first bound gRPC resets some by chance, beyond the second all, and callers
    # see CANCELLED: at the defaults (1,000 and 3,000) 2,663 of 6,000 at once. The plane's own bound comes first.
    ("grpc.server.max_pending_requests", MAX_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_CALLS),
    # gRPC would reset a call that waited for 30 s too; its caller's deadline says how long it may.
    ("grpc.server_max_unrequested_time_in_server", 3600),
    # Two servers on one port would share its calls by chance: let the second fail.
    ("grpc.so_reuseport", 0),
)


@dataclass(frozen=True, slots=True)
class Service:
    """A service to serve.

    Attributes:
        descriptor: E.g. `catalog_pb2.DESCRIPTOR.services_by_name["CatalogService"]`.
        add: Adds its servicer, e.g. `partial(catalog_pb2_grpc.add_CatalogServiceServicer_to_server, servicer)`.
        listeners: Where it is served. A service with methods for callers and for operators is served on both.
    """

    descriptor: ServiceDescriptor
    add: Callable[[grpc.aio.Server], None]
    listeners: tuple[ListenerName, ...] = ("callers", "operators")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Files of a listener's transport security, all PEM.

    Attributes:
        certificate: The server's chain.
        key: Its private key.
        client_ca: Asks clients for a certificate of one of these authorities; None asks for none.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Settings of the frame.

    Attributes:
        callers: Address of the listener for tenants and nodes; port 0 takes any free one.
        operators: Address of the listener for operators.
        metrics: Address of the Prometheus page (plain HTTP); None serves none.
        tls: Transport security of both listeners; None is plaintext.
        operators_tls: Other transport security for the operators' listener; None is the same as `tls`.
        allow_plaintext: Allows plaintext on an address beyond loopback.
        reflection: Serves the API's description to anyone who can connect.
        ready_file: Written when the service listens: JSON with the addresses. Removed when it begins to drain.
        drain_delay_s: How long to go on admitting after reporting NOT_SERVING, so that routers notice.
        drain_grace_s: How long running calls may go on after that.
        calls: Bounds of the calls that run.
    """

    callers: str
    operators: str
    metrics: str | None = None
    tls: Tls | None = None
    operators_tls: Tls | None = None
    allow_plaintext: bool = False
    reflection: bool = False
    ready_file: Path | None = None
    drain_delay_s: float = 0.0
    drain_grace_s: float = 10.0
    calls: CallLimits = field(default_factory=CallLimits)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the server listens, as `host:port`."""

    callers: str
    operators: str
    metrics: str = ""


class PlaneServer:
    """The listeners of one plane. Owned by the event loop that starts it.

    Attributes:
        addresses: Where it listens, once started.
        registry: The Prometheus registry that its page shows.
        is_draining: Whether it said that it goes away.
    """

    def __init__(
        self,
        options: ServerOptions,
        *,
        services: Sequence[Service],
        rules: Rules,
        authenticators: Mapping[ListenerName, Authenticator],
        registry: CollectorRegistry | None = None,
        shortcuts: Mapping[str, Shortcut] | None = None,
    ) -> None:
        """Checks the settings and that every served method has a rule; nothing listens yet.

        Args:
            options: Settings.
            services: What is served.
            rules: Who may call what.
            authenticators: Who knows credentials, by listener.
            registry: Shown on the page of metrics.
            shortcuts: What was answered before, by full name of the unary method.

        Raises:
            RuleError: The table of rules does not match the services.
            InvalidArgumentError: Plaintext beyond loopback without leave, or an address that is none.
        """
        check_rules(rules, [service.descriptor for service in services])
        self.registry = CollectorRegistry() if registry is None else registry
        self.addresses: Addresses | None = None
        self._options = options
        self._services = services
        self._rules = {**rules, **OPEN_RULES}
        self._authenticators = authenticators
        self._metrics = CallMetrics(self.registry)
        self._shortcuts = shortcuts or {}
        self._running = RunningCalls(options.calls)
        self._hurried = asyncio.Event()
        self.is_draining = False
        self._interceptors: list[CallInterceptor] = []
        self._servers: list[grpc.aio.Server] = []
        self._health: list[health.aio.HealthServicer] = []
        self._page: tuple[WSGIServer, threading.Thread] | None = None
        for name, address in (("callers", options.callers), ("operators", options.operators)):
            if self._tls(name) is None and not options.allow_plaintext and not _is_loopback(address):
                raise _refused(
                    name, f"{address} is not a loopback address: give TLS files, or allow plaintext by the setting for it"
                )

    async def start(self, *, serving: bool = True) -> Addresses:
        """Listens. With `serving=False` health says NOT_SERVING until `set_serving(True)`.

        Raises:
            UnavailableError: An address is taken or cannot be listened on.
            OSError: The ready file cannot be written.
        """
        try:
            callers = await self._listen("callers", self._options.callers)
            operators = await self._listen("operators", self._options.operators)
            metrics = "" if self._options.metrics is None else self._serve_metrics(self._options.metrics)
            addresses = Addresses(callers, operators, metrics)
            await self.set_serving(serving)
            if self._options.ready_file is not None:
                _write_whole(self._options.ready_file, json.dumps(asdict(addresses)))
        except BaseException:
            await self.stop(grace_s=0)  # before `addresses` is set: no client knows the listeners, so none has to be shut down
            raise
        self.addresses = addresses
        _LOG.info("listening", extra=asdict(addresses))
        return addresses

    async def set_serving(self, serving: bool) -> None:  # noqa: FBT001  the name says what it is
        """Says by health whether new calls are welcome; it refuses none."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for servicer in self._health:
            for name in ("", *(service.descriptor.full_name for service in self._services)):
                await servicer.set(name, status)

    async def drain(self) -> None:
        """Reports NOT_SERVING for good and waits until routers have noticed."""
        self.is_draining = True
        if self._options.ready_file is not None:
            self._options.ready_file.unlink(missing_ok=True)
        for servicer in self._health:
            await servicer.enter_graceful_shutdown()
        await self._unless_hurried(self._options.drain_delay_s, asyncio.sleep(self._options.drain_delay_s))

    async def stop(self, *, grace_s: float | None = None) -> None:
        """Ends: new calls are refused at once, running ones have `grace_s` (default: the setting); all of them end UNAVAILABLE.

        gRPC's own way to stop resets what has arrived and waits, and what runs when the grace is over, and callers see CANCELLED.
        So it only gets to see a server without calls, whose connections have been ended.
        """
        if self._servers:
            self._running.refuse()
            grace = self._options.drain_grace_s if grace_s is None else grace_s
            await self._unless_hurried(grace, self._running.wait_idle())
            await self._running.end()
            if self.addresses is not None:
                _end_connections((self.addresses.callers, self.addresses.operators))
            await asyncio.gather(*(server.stop(0) for server in self._servers))
        for interceptor in self._interceptors:
            interceptor.flush()
        for part in (self._servers, self._health, self._interceptors):
            part.clear()
        if self._page is not None:
            server, thread = self._page
            self._page = None
            await asyncio.to_thread(_close_page, server, thread)

    async def run(self, *, on_drain: Callable[[], Awaitable[None]] | None = None) -> None:
        """Serves until SIGTERM or SIGINT, then drains and stops. A second signal cuts delay and grace short.

        Args:
            on_drain: Called after health says NOT_SERVING and before running calls are waited for, e.g. to refuse new work.
        """
        asked = asyncio.Event()

        def on_signal() -> None:
            (self._hurried if asked.is_set() else asked).set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        try:
            if not self._servers:
                await self.start()
            await asked.wait()
            _LOG.info("draining", extra={"delay_s": self._options.drain_delay_s, "grace_s": self._options.drain_grace_s})
            await self.drain()
            if on_drain is not None:
                await on_drain()
            await self.stop()
            _LOG.info("stopped")
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def _unless_hurried(self, limit_s: float, waiting: Coroutine[Any, Any, None]) -> None:
        """Waits for so long at most, and no longer once a second signal has come."""
        tasks = {asyncio.create_task(waiting), asyncio.create_task(self._hurried.wait())}
        try:
            await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _tls(self, name: str) -> Tls | None:
        return (self._options.operators_tls or self._options.tls) if name == "operators" else self._options.tls

    async def _listen(self, name: ListenerName, address: str) -> str:
        interceptor = CallInterceptor(
            listener=name,
            rules=self._rules,
            authenticator=self._authenticators[name],
            metrics=self._metrics,
            shortcuts=self._shortcuts,
            running=self._running,
        )
        self._interceptors.append(interceptor)
        server = grpc.aio.server(interceptors=[interceptor], options=_OPTIONS)
        served = [service for service in self._services if name in service.listeners]
        for service in served:
            service.add(server)
        servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        if self._options.reflection:
            _add_reflection(server, [service.descriptor.full_name for service in served])
        tls = self._tls(name)
        try:
            port = server.add_insecure_port(address) if tls is None else server.add_secure_port(address, _credentials(tls))
        except RuntimeError as error:
            raise UnavailableError(f"cannot listen for {name} on {address}") from error
        self._servers.append(server)
        self._health.append(servicer)
        await server.start()
        return address if address.startswith("unix:") else f"{_host(address)}:{port}"

    def _serve_metrics(self, address: str) -> str:
        parts = urllib.parse.urlsplit(f"//{address}")
        try:
            self._page = start_http_server(parts.port or 0, parts.hostname or "", registry=self.registry)
        except OSError as error:
            raise UnavailableError(f"cannot listen for metrics on {address}: {error.strerror}") from error
        return f"{_host(address)}:{self._page[0].server_port}"


def run_main(main: Coroutine[Any, Any, None]) -> None:
    """Runs a process's main coroutine, with its heap bounded and trimmed, on uvloop where it is installed and safe.

    Nothing is left to do when it returns or raises; a thread or task that then keeps the process from ending, within 15 s, is
    shown on standard error with all others, and the process ends with status 1.

    uvloop starts child processes by a fork, and gRPC's handlers of forks then crash about one child in a hundred before it
    begins (grpcio 1.85). They stay away only if the environment says so before gRPC is imported, as it does in the local stack
    and in the image; otherwise asyncio's own loop runs, which starts children without those handlers.
    """
    bound_heap()
    handlers_are_off = os.environ.get("GRPC_ENABLE_FORK_SUPPORT") in ("0", "false")  # noqa: TID251  no setting of ours
    if not handlers_are_off or importlib.util.find_spec("uvloop") is None:
        asyncio.run(_trimmed(main))
        return
    import uvloop

    uvloop.run(_trimmed(main))


async def _trimmed(main: Coroutine[Any, Any, None]) -> None:
    trimming = asyncio.create_task(keep_trimmed(), name="trim-heap")
    try:
        await main
    finally:
        faulthandler.dump_traceback_later(_END_S, exit=True)
        trimming.cancel()
        await asyncio.gather(trimming, return_exceptions=True)


def _add_reflection(server: grpc.aio.Server, names: Sequence[str]) -> None:
    from grpc_reflection.v1alpha import reflection

    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)


def _credentials(tls: Tls) -> grpc.ServerCredentials:
    try:
        client_ca = None if tls.client_ca is None else tls.client_ca.read_bytes()
        pair = (tls.key.read_bytes(), tls.certificate.read_bytes())
    except OSError as error:
        raise _refused("tls", f"cannot read {error.filename}: {error.strerror}") from error
    return grpc.ssl_server_credentials([pair], root_certificates=client_ca, require_client_auth=client_ca is not None)


def _end_connections(addresses: Sequence[str]) -> None:
    """Shuts listeners and their connections down, so that clients see them end: calls on the way end UNAVAILABLE.

    gRPC keeps the descriptors to itself and goes on owning them. Each is looked at and shut down through a duplicate, which stays
    the same socket whatever gRPC does meanwhile. On a system that does not list descriptors, gRPC resets what is on the way.
    """
    ends = {_end(address) for address in addresses}
    try:
        numbers = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    except OSError:
        return
    for number in sorted(numbers):  # those that listen were opened first: no client comes back meanwhile
        try:
            own = os.dup(number)
        except OSError:
            continue  # closed meanwhile
        try:
            connection = socket.socket(fileno=own)
        except OSError:
            os.close(own)  # no socket
            continue
        with connection, contextlib.suppress(OSError):  # ended meanwhile
            if connection.type == socket.SOCK_STREAM and _is_end(connection.getsockname(), ends):
                connection.shutdown(socket.SHUT_RDWR)


def _end(address: str) -> tuple[str, int]:
    """Where connections to a listener end: address (empty: any) and port, or path and 0."""
    if address.startswith("unix:"):
        return address.removeprefix("unix:").removeprefix("//"), 0
    host = _host(address).strip("[]")
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        host = ""
    else:
        host = "" if ip.is_unspecified else str(ip)
    return host, int(address.rpartition(":")[2])


def _is_end(name: Any, ends: set[tuple[str, int]]) -> bool:
    if isinstance(name, str):
        return (name, 0) in ends
    if not isinstance(name, tuple):
        return False
    host, port = str(name[0]).removeprefix("::ffff:"), name[1]
    return (host, port) in ends or ("", port) in ends


def _is_loopback(address: str) -> bool:
    try:
        return is_loopback(address)
    except ValueError as error:
        raise _refused(address, str(error)) from error


def _host(address: str) -> str:
    try:
        return host_of(address)
    except ValueError as error:
        raise _refused(address, str(error)) from error


def _refused(field: str, description: str) -> InvalidArgumentError:
    return InvalidArgumentError.of([Violation(field, description)])


def _close_page(server: WSGIServer, thread: threading.Thread) -> None:
    server.shutdown()
    server.server_close()
    thread.join()


def _write_whole(path: Path, text: str) -> None:
    """Writes a file so that whoever sees it sees all of it."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text)
    part.replace(path)
