"""The data plane's calls to the control plane, as typed functions: resolve, introspect, grants and bytes, changes, reports.

Proto messages stop here. Every call has a deadline; failures become `veneer.errors` families, and `UnavailableError` alone means
that the control plane cannot be reached.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc

from dataplane.blob_grants import Blob, Grant, LostFileError, read_grant
from dataplane.enrollment import NotEnrolledError
from dataplane.quotas import Amounts, Demand, Leased
from dataplane.report_client import ReportClient, limits_of
from dataplane.resolution import Answer, Arm, Caller, Refusal, Resolution, TenantQuotas
from dataplane.resolve_cache import Key
from dataplane.version_names import VersionName, VersionNames
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
from veneer.private_files import open_private
from veneer.statuses import ended_by_transport

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_CHECK_S = 1.0
_OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),
)
_REFUSALS = {
    nodes_pb2.REFUSAL_REASON_NOT_FOUND: Refusal.NOT_FOUND,
    nodes_pb2.REFUSAL_REASON_ROLE: Refusal.ROLE,
    nodes_pb2.REFUSAL_REASON_BASE_MISMATCH: Refusal.BASE_MISMATCH,
    nodes_pb2.REFUSAL_REASON_RETIRED: Refusal.RETIRED,
    nodes_pb2.REFUSAL_REASON_QUARANTINED: Refusal.QUARANTINED,
}


ALIAS_MOVED = int(nodes_pb2.CHANGE_KIND_ALIAS)
"""Kind of a change that points an alias at a version."""
PROBE_ASKED = int(nodes_pb2.CHANGE_KIND_PROBE)
"""Kind of a change that asks for a probe of a version."""
TRUST_CHANGED = int(nodes_pb2.CHANGE_KIND_TRUST)
"""Kind of a change of what a tenant asks of signatures."""


class EnrollmentError(FailedPreconditionError):
    """The node is not enrolled, or was enrolled for another base."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a credential belongs to; see `veneer.controlplane.v1.IntrospectResponse`."""

    kind: str
    tenant: str
    roles: tuple[str, ...]
    key_id: str


@dataclass(frozen=True, slots=True)
class Change:
    """A committed change of the catalogue: identifiers only."""

    kind: int
    tenant: str
    adapter: str
    version: str
    generation: int


@dataclass(frozen=True, slots=True)
class Changes:
    """A page of the change feed."""

    changes: tuple[Change, ...]
    next_cursor: str
    reset: bool


def open_channel(address: str, *, ca_pem: bytes | None) -> grpc.aio.Channel:
    """Returns a channel to the control plane; without a certificate authority it is plaintext."""
    if ca_pem is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(root_certificates=ca_pem), options=_OPTIONS)


