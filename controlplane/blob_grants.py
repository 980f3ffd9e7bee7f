"""Grants by which a node reads the files of one version for a short time."""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn

from prometheus_client import CollectorRegistry, Counter
from sqlalchemy import func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from controlplane import models
from controlplane.blobs import Blobs, upload_folder
from controlplane.catalog import NO_VERSION, READY
from controlplane.db import NODE, Database, Scope, set_scope
from controlplane.identities import Identities
from controlplane.node_versions import NodeVersion, rights_of, write_down
from controlplane.signatures import Trust, trust_of
from controlplane.spool import CONFIG, WEIGHTS
from controlplane.vault import Vault
from veneer.errors import FailedPreconditionError, NotFoundError, PermissionDeniedError
from veneer.signature import SignatureError

_LOG = logging.getLogger(__name__)
_PURPOSE = "blob-grant"
_TAG_BYTES = 32
_LEEWAY_S = 60.0
"""Clocks of two control-plane processes may differ by so much; a grant is good for that much longer than it says."""


_IS_SERVED = text("""
    SELECT EXISTS (SELECT FROM arms b JOIN aliases a ON a.tenant = b.tenant AND a.adapter = b.adapter AND a.name = b.alias
        WHERE b.tenant = :tenant AND b.adapter = :adapter AND b.version = :version AND b.generation = a.generation)
""")


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
        self,
        database: Database,
        vault: Vault,
        blobs: Blobs,
        *,
        identities: Identities,
        lifetime_s: float,
        registry: CollectorRegistry,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._vault = vault
        self._blobs = blobs
        self._identities = identities
        self._refused = Counter(
            "veneer_controlplane_blob_grants_refused",
            "Grants refused to nodes that were neither asked to serve the version nor told to stage it.",
            registry=registry,
        )
        self._lifetime_s = lifetime_s
        self._clock = clock

    async def give(
        self, node_id: str, version: str, *, judges_signatures: bool = True, operator_key_digest: bytes = b""
    ) -> BlobGrant:
        """Lets a node read the files of a version, and notes it: they are not removed from the store before the grant has ended.

        The node must have been told of the version (`controlplane.node_versions`), or of another one of the adapter while an
        alias points at this one, or must name an operator's credential.

        Args:
            node_id: The node.
            version: Digest of the version.
            judges_signatures: Whether the node judges the version's signature by itself; else it is judged here.
            operator_key_digest: Digest of the credential of an operator who has the node bring the version; empty without one.

        Raises:
            NotFoundError: There is no such version.
            FailedPreconditionError: It was retired or is quarantined, or is for another base than the node's, or its owner's
                policy does not allow it with the signature that it has.
            PermissionDeniedError: The node was neither asked to serve it nor told to stage it.
        """
        is_operators = bool(operator_key_digest) and await self._is_operators(operator_key_digest)
        v, n = models.versions.c, models.nodes.c
        is_for_node = select(n.base_digest == v.base_digest).where(n.id == uuid.UUID(node_id)).scalar_subquery()
        query = select(v.tenant, v.adapter, v.number, v.state, is_for_node.label("is_for_node")).where(v.digest == version)
        end = int(self._clock() + self._lifetime_s)
        async with self._database.transaction(NODE) as connection:
            found = (await connection.execute(query)).one_or_none()
            if found is None:
                raise NotFoundError(NO_VERSION)
            if not found.is_for_node:
                raise FailedPreconditionError(f"version {version} is for another base")
            if found.state != READY:
                raise FailedPreconditionError(f"version {version} is {found.state.lower()}")
            told = NodeVersion(found.tenant, found.adapter, node_id, version)
            if not await _may_read(connection, told, is_operators=is_operators):
                self._refuse(told, found.number)
            await write_down(connection, [told])
            # A node sees versions and writes nothing of theirs: from here on the transaction acts for the version's owner.
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

    async def _is_operators(self, key_digest: bytes) -> bool:
        holder = await self._identities.find(key_digest)
        return holder is not None and holder.identity.kind == "operator"

    def _refuse(self, asked: NodeVersion, number: int) -> NoReturn:
        self._refused.inc()
        facts = {
            "node": asked.node,
            "owner": asked.tenant,
            "adapter": asked.adapter,
            "number": number,
            "version": asked.version,
        }
        _LOG.warning("a node asked for a version that it was neither asked to serve nor told to stage", extra=facts)
        raise PermissionDeniedError(f"this node was neither asked to serve version {asked.version} nor told to stage it")

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


async def _may_read(connection: AsyncConnection, asked: NodeVersion, *, is_operators: bool) -> bool:
    """Says whether a node may read a version, in a transaction of the scope `node`, which it leaves so."""
    rights = await rights_of(connection, asked)
    if rights.version or rights.everything or is_operators:
        return True
    if not rights.adapter:
        return False
    # An alias moved, and the node brings the version before the next request asks: see `ChangeFeed` of the data plane.
    await set_scope(connection, Scope.of_tenant(asked.tenant))
    is_served = await connection.execute(_IS_SERVED, {"tenant": asked.tenant, "adapter": asked.adapter, "version": asked.version})
    await set_scope(connection, NODE)
    return bool(is_served.scalar_one())


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
