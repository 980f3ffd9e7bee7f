"""Data planes: letting them in, their keys, and what they report."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row, func, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert

from controlplane import models
from controlplane.catalog import NO_VERSION, QUARANTINED, READY, change_state, find_version, lock_adapter
from controlplane.db import NODE, OPERATOR, Database, Scope, set_scope
from controlplane.paging import page_limit, page_start, page_token
from controlplane.settings import Settings
from controlplane.vault import Vault, new_secret, secret_digest
from veneer.errors import FailedPreconditionError, NotFoundError, UnauthenticatedError


@dataclass(frozen=True, slots=True)
class Node:
    """A data plane."""

    id: str
    name: str
    base_digest: str
    create_time: datetime
    revoke_time: datetime | None


@dataclass(frozen=True, slots=True)
class NewNode:
    """A node with its key, which is shown once."""

    node: Node
    secret: str


@dataclass(frozen=True, slots=True)
class EnrollmentToken:
    """A token that lets one node in, shown once."""

    token: str
    expire_time: datetime


_NODE = tuple(models.nodes.c[name] for name in ("id", "name", "base_digest", "create_time", "revoke_time"))


class Nodes:
    """Use cases of nodes. Stateless; any task may call it."""

    def __init__(self, database: Database, vault: Vault, settings: Settings) -> None:
        self._database = database
        self._vault = vault
        self._settings = settings

    async def create_token(self, node_name: str) -> EnrollmentToken:
        """Makes a token with which one node may enrol."""
        token = new_secret()
        lifetime = timedelta(seconds=self._settings.enrollment_lifetime_s)
        row = {"id": uuid.uuid4(), "node_name": node_name, "hash": self._hash(token), "expire_time": func.now() + lifetime}
        async with self._database.transaction(OPERATOR) as connection:
            query = insert(models.enrollments).values(row).returning(models.enrollments.c.expire_time)
            return EnrollmentToken(token, (await connection.execute(query)).scalar_one())

    async def enroll(self, enrollment_id: str, *, base_digest: str) -> NewNode:
        """Uses up an enrolment and makes its node.

        Raises:
            FailedPreconditionError: The base is not registered; the token stays good.
            UnauthenticatedError: The token was used by another in the meantime.
        """
        unknown = FailedPreconditionError(f"base {base_digest} is not registered")
        secret = new_secret()
        columns = models.enrollments.c
        unused = (columns.id == uuid.UUID(enrollment_id), columns.use_time.is_(None))
        async with self._database.transaction(NODE, refusals={"fk_nodes_base_digest_bases": unknown}) as connection:
            use = update(models.enrollments).where(*unused).values(use_time=func.now()).returning(columns.node_name)
            name = (await connection.execute(use)).scalar_one_or_none()
            if name is None:
                raise UnauthenticatedError("no valid credential")
            row = {"id": uuid.uuid4(), "name": name, "base_digest": base_digest, "hash": self._hash(secret)}
            stored = (await connection.execute(insert(models.nodes).values(row).returning(*_NODE))).one()
        return NewNode(_node(stored), secret)

    async def rotate(self, node_id: str) -> str:
        """Gives a node a new key; the present one works for a while longer, one before it ends now."""
        secret = new_secret()
        columns = models.nodes.c
        overlap = timedelta(seconds=self._settings.node_key_overlap_s)
        values = {"hash": self._hash(secret), "previous_hash": columns.hash, "previous_end_time": func.now() + overlap}
        query = update(models.nodes).where(columns.id == uuid.UUID(node_id), columns.revoke_time.is_(None)).values(values)
        async with self._database.transaction(NODE) as connection:
            if (await connection.execute(query)).rowcount == 0:
                raise UnauthenticatedError("no valid credential")
        return secret

    async def page(self, *, page_size: int, token: str) -> tuple[list[Node], str]:
        """A page of the nodes by name, revoked ones included, and the next page's token."""
        limit = page_limit(page_size)
        start = page_start("nodes", token, kinds=[str, uuid.UUID])
        columns = models.nodes.c
        query = select(*_NODE).order_by(columns.name, columns.id).limit(limit + 1)
        if start is not None:
            query = query.where(tuple_(columns.name, columns.id) > tuple(start))
        async with self._database.transaction(OPERATOR) as connection:
            nodes = [_node(row) for row in (await connection.execute(query)).all()]
        shown = nodes[:limit]
        return shown, page_token("nodes", [shown[-1].name, uuid.UUID(shown[-1].id)]) if len(nodes) > limit else ""

    async def revoke(self, node_id: str) -> Node:
        """Ends a node's keys at once; a second time changes nothing.

        Raises:
            NotFoundError: There is no such node.
        """
        columns = models.nodes.c
        first = func.coalesce(columns.revoke_time, func.now())
        query = update(models.nodes).where(columns.id == uuid.UUID(node_id)).values(revoke_time=first).returning(*_NODE)
        async with self._database.transaction(OPERATOR) as connection:
            row = (await connection.execute(query)).one_or_none()
        if row is None:
            raise NotFoundError("there is no such node")
        return _node(row)

    async def report(self, node_id: str, digest: str, *, fault: str) -> bool:
        """Notes that a node found a version faulty; quarantines it when enough nodes did. Says whether it is quarantined now.

        Raises:
            NotFoundError: There is no such version for the node's base.
        """
        v, n = models.versions.c, models.nodes.c
        mine = (n.id == uuid.UUID(node_id)) & (n.base_digest == v.base_digest)
        async with self._database.transaction(NODE) as connection:
            query = select(v.tenant, v.adapter).join(models.nodes, mine).where(v.digest == digest)
            found = (await connection.execute(query)).one_or_none()
            if found is None:
                raise NotFoundError(NO_VERSION)
            # A node sees versions and changes none: from here on the transaction acts for the version's owner.
            await set_scope(connection, Scope.of_tenant(found.tenant))
            await lock_adapter(connection, found.tenant, found.adapter)
            row = {"tenant": found.tenant, "version": digest, "node": uuid.UUID(node_id), "fault": fault}
            await connection.execute(insert(models.reports).values(row).on_conflict_do_nothing())
            reports = select(func.count()).where(models.reports.c.tenant == found.tenant, models.reports.c.version == digest)
            num_reports = (await connection.execute(reports)).scalar_one()
            version = await find_version(connection, found.tenant, found.adapter, digest)
            if version.state == READY and num_reports >= self._settings.quarantine_reports:
                version = await change_state(connection, version, QUARANTINED)
        return version.state == QUARANTINED

    def _hash(self, secret: str) -> bytes:
        return self._vault.key_hash(secret_digest(secret))


def _node(row: Row[Any]) -> Node:
    return Node(str(row.id), row.name, row.base_digest, row.create_time, row.revoke_time)