class CatalogClient:
    """Calls the control plane as one node. Owned by the event loop.

    Args:
        channel: Channel to the control plane's listener for callers; closed by its owner.
        base_digest: Digest of the base that this node serves.
        timeout_s: Deadline of a small call.

    Attributes:
        reports: Tells what happened on the node.
        on_refused: Told when the control plane begins to refuse the node's own key: it was revoked.
        names: What versions are called, as far as answers told.
    """

    def __init__(self, channel: grpc.aio.Channel, *, base_digest: str, timeout_s: float = 2.0) -> None:
        self._nodes = nodes_pb2_grpc.NodeServiceStub(channel)
        self._bases = bases_pb2_grpc.BaseServiceStub(channel)
        self.names = VersionNames()
        self.reports = ReportClient(self._nodes, self._ask)
        self._base_digest = base_digest
        self._timeout_s = timeout_s
        self._secret = ""
        self.on_refused: Callable[[], None] = lambda: None
        self._refused_s: float | None = None
        self._check: asyncio.Task[None] | None = None
        self._checked_s = -_CHECK_S

    @property
    def is_enrolled(self) -> bool:
        """Whether the control plane took the node's own key, as far as is known."""
        return self._refused_s is None

    async def enroll(self, key_file: Path, *, token: str | None) -> None:
        """Makes the node known: by its kept key, else by a one-time token whose key is then kept in `key_file` (mode 0600).

        Raises:
            EnrollmentError: There is neither key nor token, or the key was given for another base.
            FailedPreconditionError: The control plane does not know this base.
            UnauthenticatedError: Token or key is not valid.
            UnavailableError: The control plane cannot be reached.
        """
        kept = _read_key(key_file)
        if kept is not None:
            if kept["base_digest"] != self._base_digest:
                raise EnrollmentError(
                    f"this node was enrolled for base {kept['base_digest'][:12]}, the model folder holds "
                    f"{self._base_digest[:12]}; remove the node key file and enrol again"
                )
            self._secret = kept["secret"]
            try:
                await self.list_changes("")
            except NotEnrolledError as error:
                fault = "the control plane refuses this node's key: the node was revoked, or the key is of another installation"
                raise UnauthenticatedError(f"{fault}; remove the node key file and enrol again with a new token") from error
            return
        if not token:
            raise EnrollmentError("there is no node key yet; an operator's enrolment token is needed for the first start")
        request = nodes_pb2.EnrollNodeRequest(base_digest=self._base_digest)
        call = self._nodes.EnrollNode(request, timeout=10.0, metadata=(("authorization", f"Bearer {token}"),))
        try:
            response = await self._call(call, is_of_node=False)
        except UnauthenticatedError as error:
            raise UnauthenticatedError("the enrolment token is not valid: it was used, or has expired; make a new one") from error
        self._keep_key(key_file, response.secret)

    async def rotate_key(self, key_file: Path) -> None:
        """Replaces the node's key, on disk before in use; the old one stays valid for a minute."""
        response = await self._call(self._nodes.RotateNodeKey(nodes_pb2.RotateNodeKeyRequest(), **self._common()))
        self._keep_key(key_file, response.secret)

    async def resolve(self, key: Key) -> Answer:
        """Asks who calls and what the reference means.

        Raises:
            UnauthenticatedError: No valid key has this digest.
            NotEnrolledError: The control plane refuses this node.
            UnavailableError: The control plane is unreachable.
        """
        target = nodes_pb2.AdapterTarget(adapter=key.target.adapter, owner=key.target.owner)
        if key.target.version:
            target.version = key.target.version
        elif key.target.alias:
            target.alias = key.target.alias
        request = nodes_pb2.ResolveRequest(key_digest=key.key_digest, target=target, base_digest=self._base_digest)
        answer = _answer(await self._about_a_key(self._nodes.Resolve(request, **self._common())))
        if isinstance(answer.outcome, Resolution):
            self._note_arms(answer.outcome)
        return answer

    async def chat_contents(self) -> str:
        """Asks what control tokens in contents of messages are for this node's base: `text` or `tokens`."""
        token = ""
        while True:
            request = bases_pb2.ListBasesRequest(page_token=token, page_size=1000)
            page = await self._call(self._bases.ListBases(request, **self._common()))
            for base in page.bases:
                if base.digest == self._base_digest:
                    return "tokens" if base.chat_contents == bases_pb2.CHAT_CONTENTS_TOKENS else "text"
            token = page.next_page_token
            if not token:
                return "text"

    async def identify(self) -> str:
        """Asks for this node's own identifier in the catalogue."""
        return (await self.introspect(hashlib.sha256(self._secret.encode()).digest())).key_id

    async def introspect(self, key_digest: bytes) -> Identity:
        """Asks who a credential belongs to; UnauthenticatedError when to nobody, NotEnrolledError when the node may not ask."""
        request = nodes_pb2.IntrospectRequest(key_digest=key_digest)
        response = await self._about_a_key(self._nodes.Introspect(request, **self._common()))
        return Identity(response.kind, response.tenant, tuple(response.roles), response.key_id)

    async def grant_blobs(self, version: str, *, operator_key_digest: bytes = b"") -> Grant:
        """Asks for leave to read a version's files.

        Args:
            version: The version.
            operator_key_digest: SHA-256 of the credential of an operator who has this node bring it; empty where none has.

        Raises:
            PermissionDeniedError: This node was neither asked to serve the version nor told to stage it.
        """
        request = nodes_pb2.GrantBlobsRequest(version=version, judges_signatures=True, operator_key_digest=operator_key_digest)
        grant = read_grant(await self._call(self._nodes.GrantBlobs(request, **self._common())))
        self.names.note(version, VersionName(grant.owner, grant.adapter, grant.version_number))
        return grant

    async def read_blob(self, grant: Grant, blob: Blob, *, offset: int, idle_s: float) -> AsyncIterator[bytes]:
        """Streams a file from an offset on; UnavailableError when nothing comes for `idle_s`."""
        request = nodes_pb2.ReadBlobRequest(grant=grant.token, digest=blob.digest, offset=offset)
        call = self._nodes.ReadBlob(request, metadata=self._metadata())
        try:
            while True:
                part: Any = await self._call(_within(call.read, idle_s))
                if part is grpc.aio.EOF:
                    return
                yield part.data
        finally:
            call.cancel()

    async def list_changes(self, cursor: str) -> Changes:
        """Reads the next page of the change feed; an empty cursor means from now on."""
        request = nodes_pb2.ListChangesRequest(cursor=cursor)
        asked_s = time.monotonic()
        response = await self._call(self._nodes.ListChanges(request, **self._common()))
        if self._refused_s is not None and asked_s > self._refused_s:
            self._refused_s = None
            _log.warning("the control plane takes this node's key again")
        changes = tuple(
            Change(int(change.kind), change.tenant, change.adapter, change.version, change.generation)
            for change in response.changes
        )
        return Changes(changes, response.next_cursor, response.reset)

    async def lease_quotas(self, demands: Sequence[Demand]) -> Leased:
        """Asks for this node's shares of the quotas of tenants that call it.

        Raises:
            PermissionDeniedError: One of the tickets is not good.
        """
        request = nodes_pb2.LeaseQuotasRequest()
        for one in demands:
            held, used, wanted = (nodes_pb2.QuotaAmounts(**part) for part in (one.held, one.used, one.wanted))
            request.demands.add(tenant=one.tenant, ticket=one.ticket, held=held, used=used, wanted=wanted)
        response = await self._call(self._nodes.LeaseQuotas(request, **self._common()))
        shares = {
            lease.tenant: Amounts(requests=lease.share.requests, tokens=lease.share.tokens, streams=lease.share.streams)
            for lease in response.leases
        }
        return Leased(shares, response.lifetime.ToMilliseconds() / 1000)

    async def report_corrupt(self, version: str) -> None:
        """Reports that a version's bytes did not have its digest, after a repeated read."""
        await self._report(version, nodes_pb2.VERSION_FAULT_CORRUPT)

    async def report_not_finite(self, version: str) -> None:
        """Reports that a version gave logits that are not finite."""
        await self._report(version, nodes_pb2.VERSION_FAULT_NOT_FINITE)

    def _note_arms(self, found: Resolution) -> None:
        for arm in (*found.arms, *(arm.previous for arm in found.arms if arm.previous is not None)):
            self.names.note(arm.version, VersionName(found.owner, found.adapter, arm.number))

    async def _report(self, version: str, fault: nodes_pb2.VersionFault.ValueType) -> None:
        request = nodes_pb2.ReportVersionRequest(version=version, fault=fault)
        await self._call(self._nodes.ReportVersion(request, **self._common()))

    async def _ask(self, method: Any, request: Any) -> Any:
        return await self._call(method(request, **self._common()))

    def _common(self) -> dict[str, Any]:
        return {"timeout": self._timeout_s, "metadata": self._metadata()}

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self._secret}"),)

    def _keep_key(self, key_file: Path, secret: str) -> None:
        self._secret = secret
        text = json.dumps({"secret": secret, "base_digest": self._base_digest})
        key_file.parent.mkdir(parents=True, exist_ok=True)
        part = key_file.with_name(f"{key_file.name}.{secrets.token_hex(4)}")
        try:
            with open_private(part, "xb") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            part.replace(key_file)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    async def _about_a_key(self, call: Awaitable[_T]) -> _T:
        """Awaits a call that names a caller's key, which UNAUTHENTICATED may be about as well as about the node's own."""
        try:
            return await self._call(call, is_of_node=False)
        except UnauthenticatedError as error:
            if not await self._is_node_known():
                raise NotEnrolledError from error
            raise

    async def _is_node_known(self) -> bool:
        """Whether the control plane takes the node's own key; asked once a second at most, whoever wants to know."""
        if self._check is None and self.is_enrolled and time.monotonic() - self._checked_s >= _CHECK_S:
            self._check = asyncio.create_task(self._check_own_key(), name="own-key")
        if self._check is not None:
            await asyncio.shield(self._check)
        return self.is_enrolled

    async def _check_own_key(self) -> None:
        try:
            await self.list_changes("")
        except VeneerError:  # a refusal is noted; an unreachable control plane says nothing about the key
            pass
        finally:
            self._checked_s, self._check = time.monotonic(), None

    async def _call(self, call: Awaitable[_T], *, is_of_node: bool = True) -> _T:
        """Awaits a call.

        Args:
            call: The call.
            is_of_node: Whether it has no credential but the node's own key, so that UNAUTHENTICATED is about that.
        """
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            if is_of_node and error.code() is grpc.StatusCode.UNAUTHENTICATED:
                self._note_refusal()
                raise NotEnrolledError from error
            raise _translate(error) from error

    def _note_refusal(self) -> None:
        is_first = self.is_enrolled
        self._refused_s = time.monotonic()
        if is_first:
            cause = "the node was revoked, or its key was replaced by another process"
            _log.error("the control plane refuses this node's key: it serves no longer", extra={"cause": cause})
            self.on_refused()


