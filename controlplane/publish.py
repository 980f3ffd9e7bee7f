"""Publishing a version: receive, check, store, and one transaction in which it appears."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from sqlalchemy import delete, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from controlplane import models
from controlplane.aliases import check_servable, move, present_alias
from controlplane.answers import RACED, answered, keep, was_answered
from controlplane.bases import Bases
from controlplane.blobs import Blobs, upload_folder
from controlplane.catalog import READY, STABLE, Arm, Version, version_of
from controlplane.changes import Change, ChangeKind, record
from controlplane.db import Database, Scope
from controlplane.deletion import note_uploads
from controlplane.probes import Probes, ask
from controlplane.publish_order import Draft, PublishOrder
from controlplane.published import Published, answer_of, complete_publish, published_of
from controlplane.settings import Settings
from controlplane.signatures import Signatures, Trust, keep_signature
from controlplane.spool import CONFIG, WEIGHTS, MinRate, Part, Spool
from controlplane.stored_quotas import check_stored
from controlplane.upload_places import UploadPlaces
from veneer.artifact import BaseDescription, Limits, Report
from veneer.errors import (
    CONTENT_EXISTS,
    AbortedError,
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
)
from veneer.signature import SignatureReport

_Key = TypeVar("_Key")


class KnownContentError(AlreadyExistsError):
    """The owner has a version with these files already, of this adapter or of another."""

    kind = CONTENT_EXISTS


class Check(Protocol):
    """Checks the files of an adapter away from this process; see `controlplane.intake.JailedChecks`."""

    def __call__(  # noqa: D102
        self, config_path: Path, weights_path: Path, base: BaseDescription, limits: Limits, *, timeout_s: float
    ) -> Awaitable[Report]: ...


class PublishMetrics:
    """Counts publishes by outcome and times their check."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.published = Counter("veneer_controlplane_versions_published", "Versions published.", registry=registry)
        self.repeated = Counter(
            "veneer_controlplane_publishes_repeated", "Publishes answered from the stored answer.", registry=registry
        )
        self.received = Counter("veneer_controlplane_upload_bytes", "Bytes of uploads received.", registry=registry)
        self.check_seconds = Histogram("veneer_controlplane_check_seconds", "Time of publish checks.", registry=registry)


