"""Grants by which a node reads the files of one version for a short time."""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from controlplane import models
from controlplane.blobs import Blobs, upload_folder
from controlplane.catalog import NO_VERSION, READY
from controlplane.db import NODE, Database, Scope, set_scope
from controlplane.signatures import Trust, trust_of
from controlplane.spool import CONFIG, WEIGHTS
from controlplane.vault import Vault
from veneer.errors import FailedPreconditionError, NotFoundError, PermissionDeniedError
from veneer.signature import SignatureError

_PURPOSE = "blob-grant"
_TAG_BYTES = 32
_LEEWAY_S = 60.0
"""Clocks of two control-plane processes may differ by so much; a grant is good for that much longer than it says."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A file that a grant covers; `url` is empty when the store cannot sign."""

    name: str
    digest: str
    size_bytes: int
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobGrant:
    """A node's permission to read a version's files."""

    token: str
    blobs: tuple[Blob, ...]
    expire_time: datetime
    base_digest: str
    owner: str
    trust: Trust
    adapter: str
    version_number: int


class BlobGrants:
    """Gives and checks grants. A grant is a signed token: checking it asks no database. Stateless; any task may call it."""

    def __init__(
        self, database: Database, vault: Vault, blobs: Blobs, *, lifetime_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._database = database
        self._vault = vault
        self._blobs = blobs
        self._lifetime_s = lifetime_s
        self._clock = clock

    async def give(self, node_id: str, version: str, *, judges_signatures: bool = True) -> BlobGrant:
        """Lets a node read the files of a version, and notes it: they are not removed from the store before the grant has ended.

        Args:
            node_id: The node.
            version: Digest of the version.
            judges_signatures: Whether the node judges the version's signature by itself; else it is judged here.

        Raises:
            NotFoundError: There is no such version.
            FailedPreconditionError: It was retired or is quarantined, or is for another base than the node's, or its owner's
                policy does not allow it with the signature that it has.
        """
        v, n = models.versions.c, models.nodes.c
        is_for_node = select(n.base_digest == v.base_digest).where(n.id == uuid.UUID(node_id)).scalar_subquery()
        query = select(v.tenant, is_for_node.label("is_for_node")).where(v.digest == version)
        end = int(self._clock() + self._lifetime_s)
        async with self._database.transaction(NODE) as connection:
            found = (await connection.execute(query)).one_or_none()
            if found is None:
                raise NotFoundError(NO_VERSION)
            if not found.is_for_node:
                raise FailedPreconditionError(f"version {version} is for another base")
            # A node sees versions and writes nothing: from here on the transaction acts for the version's owner.
            await set_scope(connection, Scope.of_tenant(found.tenant))
            mine = (v.tenant == found.tenant, v.digest == version)
            held = select(models.versions).where(*mine).with_for_update(read=True, key_share=True)  # a deletion waits
            row = (await connection.execute(held)).one_or_none()
            if row is None:
                raise NotFoundError(NO_VERSION)
            if row.state != READY:
                raise FailedPreconditionError(f"version {version} is {row.state.lower()}")
            folder = upload_folder(version, row.upload)
            trust = await trust_of(connection, found.tenant, version)
            if not judges_signatures:
                _refuse_untrusted(trust, {CONFIG: row.config_digest, WEIGHTS: row.weights_digest})
            await _note_lease(connection, found.tenant, folder, node_id=node_id, lifetime_s=self._lifetime_s)
        files = ((CONFIG, row.config_digest, row.config_bytes), (WEIGHTS, row.weights_digest, row.weights_bytes))
        blobs = [
            Blob(name, digest, size_bytes, await self._blobs.sign(folder, digest, lifetime_s=self._lifetime_s))
            for name, digest, size_bytes in files
        ]
        token = self._seal({"node": node_id, "folder": folder, "files": [blob.digest for blob in blobs], "end": end})
        expire_time = datetime.fromtimestamp(end, UTC)
        return BlobGrant(
            token=token,
            blobs=tuple(blobs),
            expire_time=expire_time,
            base_digest=row.base_digest,
            owner=row.tenant,
            trust=trust,
            adapter=row.adapter,
            version_number=row.number,
        )

    def check(self, node_id: str, token: str, *, digest: str) -> str:
        """The folder of the store from which a node may read a file under a grant.

        Raises:
            PermissionDeniedError: The grant is none of ours, another node's, at its end, or does not cover the file.
        """
        grant = self._unseal(token)
        if grant["node"] != node_id:
            raise PermissionDeniedError("the grant is another node's")
        if self._clock() > grant["end"] + _LEEWAY_S:
            raise PermissionDeniedError("the grant has ended")
        if digest not in grant["files"]:
            raise PermissionDeniedError("the grant does not cover this file")
        return str(grant["folder"])

    def _seal(self, grant: dict[str, object]) -> str:
        body = json.dumps(grant, separators=(",", ":"), sort_keys=True).encode()
        return base64.urlsafe_b64encode(self._vault.sign(_PURPOSE, body) + body).decode()

    def _unseal(self, token: str) -> dict[str, Any]:
        try:
            sealed = base64.urlsafe_b64decode(token.encode())
        except (binascii.Error, ValueError):
            sealed = b""
        tag, body = sealed[:_TAG_BYTES], sealed[_TAG_BYTES:]
        if not hmac.compare_digest(tag, self._vault.sign(_PURPOSE, body)):
            raise PermissionDeniedError("the grant is not valid")
        grant: dict[str, Any] = json.loads(body)
        return grant


def _refuse_untrusted(trust: Trust, files: Mapping[str, str]) -> None:
    try:
        trust.judge(files)
    except SignatureError as error:
        raise FailedPreconditionError(error.message, violations=error.violations) from error


async def _note_lease(connection: AsyncConnection, owner: str, folder: str, *, node_id: str, lifetime_s: float) -> None:
    row = {
        "tenant": owner,
        "folder": folder,
        "node": uuid.UUID(node_id),
        "end_time": func.now() + timedelta(seconds=lifetime_s + _LEEWAY_S),
    }
    query = insert(models.blob_leases).values(row)
    later = {"end_time": func.greatest(models.blob_leases.c.end_time, query.excluded.end_time)}
    await connection.execute(query.on_conflict_do_update(constraint="pk_blob_leases", set_=later))