async def _within(read: Callable[[], Awaitable[_T]], seconds: float) -> _T:
    try:
        async with asyncio.timeout(seconds):
            return await read()
    except TimeoutError as error:
        raise UnavailableError(f"the control plane sent no bytes for {seconds:g} s") from error


def _read_key(path: Path) -> dict[str, str] | None:
    if not path.is_file():
        return None
    try:
        kept = json.loads(path.read_text())
        return {"secret": str(kept["secret"]), "base_digest": str(kept["base_digest"])}
    except (ValueError, KeyError, TypeError) as error:
        raise EnrollmentError("the node key file is not readable; remove it and enrol again") from error


def _answer(response: nodes_pb2.ResolveResponse) -> Answer:
    caller = response.caller
    expire = caller.expire_time.ToNanoseconds() / 1e9 if caller.HasField("expire_time") else None
    who = Caller(
        tenant=caller.tenant,
        key_id=caller.key_id,
        fallback_allowed=caller.fallback_allowed,
        weight=max(caller.weight, 1),
        cache_salt=caller.cache_salt,
        expire_unix_s=expire,
        max_priority=caller.max_priority,
        previous_allowed=caller.previous_allowed,
        default_fallback=caller.default_fallback or "NONE",
        limits=limits_of(caller.limits),
        quotas=TenantQuotas(
            requests=caller.quotas.max_requests_per_minute,
            tokens=caller.quotas.max_tokens_per_minute,
            streams=caller.quotas.max_streams,
        ),
        ticket=caller.ticket,
    )
    if response.WhichOneof("outcome") != "resolution":
        return Answer(who, _REFUSALS.get(response.refusal, Refusal.NOT_FOUND))
    found = response.resolution
    arms = tuple(map(_arm, found.arms))
    return Answer(who, Resolution(found.owner, found.adapter, found.alias, found.generation, arms, found.split_salt))