class Publisher:
    """Use case of publishing. Owns the bounds on uploads and checks at a time, and the order of publishes with one request_id.

    No tenant and no organisation may have all uploads, and an upload has a least rate, so that no caller holds the others up by
    being slow.

    Nothing is visible before the transaction at the end. What a crash leaves in the store before that is named by a row of
    `uploads`, which is written first and which the collector goes by; the same publish again makes an upload of its own.
    """

    def __init__(self, database: Database, blobs: Blobs, settings: Settings, *, check: Check, metrics: PublishMetrics) -> None:
        self._database = database
        self._bases = Bases(database)
        self._probes = Probes(database, settings)
        self._signatures = Signatures(database)
        self._blobs = blobs
        self._settings = settings
        self._check = check
        self._metrics = metrics
        self._limits = Limits(
            max_config_bytes=settings.max_config_bytes,
            max_weights_bytes=settings.max_weights_bytes,
            max_rank=settings.max_rank,
            max_tensors=settings.max_tensors,
        )
        self._uploads = UploadPlaces(
            size=settings.max_publishes,
            per_tenant=settings.max_publishes_per_tenant,
            per_organization=settings.max_publishes_per_organization,
        )
        self._checks = asyncio.Semaphore(settings.max_checks)
        self._requests: dict[tuple[str, str], _Turn] = {}

    async def publish(self, owner: str, order: PublishOrder, *, parts: AsyncIterator[Part]) -> Published:
        """Publishes a version; the same request_id and content again give the same answer.

        Raises:
            InvalidArgumentError: The upload, the adapter or its signature is at fault, or the request_id is another one's.
            FailedPreconditionError: The owner trusts nobody who signed it, or requires a signature and there is none.
            NotFoundError: There is no such base.
            KnownContentError: The owner has published this content under another request_id.
            ResourceExhaustedError: The owner's quota of adapters or bytes does not allow it, too many wait for probes, or no
                place for the upload came free in time.
            AbortedError: The same request_id is being published by another process; try again.
            UnavailableError: Database, store or jail are away.
            DeadlineExceededError: The upload was too slow, or a part or the check took too long.
        """
        order.check()
        with ExitStack() as stack:
            return await self._publish(owner, order, parts=parts, stack=stack)

    async def _publish(self, owner: str, order: PublishOrder, *, parts: AsyncIterator[Part], stack: ExitStack) -> Published:
        base = await self._bases.find(order.base)
        organization = await self._check_room(owner, order)
        limits = {CONFIG: self._settings.max_config_bytes, WEIGHTS: self._settings.max_weights_bytes}
        rate = MinRate(self._settings.min_upload_bytes_per_s, self._settings.upload_rate_grace_s)
        spool = Spool(self._settings.spool_folder, limits, part_timeout_s=self._settings.part_timeout_s, rate=rate)
        async with self._uploads.place(owner, organization, wait_s=self._settings.upload_wait_s), spool:
            if order.probe:
                stack.enter_context(self._probes.place(owner))  # held until the probe's end
            try:
                async with asyncio.timeout(self._settings.upload_timeout_s):
                    files = await spool.receive(parts)
            except TimeoutError as error:
                raise DeadlineExceededError(f"the upload took longer than {self._settings.upload_timeout_s:g} s") from error
            self._metrics.received.inc(sum(file.size_bytes for file in files.values()))
            draft = Draft.of(owner, order, base=base, files=files)
            async with _turn(self._requests, (owner, order.request_id), places=1):  # others wait and find the answer
                published = await self._stored(draft)
                if published is not None:
                    self._metrics.repeated.inc()
                    if published.awaits is not None:
                        await self._probes.again(published.version)
                else:
                    signed = await self._signed(draft)
                    report = await self._checked(draft)
                    published = await self._store(draft, report, signed)
        return published if published.awaits is None else await self._probed(draft, published)

    async def _probed(self, draft: Draft, published: Published) -> Published:
        """Waits for the version's probe, and moves the alias that waits for it.

        Raises:
            AbortedError: The alias has moved since the version was published.
            FailedPreconditionError: The version did badly, or the alias cannot be moved there.
            UnavailableError: No data plane answered.
        """
        version = published.version
        probe = await self._probes.wait(version, base=draft.base.name)
        if probe.state == "FAILED":
            faults = "; ".join(probe.faults)
            raise FailedPreconditionError(
                f"the probe failed: {faults}; version {version.digest} is published, no alias was moved"
            )
        return await complete_publish(self._database, draft.request, published, if_absent=not draft.order.alias)

    async def _check_room(self, owner: str, order: PublishOrder) -> str:
        """Refuses before the upload what the tenant's quotas do not allow; not a publish that was done already.

        Returns:
            The tenant's organisation; empty: none.
        """
        columns = models.tenants.c
        async with self._database.transaction(Scope.of_tenant(owner)) as connection:
            if not await was_answered(connection, owner, order.request_id):
                await check_stored(connection, owner, order.adapter, num_bytes=1, final=False)
            found = await connection.execute(select(columns.organization).where(columns.name == owner))
            return found.scalar_one_or_none() or ""

    async def _stored(self, draft: Draft) -> Published | None:
        """The answer that was given to this request_id before; None when it is new and its content too."""
        async with self._database.transaction(Scope.of_tenant(draft.owner)) as connection:
            published = await _answered(connection, draft)
            if published is None:
                await _refuse_known(connection, draft)
            return published

    async def _signed(self, draft: Draft) -> _Signed:
        """Judges the signature, or that there is none.

        Raises:
            SignatureError: The owner's policy does not allow it.
        """
        trust = await self._signatures.trust(draft.owner, draft.order.signature)
        files = {name: file.digest for name, file in draft.files.items()}
        return _Signed(trust, await asyncio.to_thread(trust.judge, files))

    async def _checked(self, draft: Draft) -> Report:
        async with self._checks:
            with self._metrics.check_seconds.time():
                config, weights = draft.files[CONFIG].path, draft.files[WEIGHTS].path
                return await self._check(config, weights, draft.base, self._limits, timeout_s=self._settings.check_timeout_s)

    async def _store(self, draft: Draft, report: Report, signed: _Signed) -> Published:
        """Writes the files where the collector would find them, and publishes them there.

        Raises:
            DeadlineExceededError: It took so long that the collector may have come first.
        """
        folder = upload_folder(draft.digest, draft.upload)
        grace_s = self._settings.upload_grace_s
        async with self._database.transaction(Scope.of_tenant(draft.owner)) as connection:
            await note_uploads(connection, draft.owner, [folder], grace_s=grace_s, are_written=False)
        try:
            async with asyncio.timeout(grace_s / 2):
                for file in draft.files.values():
                    await self._blobs.put(folder, file.digest, file.path)
                published, is_ours = await self._commit(draft, report, signed, folder=folder)
        except TimeoutError as error:
            raise DeadlineExceededError(f"storing the files took longer than {grace_s / 2:g} s") from error
        if is_ours:
            self._metrics.published.inc()
        else:
            self._metrics.repeated.inc()
        return published

    async def _commit(self, draft: Draft, report: Report, signed: _Signed, *, folder: str) -> tuple[Published, bool]:
        """The version, and whether this upload became it rather than one of another process."""
        owner, order = draft.owner, draft.order
        refusals = {
            "pk_versions": KnownContentError(f"this content was published already as version {draft.digest}"),
            **RACED,
        }
        async with self._database.transaction(Scope.of_tenant(owner), refusals=refusals) as connection:
            number = await _lock_or_make_adapter(connection, owner, order.adapter) + 1
            published = await _answered(connection, draft)  # by another process, while this one waited for the lock
            if published is not None:
                return published, False
            await _refuse_known(connection, draft)
            num_bytes = sum(file.size_bytes for file in draft.files.values())
            await check_stored(connection, owner, order.adapter, num_bytes=num_bytes, final=True)
            await _take_over(connection, owner, folder)
            is_only = not await _has_versions(connection, owner, order.adapter)
            version = await _insert_version(connection, draft, report=report, signed=signed.report, number=number)
            await keep_signature(connection, owner, version.digest, signed.trust)
            alias, alias_name, generation = None, order.alias or (STABLE if is_only else ""), 0
            if order.probe:
                await ask(connection, version)
                seen = await present_alias(connection, owner, order.adapter, alias_name) if alias_name else None
                generation = 0 if seen is None else seen.generation
            elif alias_name:
                await check_servable(connection, owner, order.adapter, [version.digest])  # the policy may be another by now
                alias = await move(connection, owner, order.adapter, alias_name, arms=[Arm(version.digest, 1)])
            published = Published(version, alias, alias_name if order.probe else None, generation)
            await keep(connection, draft.request, answer_of(published))
        return published, True


