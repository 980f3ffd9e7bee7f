"""The clients for code that blocks: the same methods as the asynchronous ones, over the same core.

Any number of threads may share one. A process that forks does so before it makes its first, since gRPC does not outlive a fork: a
child that comes later is refused. A call that is interrupted, as by Ctrl-C, is cancelled on the service too. Call them from no
event loop, which they would hold up; `veneer.client` is for those.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from veneer.channel import ClientTls
from veneer.client import Client
from veneer.connection import Connection
from veneer.controlplane.v1 import catalog_pb2
from veneer.errors import FailedPreconditionError
from veneer.loop_thread import Calls, LoopThread, Stream
from veneer.operator_client import OperatorClient
from veneer.organization_client import OrganizationClient
from veneer.origin import NO_ORIGIN, Origin

_C_co = TypeVar("_C_co", bound=Connection, covariant=True)
_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Blocking(Generic[_C_co]):
    """An asynchronous client and the thread that it lives in. Any thread may call it."""

    def __init__(self, client: _C_co) -> None:
        """Takes the client, which nobody else uses."""
        self._client = client
        self._thread: LoopThread | None = LoopThread.shared()
        self._finalize = weakref.finalize(self, _abandon, self._thread, client)
        self._finalize.atexit = False  # the thread ends then, and all that is in it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the channels; calls that run end cancelled. A second time does nothing."""
        thread, self._thread = self._thread, None
        if thread is not None and self._finalize.detach() is not None:
            thread.run(self._client.close())

    def _here(self) -> LoopThread:
        if self._thread is None:
            raise FailedPreconditionError("this client was closed")
        self._thread.check_process()
        return self._thread