def _arm(version: nodes_pb2.ServableVersion) -> Arm:
    return Arm(
        version.digest,
        version.number,
        max(version.weight, 1),
        version.max_rank,
        version.size_bytes,
        version.state,
        tuple(version.invocation_tokens),
        _arm(version.previous) if version.HasField("previous") else None,
        version.ticket,
        tuple(version.points),
    )


def _translate(error: grpc.aio.AioRpcError) -> VeneerError:
    """Returns our error for a failed call; texts of the other side are passed on only where they speak of the node itself."""
    if ended_by_transport(error):  # the control plane restarts
        return UnavailableError("the control plane is unreachable", retry_after_s=1.0)
    match error.code():
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.DEADLINE_EXCEEDED | grpc.StatusCode.RESOURCE_EXHAUSTED:
            return UnavailableError("the control plane is unreachable", retry_after_s=1.0)
        case grpc.StatusCode.UNAUTHENTICATED:
            return UnauthenticatedError("no valid credential")
        case grpc.StatusCode.PERMISSION_DENIED:
            return PermissionDeniedError("the control plane does not permit this")
        case grpc.StatusCode.NOT_FOUND:
            return NotFoundError("no such adapter, alias or version")
        case grpc.StatusCode.FAILED_PRECONDITION:
            return FailedPreconditionError(error.details() or "the control plane refuses this in the present state")
        case grpc.StatusCode.DATA_LOSS:
            return LostFileError("files of the version are lost")
        case code:
            return InternalError(f"the control plane answered {code.name}")
