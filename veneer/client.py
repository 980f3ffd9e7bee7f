"""Asynchronous client of both planes for a tenant's key; `veneer.operator_client` is the one for an operator's.

Objects of the catalogue are the API's own messages (`veneer.controlplane.v1`, `veneer.dataplane.v1`), errors those of
`veneer.errors`, with every violation and the retry delay that the service sent. Every call has a deadline.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path

import grpc

from veneer.answer import Event
from veneer.canary_calls import CanaryCalls
from veneer.channel import ClientTls, is_header_text, typed_errors
from veneer.connection import identified, typed
from veneer.controlplane.v1 import catalog_pb2, catalog_pb2_grpc, placement_pb2, placement_pb2_grpc, tenants_pb2
from veneer.dataplane.v1 import generation_pb2, generation_pb2_grpc
from veneer.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
    Violation,
)
from veneer.generation_calls import GenerationCalls
from veneer.locations import Location, Locations
from veneer.messages import Prompt, set_prompt
from veneer.origin import NO_ORIGIN, Origin
from veneer.release_calls import ReleaseCalls
from veneer.replicas import Replicas, read_addresses
from veneer.serving_calls import ServingCalls
from veneer.signature_calls import SignatureCalls
from veneer.signature_file import read_signature

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

ADAPTER_KEY_HEADER = "x-veneer-adapter-key"
"""Metadata that names the adapter of a request, for proxies that choose a data plane by a hash of it."""

_PART_BYTES = 128 << 10
"""Of a message of an upload. It counts when all of it is there: at the least rate, before the service gives the upload up."""
_PUBLISH_PAUSES_S = 0.1, 0.5, 2.0  # before an upload is sent again
_DEFAULT_ALIAS = "stable"
_GENERATE_ATTEMPTS = 3  # data planes that are tried
_ANSWER_LOST = "Internal error from Core"
"""What grpc.aio puts in the answer's place when a write fails a moment before the answer is read. The upload is sent again under
its request identifier, which gives the same answer."""

_FILES = (
    (catalog_pb2.ADAPTER_FILE_CONFIG, CONFIG_NAME),
    (catalog_pb2.ADAPTER_FILE_WEIGHTS, WEIGHTS_NAME),
)


class Client(GenerationCalls, CanaryCalls, ReleaseCalls, ServingCalls, SignatureCalls):
    """What a tenant's key can do; all addresses are those of the callers' listeners. Owned by one event loop.

    Of several data planes, a request goes to one that holds its adapter, as the control plane knows, and is well; to another one
    where none is.
    """

    def __init__(
        self, *, control: str = "", data: str = "", key: str = "", tls: ClientTls | None = None, timeout_s: float = 30.0
    ) -> None:
        """See `Connection`."""
        addresses = read_addresses(data)
        super().__init__(control=control, data=addresses[0] if addresses else "", key=key, tls=tls, timeout_s=timeout_s)
        self._replicas = Replicas(addresses)
        self._locations = Locations(self._locate if control else None)

    async def close(self) -> None:
        """See `Connection`."""
        await self._locations.close()
        await super().close()

    async def generate(
        self,
        prompt: Prompt,
        *,
        adapter: str = "",
        owner: str = "",
        alias: str | None = None,
        version: str | None = None,
        sampling: generation_pb2.SamplingParams | None = None,
        fallback: generation_pb2.FallbackMode.ValueType = generation_pb2.FALLBACK_MODE_UNSPECIFIED,
        request_id: str = "",
        split_unit: str = "",
        cache_salt: bytes = b"",
        priority: int = 0,
        timeout_s: float = 600.0,
    ) -> AsyncGenerator[Event]:
        """Streams one answer: one `Served`, then `Chunk`s, last a `Finish` (of each choice, where several were asked for).

        `chat` and `complete` are the usual ways to call it. Closing the iterator, or cancelling the task that reads it, cancels
        the request. An attempt that fails UNAVAILABLE before its first message is repeated; later nothing is.

        Args:
            prompt: `RawText`, token ids, or a conversation. A bare string is refused, since it may be meant as either.
            adapter: Name of the adapter; empty is the base.
            owner: Tenant that owns it; empty is the caller's own.
            alias: Alias of the adapter; None is the default one.
            version: Digest of a version instead of an alias.
            sampling: How tokens are chosen; None is all defaults.
            fallback: What happens when the version cannot be had in time; not set: the tenant's default.
            request_id: The caller's own identifier; empty: the service makes one.
            split_unit: Unit of a traffic split, e.g. an end user.
            cache_salt: Parts users of one tenant in the prefix cache.
            priority: Place among the tenant's own waiting requests: higher goes first. Capped by the key's roles.
            timeout_s: Deadline of the whole stream.

        Raises:
            VeneerError: As the service said.
            UnavailableError: The stream ended without a `Finish`: what came is not the whole answer.
        """
        unfinished = max(1, sampling.n) if sampling is not None else 1
        request = generation_pb2.GenerateRequest(
            adapter=_adapter_ref(adapter, owner, alias=alias, version=version),
            sampling=sampling,
            fallback=fallback,
            request_id=request_id,
            split_unit=split_unit,
            cache_salt=cache_salt,
            priority=priority,
        )
        set_prompt(request, prompt)
        async with aclosing(self._responses(request, timeout_s=timeout_s)) as responses:
            async for response in responses:
                if response.HasField("served"):
                    yield response.served
                if response.HasField("echo"):
                    yield response.echo
                if response.HasField("chunk"):
                    yield response.chunk
                if response.HasField("finish"):
                    unfinished -= 1
                    yield response.finish
        if unfinished:
            raise UnavailableError("the stream ended without a finish: the answer is not whole")

    async def _responses(
        self, request: generation_pb2.GenerateRequest, *, timeout_s: float
    ) -> AsyncGenerator[generation_pb2.GenerateResponse]:
        """Streams from the data plane that suits the adapter best; goes to another while nothing has come and one is away."""
        end_s = asyncio.get_running_loop().time() + timeout_s
        location = await self._location(request.adapter.adapter, request.adapter.owner)
        tried = list[str]()
        while True:
            order = self._replicas.order(location.key, location.addresses)
            address = next((one for one in order if one not in tried), order[0])
            tried.append(address)
            try:
                async with aclosing(self._stream(address, request, location.key, end_s=end_s)) as responses:
                    async for response in responses:
                        tried = []
                        yield response
                return
            except UnavailableError:
                if not tried or len(tried) >= min(_GENERATE_ATTEMPTS, len(order)):
                    raise

    async def _stream(
        self, address: str, request: generation_pb2.GenerateRequest, key: str, *, end_s: float
    ) -> AsyncGenerator[generation_pb2.GenerateResponse]:
        channel = self._channel_to(address, retries=len(self._replicas.addresses) == 1)
        stub: generation_pb2_grpc.GenerationServiceAsyncStub = generation_pb2_grpc.GenerationServiceStub(channel)
        # A name that is no header is no adapter's either: the plane says so.
        metadata = (*self._metadata, (ADAPTER_KEY_HEADER, key)) if key and is_header_text(key) else self._metadata
        timeout_s = max(0.0, end_s - asyncio.get_running_loop().time())
        call = stub.Generate(request, timeout=timeout_s, metadata=metadata)
        with self._replicas.request(address):
            try:
                with typed_errors():
                    async for response in call:
                        self._replicas.answered(address, key)
                        yield response
            except UnavailableError as error:
                # With a delay it answered: that it drains, or that this adapter cannot be had there now.
                self._replicas.failed(address, None if error.retry_after_s is None else key)
                raise
            finally:
                call.cancel()

    async def _location(self, adapter: str, owner: str) -> Location:
        if len(self._replicas.addresses) == 1:
            return Location(f"{owner}/{adapter}" if adapter else "")  # there is nothing to choose
        if not self._replicas.addresses:
            raise FailedPreconditionError("this client was given no address of the data plane")
        return await self._locations.of(adapter, owner)

    async def _locate(self, adapter: str, owner: str) -> Location:
        stub: placement_pb2_grpc.PlacementServiceAsyncStub = placement_pb2_grpc.PlacementServiceStub(self._channel("control"))
        request = placement_pb2.LocateAdapterRequest(adapter=adapter, owner=owner)
        response = await self._ask(stub.LocateAdapter, request)
        return Location(response.key, tuple(response.addresses))

    async def publish(
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
        """Publishes the adapter in a PEFT folder as a new version.

        Args:
            folder: Holds `adapter_config.json` and `adapter_model.safetensors`.
            adapter: Name of the adapter; its first version creates it.
            base: Digest or name of the base.
            alias: Alias to point at the new version; empty moves none but gives an adapter's first version `stable`.
            label: Free text.
            origin: Where it comes from.
            signature: Its signature in the format of OpenSSF Model Signing; None: `model.sig` in the folder, if there is one.
            probe: Have a data plane run it before the alias moves; the same call with its request_id goes on where it stopped.
            exist_ok: Files that are a version of this adapter already give that version, as it is: nothing is stored, no alias
                moves, label and origin stay. A publish may so be run again under a new request_id.
            request_id: Identifies this publish: the same id and files give the same answer. Empty makes one.
            progress: Called with bytes sent and bytes in all after each part.
            timeout_s: Deadline of the whole upload and check.

        Raises:
            InvalidArgumentError: A file is missing, or the service refused the files or the signature; its violations list every
                fault.
            FailedPreconditionError: The tenant trusts nobody who signed it, or requires a signature and there is none; or, with
                `exist_ok`, the alias that was named does not serve the version alone.
            AlreadyExistsError: The files are a version already; with `exist_ok`, one of another adapter or one that may not be
                served any more.
            UnavailableError: The plane is away and was not back after three more uploads under the same identifier.
            ResourceExhaustedError: A quota does not allow it; or too many uploads are under way, also at three more attempts.
            VeneerError: As the service said.
        """
        paths = [(file, folder / name) for file, name in _FILES]
        missing = [Violation(path.name, f"is not in {folder}") for _, path in paths if not path.is_file()]
        if missing:
            raise InvalidArgumentError.of(missing)
        header = catalog_pb2.PublishHeader(
            adapter=adapter, base=base, alias=alias, label=label, request_id=request_id or uuid.uuid4().hex,
            probe=probe, signature=read_signature(folder, signature), **origin.fields(),
        )  # fmt: skip
        total = sum(path.stat().st_size for _, path in paths)
        try:
            return await self._publish(header, paths, total=total, progress=progress, timeout_s=timeout_s)
        except AlreadyExistsError:
            before = await self._published_before(adapter, base, alias, paths) if exist_ok else None
            if before is None:
                raise
            return before

    async def _publish(
        self,
        header: catalog_pb2.PublishHeader,
        paths: Sequence[tuple[catalog_pb2.AdapterFile.ValueType, Path]],
        *,
        total: int,
        progress: Callable[[int, int], None] | None,
        timeout_s: float,
    ) -> catalog_pb2.PublishResponse:
        """Sends an upload again under its identifier while the plane is away for now, or has no place for it yet."""
        for pause_s in _PUBLISH_PAUSES_S:
            try:
                return await self._send(header, paths, total=total, progress=progress, timeout_s=timeout_s)
            except (UnavailableError, ResourceExhaustedError) as error:
                if isinstance(error, ResourceExhaustedError) and error.retry_after_s is None:
                    raise  # a quota: it does not pass by itself
                await asyncio.sleep(max(pause_s, error.retry_after_s or 0.0))
        return await self._send(header, paths, total=total, progress=progress, timeout_s=timeout_s)

    async def _published_before(
        self, adapter: str, base: str, alias: str, paths: Sequence[tuple[catalog_pb2.AdapterFile.ValueType, Path]]
    ) -> catalog_pb2.PublishResponse | None:
        """The version of the adapter that has these files and may be served, with the alias that serves it; None without one."""
        from veneer.artifact import version_digest  # it brings numpy, which no other call needs

        files = {path.name: await asyncio.to_thread(_file_digest, path) for _, path in paths}
        bases = {one.digest for one in await self.bases() if base in (one.digest, one.name)}
        try:
            versions = await self.versions(adapter)
        except NotFoundError:
            return None
        known = [one for one in versions if one.state == catalog_pb2.VERSION_STATE_READY and one.base_digest in bases]
        version = next((one for one in known if version_digest(one.owner, one.base_digest, files) == one.digest), None)
        if version is None:
            return None
        serving = [one for one in (await self.adapter(adapter)).aliases if [arm.version for arm in one.arms] == [version.digest]]
        if alias and alias not in [one.name for one in serving]:
            there = f"version {version.number} of {adapter} has these files already, and alias {alias} does not serve it alone"
            raise FailedPreconditionError(f"{there}; `set_alias` (`veneer alias {adapter} {version.number}`) moves it")
        wanted = [one for one in serving if one.name == (alias or _DEFAULT_ALIAS)]
        return catalog_pb2.PublishResponse(version=version, alias=wanted[0] if wanted else None)

    async def _send(
        self,
        header: catalog_pb2.PublishHeader,
        paths: Sequence[tuple[catalog_pb2.AdapterFile.ValueType, Path]],
        *,
        total: int,
        progress: Callable[[int, int], None] | None,
        timeout_s: float,
    ) -> catalog_pb2.PublishResponse:
        """Sends one upload and returns its answer, which may come before all is sent."""
        sent = 0
        stub: catalog_pb2_grpc.CatalogServiceAsyncStub = catalog_pb2_grpc.CatalogServiceStub(
            self._channel("control", retries=False)
        )
        call = stub.Publish(timeout=timeout_s, metadata=self._metadata)
        try:
            await call.write(catalog_pb2.PublishRequest(header=header))
            for file, path in paths:
                with path.open("rb") as source:
                    while data := await asyncio.to_thread(source.read, _PART_BYTES):
                        await call.write(catalog_pb2.PublishRequest(part=catalog_pb2.PublishPart(file=file, data=data)))
                        sent += len(data)
                        if progress is not None:
                            progress(sent, total)
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # refused before all was sent: the answer says why
        except BaseException:
            call.cancel()
            raise
        return await _answer(call)

    async def adapters(self) -> list[catalog_pb2.Adapter]:
        """The tenant's adapters by name, with their aliases."""
        stub = self._catalog
        return await self._all(
            lambda token: self._ask(stub.ListAdapters, catalog_pb2.ListAdaptersRequest(page_token=token)), "adapters"
        )

    async def adapter(self, name: str) -> catalog_pb2.Adapter:
        """One adapter with its aliases."""
        response = await self._ask(self._catalog.GetAdapter, catalog_pb2.GetAdapterRequest(adapter=name))
        return typed(catalog_pb2.Adapter, response.adapter)

    async def versions(self, adapter: str) -> list[catalog_pb2.Version]:
        """An adapter's versions, newest first."""
        stub = self._catalog
        return await self._all(
            lambda token: self._ask(stub.ListVersions, catalog_pb2.ListVersionsRequest(adapter=adapter, page_token=token)),
            "versions",
        )

    async def create_grant(self, adapter: str, grantee: str, *, request_id: str = "") -> tenants_pb2.Grant:
        """Lets another tenant use an adapter."""
        request = tenants_pb2.CreateGrantRequest(adapter=adapter, grantee=grantee, request_id=identified(request_id))
        response = await self._ask(self._tenants.CreateGrant, request)
        return typed(tenants_pb2.Grant, response.grant)

    async def grants(self) -> tenants_pb2.ListGrantsResponse:
        """The grants that the tenant has given and received."""
        whole = tenants_pb2.ListGrantsResponse()
        while True:
            request = tenants_pb2.ListGrantsRequest(page_token=whole.next_page_token)
            whole.ClearField("next_page_token")
            whole.MergeFrom(typed(tenants_pb2.ListGrantsResponse, await self._ask(self._tenants.ListGrants, request)))
            if not whole.next_page_token:
                return whole

    async def revoke_grant(self, adapter: str, grantee: str, *, request_id: str = "") -> None:
        """Withdraws a grant."""
        request = tenants_pb2.RevokeGrantRequest(adapter=adapter, grantee=grantee, request_id=identified(request_id))
        await self._ask(self._tenants.RevokeGrant, request)


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def _answer(upload: Awaitable[catalog_pb2.PublishResponse]) -> catalog_pb2.PublishResponse:
    with typed_errors():
        try:
            return await upload
        except grpc.aio.AioRpcError as error:
            if error.details() == _ANSWER_LOST:
                raise UnavailableError("the answer to the upload was lost") from error
            raise


def _adapter_ref(adapter: str, owner: str, *, alias: str | None, version: str | None) -> generation_pb2.AdapterRef:
    if alias is not None and version is not None:
        raise InvalidArgumentError.of([Violation("adapter", "name an alias or a version, not both")])
    ref = generation_pb2.AdapterRef(adapter=adapter, owner=owner)
    if alias is not None:
        ref.alias = alias
    if version is not None:
        ref.version = version
    return ref
