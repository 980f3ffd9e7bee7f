"""Calls over gRPC: from what a client asks for to what it knows after."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, Final

import grpc
from google.protobuf.duration_pb2 import Duration

from benchmarks.histories.records import (
    Arms,
    Call,
    Condemn,
    Delete,
    DeleteAdapter,
    Deleted,
    Done,
    Freeze,
    Frozen,
    Grant,
    Listed,
    Lost,
    Moved,
    Outcome,
    Promote,
    Publish,
    Published,
    ReadCanary,
    Refused,
    Resolve,
    Resolved,
    Retire,
    Revoke,
    Rollback,
    SetAlias,
    Shown,
    StartCanary,
    StopCanary,
)
from benchmarks.histories.system import Key
from benchmarks.orphans import BASE, small_adapter
from veneer.artifact import version_digest
from veneer.controlplane.v1 import (
    canaries_pb2,
    catalog_pb2,
    catalog_pb2_grpc,
    nodes_pb2,
    nodes_pb2_grpc,
    tenants_pb2,
    tenants_pb2_grpc,
)

DEADLINE_S = 3.0
_PUBLISH_DEADLINE_S = 10.0
KNOWN: Final = {
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.UNAUTHENTICATED,
}
"""Codes after which nothing was done; ABORTED is one too, and says more."""
_FOUND = re.compile(r"the alias is at generation (\d+), not \d+")
_NOT_SENT = "failed to connect to all addresses"
"""What gRPC says where there was no connection to send a call on."""
_STATES = {
    catalog_pb2.VERSION_STATE_READY: "READY",
    catalog_pb2.VERSION_STATE_RETIRED: "RETIRED",
    catalog_pb2.VERSION_STATE_QUARANTINED: "QUARANTINED",
}
_CANARY_STATES = {
    canaries_pb2.CANARY_STATE_RUNNING: "RUNNING",
    canaries_pb2.CANARY_STATE_PROMOTED: "PROMOTED",
    canaries_pb2.CANARY_STATE_ROLLED_BACK: "ROLLED_BACK",
    canaries_pb2.CANARY_STATE_STOPPED: "STOPPED",
}
_ENOUGH = 500
"""Requests of each version of which a report tells; all of them failed on one, and none on the other."""
_REASONS = {nodes_pb2.REFUSAL_REASON_NOT_FOUND: "NOT_FOUND", nodes_pb2.REFUSAL_REASON_RETIRED: "RETIRED"}
_OPTIONS = (
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 200),
)


class Content:
    """What may be published: small adapters by number, as one tenant's."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._numbers: dict[str, int] = {}

    def digest(self, number: int) -> str:
        """The digest that the version of an adapter must have."""
        config, weights = small_adapter(number)
        files = {"adapter_config.json": config, "adapter_model.safetensors": weights}
        digest = version_digest(
            self._owner, BASE.digest, {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        )
        self._numbers[digest] = number
        return digest

    def messages(self, adapter: str, what: Publish, request_id: str) -> Iterator[catalog_pb2.PublishRequest]:
        """The stream that publishes it."""
        header = catalog_pb2.PublishHeader(adapter=adapter, base=BASE.digest, request_id=request_id, alias=what.alias)
        yield catalog_pb2.PublishRequest(header=header)
        files = (catalog_pb2.ADAPTER_FILE_CONFIG, catalog_pb2.ADAPTER_FILE_WEIGHTS)
        for file, data in zip(files, small_adapter(self._numbers[what.digest]), strict=True):
            yield catalog_pb2.PublishRequest(part=catalog_pb2.PublishPart(file=file, data=data))


class Connection:
    """One client's connection to one control plane. Owned by the client's task."""

    def __init__(self, address: str, *, owner: Key, node_key: str, content: Content) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._catalog: Any = catalog_pb2_grpc.CatalogServiceStub(self._channel)
        self._tenants: Any = tenants_pb2_grpc.TenantServiceStub(self._channel)
        self._nodes: Any = nodes_pb2_grpc.NodeServiceStub(self._channel)
        self._owner = {"metadata": (("authorization", f"Bearer {owner.secret}"),), "timeout": DEADLINE_S}
        self._node = {"metadata": (("authorization", f"Bearer {node_key}"),), "timeout": DEADLINE_S}
        self._owner_name = owner.tenant
        self._content = content
        self._writes: dict[type, Callable[[str, Any, str], Awaitable[Outcome]]] = {
            Publish: self._publish,
            SetAlias: self._set_alias,
            Rollback: self._rollback,
            Promote: self._promote,
            Freeze: self._freeze,
            Retire: self._retire,
            Delete: self._delete,
            DeleteAdapter: self._delete_adapter,
            StartCanary: self._start_canary,
            StopCanary: self._stop_canary,
            Grant: self._grant,
            Revoke: self._revoke,
        }

    async def write(self, adapter: str, what: Call, *, request_id: str) -> Outcome:
        """Makes a call that changes one adapter.

        Raises:
            AioRpcError: It was refused, or failed.
        """
        return await self._writes[type(what)](adapter, what, request_id)

    async def read(self, adapter: str) -> tuple[Listed, Listed]:
        """Reads an adapter: its aliases, and how many versions it ever had."""
        found = (await self._catalog.GetAdapter(catalog_pb2.GetAdapterRequest(adapter=adapter), **self._owner)).adapter
        return Listed(tuple(map(_moved, found.aliases))), Listed((found.num_versions,))

    async def versions(self, adapter: str) -> Listed:
        """Reads the versions of an adapter."""
        request = catalog_pb2.ListVersionsRequest(adapter=adapter, page_size=1000)
        found = (await self._catalog.ListVersions(request, **self._owner)).versions
        return Listed(tuple((one.number, one.digest, _STATES[one.state]) for one in reversed(found)))

    async def resolve(self, adapter: str, what: Resolve, *, key: Key) -> Outcome:
        """Resolves with a tenant's key, as a data plane does."""
        target = nodes_pb2.AdapterTarget(adapter=adapter, owner=self._owner_name)
        if what.version:
            target.version = what.version
        else:
            target.alias = what.alias
        digest = hashlib.sha256(key.secret.encode()).digest()
        request = nodes_pb2.ResolveRequest(key_digest=digest, target=target, base_digest=BASE.digest)
        found = await self._nodes.Resolve(request, **self._node)
        if found.WhichOneof("outcome") == "refusal":
            return Refused(_REASONS.get(found.refusal, str(found.refusal)))
        arms = ((one.digest, one.number, one.weight, one.previous.digest) for one in found.resolution.arms)
        return Resolved(found.resolution.generation, tuple(arms))

    async def canary(self, adapter: str, what: ReadCanary) -> Shown:
        """Reads a canary."""
        request = canaries_pb2.GetCanaryRequest(adapter=adapter, alias=what.alias)
        return _shown((await self._catalog.GetCanary(request, **self._owner)).canary)

    async def condemn(self, adapter: str, what: Condemn, *, epoch: str, sequence: int) -> Outcome:
        """Reports as a data plane that what asked for a canary's version failed."""
        outcomes = [
            nodes_pb2.ArmOutcomes(
                owner=self._owner_name, adapter=adapter, alias=what.alias, generation=what.generation,
                version=version, ok=_ENOUGH - failed, failed=failed,
            )
            for version, failed in ((what.version, _ENOUGH), (what.stable, 0))
        ]  # fmt: skip
        request = nodes_pb2.ReportOutcomesRequest(epoch=epoch, sequence=sequence, outcomes=outcomes)
        was_counted = (await self._nodes.ReportOutcomes(request, **self._node)).counted
        return Done() if was_counted else Refused("NOT_COUNTED")

    async def audit(self) -> list[tenants_pb2.AuditEntry]:
        """Reads all of the owner's audit log, newest first."""
        entries: list[tenants_pb2.AuditEntry] = []
        token = ""
        while True:
            request = tenants_pb2.ListAuditRequest(page_size=1000, page_token=token)
            page = await self._tenants.ListAudit(request, **self._owner)
            entries += page.entries
            token = page.next_page_token
            if not token:
                return entries

    async def revoke_key(self, key: Key) -> Outcome:
        """Ends a key of the owner's tenant."""
        await self._tenants.RevokeKey(tenants_pb2.RevokeKeyRequest(tenant=key.tenant, id=key.id), **self._owner)
        return Done()

    async def changes(self, cursor: str) -> nodes_pb2.ListChangesResponse:
        """Reads a page of the change feed."""
        response: nodes_pb2.ListChangesResponse = await self._nodes.ListChanges(
            nodes_pb2.ListChangesRequest(cursor=cursor), **self._node
        )
        return response

    async def close(self) -> None:
        """Closes it."""
        await self._channel.close()

    async def _publish(self, adapter: str, what: Publish, request_id: str) -> Outcome:
        messages = self._content.messages(adapter, what, request_id)
        found = await self._catalog.Publish(messages, **{**self._owner, "timeout": _PUBLISH_DEADLINE_S})
        moved = _moved(found.alias) if found.HasField("alias") else None
        return Published(found.version.digest, found.version.number, moved)

    async def _set_alias(self, adapter: str, what: SetAlias, request_id: str) -> Outcome:
        arms = [catalog_pb2.Arm(version=version, weight=weight) for version, weight in what.arms]
        request = catalog_pb2.SetAliasRequest(
            adapter=adapter, alias=what.alias, arms=arms, expected_generation=what.expected, request_id=request_id
        )
        return _moved((await self._catalog.SetAlias(request, **self._owner)).alias)

    async def _rollback(self, adapter: str, what: Rollback, request_id: str) -> Outcome:
        request = catalog_pb2.RollbackRequest(
            adapter=adapter, alias=what.alias, version=what.version, expected_generation=what.expected, request_id=request_id
        )
        return _moved((await self._catalog.Rollback(request, **self._owner)).alias)

    async def _promote(self, adapter: str, what: Promote, request_id: str) -> Outcome:
        request = catalog_pb2.PromoteRequest(
            adapter=adapter, alias=what.alias, source=what.source, version=what.version,
            expected_generation=what.expected, request_id=request_id,
        )  # fmt: skip
        return _moved((await self._catalog.Promote(request, **self._owner)).alias)

    async def _freeze(self, adapter: str, what: Freeze, request_id: str) -> Outcome:
        request = catalog_pb2.FreezeAliasRequest(adapter=adapter, alias=what.alias, frozen=what.frozen, request_id=request_id)
        return Frozen(_moved((await self._catalog.FreezeAlias(request, **self._owner)).alias))

    async def _retire(self, adapter: str, what: Retire, request_id: str) -> Outcome:
        request = catalog_pb2.RetireVersionRequest(adapter=adapter, version=what.version, request_id=request_id)
        await self._catalog.RetireVersion(request, **self._owner)
        return Done()

    async def _delete(self, adapter: str, what: Delete, request_id: str) -> Outcome:
        request = catalog_pb2.DeleteVersionRequest(adapter=adapter, version=what.version, force=what.force, request_id=request_id)
        found = await self._catalog.DeleteVersion(request, **self._owner)
        return Deleted(tuple(map(_moved, found.aliases)))

    async def _delete_adapter(self, adapter: str, what: DeleteAdapter, request_id: str) -> Outcome:
        request = catalog_pb2.DeleteAdapterRequest(adapter=adapter, force=what.force, dry_run=what.dry_run, request_id=request_id)
        found = await self._catalog.DeleteAdapter(request, **self._owner)
        return Deleted(tuple(map(_moved, found.aliases)), found.num_versions)

    async def _start_canary(self, adapter: str, what: StartCanary, request_id: str) -> Outcome:
        duration = Duration()
        duration.FromMilliseconds(what.step_ms)
        steps = [canaries_pb2.CanaryStep(weight_percent=weight, duration=duration) for weight in what.weights]
        request = canaries_pb2.StartCanaryRequest(
            adapter=adapter, alias=what.alias, version=what.version, steps=steps,
            expected_generation=what.expected, request_id=request_id,
        )  # fmt: skip
        return _shown((await self._catalog.StartCanary(request, **self._owner)).canary)

    async def _stop_canary(self, adapter: str, what: StopCanary, request_id: str) -> Outcome:
        request = canaries_pb2.StopCanaryRequest(adapter=adapter, alias=what.alias, request_id=request_id)
        return _shown((await self._catalog.StopCanary(request, **self._owner)).canary)

    async def _grant(self, adapter: str, what: Grant, request_id: str) -> Outcome:
        request = tenants_pb2.CreateGrantRequest(adapter=adapter, grantee=what.grantee, request_id=request_id)
        await self._tenants.CreateGrant(request, **self._owner)
        return Done()

    async def _revoke(self, adapter: str, what: Revoke, request_id: str) -> Outcome:
        request = tenants_pb2.RevokeGrantRequest(adapter=adapter, grantee=what.grantee, request_id=request_id)
        await self._tenants.RevokeGrant(request, **self._owner)
        return Done()


def known_outcome(error: grpc.aio.AioRpcError) -> Outcome | None:
    """What an error lets its caller know; None when the call may have taken effect all the same."""
    code = error.code()
    if code is grpc.StatusCode.UNAVAILABLE and (error.details() or "").startswith(_NOT_SENT):
        return Lost()
    if code is grpc.StatusCode.ABORTED:
        found = _FOUND.search(error.details() or "")
        return Lost() if found is None else Refused("ABORTED", int(found.group(1)))
    return Refused(code.name) if code in KNOWN else None


def _moved(alias: catalog_pb2.Alias) -> Moved:
    return Moved(alias.name, alias.generation, _arms(alias.arms), alias.frozen)


def _shown(canary: canaries_pb2.Canary) -> Shown:
    weights = tuple(step.weight_percent for step in canary.steps)
    state = _CANARY_STATES[canary.state]
    return Shown(canary.alias, canary.version, canary.stable_version, weights, canary.step, canary.generation, state)


def _arms(arms: Iterable[catalog_pb2.Arm]) -> Arms:
    return tuple((one.version, one.weight) for one in arms)