class _Turn:
    def __init__(self, places: int) -> None:
        self.places = asyncio.Semaphore(places)
        self.num_users = 0


@asynccontextmanager
async def _turn(turns: dict[_Key, _Turn], key: _Key, *, places: int) -> AsyncIterator[None]:
    """At most so many at a time with one key; who waits is served in order."""
    turn = turns.setdefault(key, _Turn(places))
    turn.num_users += 1
    try:
        async with turn.places:
            yield
    finally:
        turn.num_users -= 1
        if turn.num_users == 0:
            del turns[key]


@dataclass(frozen=True, slots=True)
class _Signed:
    """A publish's signature, or that there is none: what it was judged by, and what was found."""

    trust: Trust
    report: SignatureReport | None


async def _answered(connection: AsyncConnection, draft: Draft) -> Published | None:
    answer = await answered(connection, draft.request)
    return None if answer is None else published_of(answer)


async def _lock_or_make_adapter(connection: AsyncConnection, owner: str, adapter: str) -> int:
    """Takes the lock of an adapter that may not exist, or not any more; returns the number of versions that it ever had."""
    columns = models.adapters.c
    made = insert(models.adapters).values(tenant=owner, name=adapter, num_versions=0)
    query = made.on_conflict_do_update(constraint="pk_adapters", set_={"delete_time": None}).returning(columns.num_versions)
    return int((await connection.execute(query)).scalar_one())


async def _has_versions(connection: AsyncConnection, owner: str, adapter: str) -> bool:
    columns = models.versions.c
    query = select(columns.digest).where(columns.tenant == owner, columns.adapter == adapter).limit(1)
    return (await connection.execute(query)).one_or_none() is not None


async def _take_over(connection: AsyncConnection, owner: str, folder: str) -> None:
    """Takes an upload from the collector's list, since a version owns it from now on.

    Raises:
        AbortedError: The collector has it already.
    """
    columns = models.uploads.c
    mine = (columns.tenant == owner, columns.folder == folder, columns.taken.is_(False))
    if (await connection.execute(delete(models.uploads).where(*mine))).rowcount == 0:
        raise AbortedError("the upload took so long that its files were removed; publish again")


async def _refuse_known(connection: AsyncConnection, draft: Draft) -> None:
    columns = models.versions.c
    query = select(columns.adapter, columns.number).where(columns.tenant == draft.owner, columns.digest == draft.digest)
    row = (await connection.execute(query)).one_or_none()
    if row is not None:
        raise KnownContentError(f"this content is version {row.number} of adapter {row.adapter!r} already: {draft.digest}")


async def _insert_version(
    connection: AsyncConnection, draft: Draft, *, report: Report, signed: SignatureReport | None, number: int
) -> Version:
    row = {
        "tenant": draft.owner,
        "digest": draft.digest,
        "adapter": draft.order.adapter,
        "number": number,
        "base_digest": draft.base.digest,
        "state": READY,
        "config_digest": draft.files[CONFIG].digest,
        "config_bytes": draft.files[CONFIG].size_bytes,
        "weights_digest": draft.files[WEIGHTS].digest,
        "weights_bytes": draft.files[WEIGHTS].size_bytes,
        "max_rank": report.max_rank,
        "report": dataclasses.asdict(report),
        "label": draft.order.label,
        "labels": dict(draft.order.labels),
        "training_run": draft.order.training_run,
        "data_digest": draft.order.data_digest,
        "upload": draft.upload,
        "signature": None if signed is None else dataclasses.asdict(signed),
    }
    stored = (await connection.execute(insert(models.versions).values(row).returning(*models.versions.c))).one()
    mine = (models.adapters.c.tenant == draft.owner, models.adapters.c.name == draft.order.adapter)
    await connection.execute(update(models.adapters).where(*mine).values(num_versions=number))
    change = Change(kind=ChangeKind.VERSION, tenant=draft.owner, adapter=draft.order.adapter, version=draft.digest)
    await record(connection, change)
    return version_of(stored)