def _blocking(
    method: Callable[Concatenate[_C_co, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[_Blocking[_C_co], _P], _T]:
    """The method, for a thread that waits for what it returns."""

    @functools.wraps(method)
    def call(self: _Blocking[_C_co], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        thread = self._here()
        return thread.run(method(self._client, *args, **kwargs))

    return call


def _streaming(
    method: Callable[Concatenate[_C_co, _P], AsyncGenerator[_T]],
) -> Callable[Concatenate[_Blocking[_C_co], _P], Stream[_T]]:
    """The method, for a thread that goes through what it yields."""

    @functools.wraps(method)
    def call(self: _Blocking[_C_co], /, *args: _P.args, **kwargs: _P.kwargs) -> Stream[_T]:
        thread = self._here()
        return Stream(thread, method(self._client, *args, **kwargs))

    signature = inspect.signature(method)
    returns = str(signature.return_annotation).replace("AsyncGenerator", "Stream")
    call.__signature__ = signature.replace(return_annotation=returns)  # type: ignore[attr-defined]
    return call


class SyncClient(_Blocking[Client]):
    """What a tenant's key can do; see `veneer.client.Client`, whose methods these are.

    `stream_chat`, `stream_complete` and `generate` give an iterator: closing it, dropping it, or an exception that leaves its
    `with` block cancels the request.
    """

    def __init__(
        self, *, control: str = "", data: str = "", key: str = "", tls: ClientTls | None = None, timeout_s: float = 30.0
    ) -> None:
        """See `veneer.connection.Connection`."""
        super().__init__(Client(control=control, data=data, key=key, tls=tls, timeout_s=timeout_s))

    chat = _blocking(Client.chat)
    complete = _blocking(Client.complete)
    generate = _streaming(Client.generate)
    stream_chat = _streaming(Client.stream_chat)
    stream_complete = _streaming(Client.stream_complete)

    def publish(
        self,
        folder: Path,
        *,
        adapter: str,
        base: str,
        alias: str = "",
        label: str = "",
        origin: Origin = NO_ORIGIN,
        signature: Path | None = None,
        probe: bool = False,
        exist_ok: bool = False,
        request_id: str = "",
        progress: Callable[[int, int], None] | None = None,
        timeout_s: float = 1800.0,
    ) -> catalog_pb2.PublishResponse:
        """See `Client.publish`; `progress` is called in the thread that waits, and what it raises ends the upload."""
        thread, calls, told = self._here(), Calls(), progress or _nothing
        sending = self._client.publish(
            folder,
            adapter=adapter,
            base=base,
            alias=alias,
            label=label,
            origin=origin,
            signature=signature,
            probe=probe,
            exist_ok=exist_ok,
            request_id=request_id,
            progress=lambda sent, total: calls.put(lambda: told(sent, total)),
            timeout_s=timeout_s,
        )
        return thread.run(sending, calls=calls)

    adapter = _blocking(Client.adapter)
    adapters = _blocking(Client.adapters)
    attach_signature = _blocking(Client.attach_signature)
    audit = _blocking(Client.audit)
    bases = _blocking(Client.bases)
    canary = _blocking(Client.canary)
    create_grant = _blocking(Client.create_grant)
    create_key = _blocking(Client.create_key)
    delete_adapter = _blocking(Client.delete_adapter)
    delete_version = _blocking(Client.delete_version)
    distrust_key = _blocking(Client.distrust_key)
    freeze = _blocking(Client.freeze)
    grants = _blocking(Client.grants)
    keys = _blocking(Client.keys)
    promote = _blocking(Client.promote)
    retire = _blocking(Client.retire)
    revoke_grant = _blocking(Client.revoke_grant)
    revoke_key = _blocking(Client.revoke_key)
    rotate_key = _blocking(Client.rotate_key)
    rollback = _blocking(Client.rollback)
    set_alias = _blocking(Client.set_alias)
    set_fallback = _blocking(Client.set_fallback)
    set_signature_policy = _blocking(Client.set_signature_policy)
    start_canary = _blocking(Client.start_canary)
    stop_canary = _blocking(Client.stop_canary)
    trust_key = _blocking(Client.trust_key)
    trusted_keys = _blocking(Client.trusted_keys)
    usage = _blocking(Client.usage)
    versions = _blocking(Client.versions)


class SyncOperatorClient(_Blocking[OperatorClient]):
    """What an operator's key can do; see `veneer.operator_client.OperatorClient`, whose methods these are."""

    def __init__(
        self, *, control: str = "", data: str = "", key: str = "", tls: ClientTls | None = None, timeout_s: float = 30.0
    ) -> None:
        """See `veneer.connection.Connection`."""
        super().__init__(OperatorClient(control=control, data=data, key=key, tls=tls, timeout_s=timeout_s))

    adopt_tenant = _blocking(OperatorClient.adopt_tenant)
    audit = _blocking(OperatorClient.audit)
    bases = _blocking(OperatorClient.bases)
    create_enrollment_token = _blocking(OperatorClient.create_enrollment_token)
    create_key = _blocking(OperatorClient.create_key)
    create_organization = _blocking(OperatorClient.create_organization)
    create_organization_key = _blocking(OperatorClient.create_organization_key)
    create_tenant = _blocking(OperatorClient.create_tenant)
    drain = _blocking(OperatorClient.drain)
    keys = _blocking(OperatorClient.keys)
    nodes = _blocking(OperatorClient.nodes)
    organization = _blocking(OperatorClient.organization)
    organization_keys = _blocking(OperatorClient.organization_keys)
    organizations = _blocking(OperatorClient.organizations)
    pin_version = _blocking(OperatorClient.pin_version)
    pins = _blocking(OperatorClient.pins)
    register_base = _blocking(OperatorClient.register_base)
    residency = _blocking(OperatorClient.residency)
    revoke_key = _blocking(OperatorClient.revoke_key)
    revoke_node = _blocking(OperatorClient.revoke_node)
    revoke_organization_key = _blocking(OperatorClient.revoke_organization_key)
    rotate_key = _blocking(OperatorClient.rotate_key)
    rotate_organization_key = _blocking(OperatorClient.rotate_organization_key)
    set_fallback = _blocking(OperatorClient.set_fallback)
    set_organization_quotas = _blocking(OperatorClient.set_organization_quotas)
    set_tenant_limits = _blocking(OperatorClient.set_tenant_limits)
    set_tenant_quotas = _blocking(OperatorClient.set_tenant_quotas)
    tenants = _blocking(OperatorClient.tenants)
    unload = _blocking(OperatorClient.unload)
    unpin_version = _blocking(OperatorClient.unpin_version)
    usage = _blocking(OperatorClient.usage)
    watch_residency = _streaming(OperatorClient.watch_residency)


class SyncOrganizationClient(_Blocking[OrganizationClient]):
    """What an organisation's key can do; see `veneer.organization_client.OrganizationClient`, whose methods these are."""

    def __init__(
        self, *, control: str = "", data: str = "", key: str = "", tls: ClientTls | None = None, timeout_s: float = 30.0
    ) -> None:
        """See `veneer.connection.Connection`."""
        super().__init__(OrganizationClient(control=control, data=data, key=key, tls=tls, timeout_s=timeout_s))

    audit = _blocking(OrganizationClient.audit)
    create_key = _blocking(OrganizationClient.create_key)
    create_organization_key = _blocking(OrganizationClient.create_organization_key)
    create_tenant = _blocking(OrganizationClient.create_tenant)
    keys = _blocking(OrganizationClient.keys)
    organization = _blocking(OrganizationClient.organization)
    organization_keys = _blocking(OrganizationClient.organization_keys)
    revoke_key = _blocking(OrganizationClient.revoke_key)
    revoke_organization_key = _blocking(OrganizationClient.revoke_organization_key)
    rotate_key = _blocking(OrganizationClient.rotate_key)
    rotate_organization_key = _blocking(OrganizationClient.rotate_organization_key)
    tenants = _blocking(OrganizationClient.tenants)
    usage = _blocking(OrganizationClient.usage)


def _nothing(_sent: int, _total: int) -> None:
    """Progress that nobody asked for."""


def _abandon(thread: LoopThread, client: Connection) -> None:
    thread.forget(client.close())
