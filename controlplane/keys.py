"""Keys of tenants and of organisations: created, rotated, listed, revoked."""

from __future__ import annotations

import dataclasses
import secrets
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from pydantic import TypeAdapter
from sqlalchemy import Row, Table, func, insert, or_, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from controlplane import models
from controlplane.answers import RACED, Request, once
from controlplane.changes import Change, ChangeKind, record
from controlplane.db import Database, Scope
from controlplane.organization_tables import organization_keys, organizations
from controlplane.paging import page_limit, page_start, page_token
from controlplane.vault import Vault, secret_digest
from veneer.errors import FailedPreconditionError, NotFoundError

_NO_KEY = "there is no such key"
_NONCE_BYTES = 32
_OWN = ("id", "roles", "label", "create_time", "expire_time", "revoke_time", "successor")


@dataclass(frozen=True, slots=True)
class Ring:
    """Where keys of one kind lie.

    Attributes:
        owner: Whose they are, `tenant` or `organization`: name of the column, and kind of the owner's scope.
        keys: Their table.
        owners: Table of the owners.
        noun: What methods of the API call such a key.
        no_owner: What is said when there is no such owner.
    """

    owner: str
    keys: Table
    owners: Table
    noun: str
    no_owner: str


TENANT_KEYS: Final = Ring("tenant", models.keys, models.tenants, "Key", "there is no such tenant")
ORGANIZATION_KEYS: Final = Ring(
    "organization", organization_keys, organizations, "OrganizationKey", "there is no such organisation"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A credential of a tenant or of an organisation, without its secret; the name of the other one is empty."""

    id: str
    tenant: str = ""
    roles: tuple[str, ...]
    label: str
    create_time: datetime
    expire_time: datetime | None
    revoke_time: datetime | None
    successor: str = ""
    organization: str = ""


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key with its secret, which is kept nowhere, and the key whose place it takes, if any."""

    key: Key
    secret: str
    previous: Key | None = None


@dataclass(frozen=True, slots=True)
class _Made:
    """A new key as its answer is kept: what its secret is derived from is in it, and the secret is not."""

    key: Key
    nonce: str
    previous: Key | None = None


_KEPT_KEY, _KEPT_MADE = TypeAdapter(Key), TypeAdapter(_Made)


class Keys:
    """Use cases of one kind of key. Stateless; any task may call it.

    Each acts as the owner of the keys, or in a scope that is given: that of an organisation shows its own tenants and no other.
    """

    def __init__(self, database: Database, vault: Vault, ring: Ring = TENANT_KEYS) -> None:
        self._database = database
        self._vault = vault
        self._ring = ring
        self._columns = tuple(ring.keys.c[name] for name in (ring.owner, *_OWN))

    async def create(
        self,
        owner: str,
        roles: Sequence[str],
        *,
        label: str,
        lifetime: timedelta | None,
        scope: Scope | None = None,
        request_id: str = "",
    ) -> NewKey:
        """Creates a key; its secret is in the result and is stored nowhere.

        Raises:
            NotFoundError: There is no such owner.
        """
        scope = scope or self._scope(owner)
        request = self._request(scope, owner, request_id, "Create", sorted(roles), label, _seconds(lifetime))
        async with self._acting(scope, owner) as connection:

            async def create() -> _Made:
                return await self._make(connection, owner, roles, label=label, lifetime=lifetime)

            made = await once(connection, request, _KEPT_MADE, create)
        return self._new_key(owner, made)

    async def rotate(
        self,
        owner: str,
        key_id: str,
        *,
        overlap: timedelta,
        lifetime: timedelta | None,
        scope: Scope | None = None,
        request_id: str = "",
    ) -> NewKey:
        """Creates a key with the roles and label of another, which ends after the overlap or sooner, as it would have.

        Args:
            owner: Whose key it is.
            key_id: Key whose place is taken.
            overlap: How long it goes on working.
            lifetime: How long the new key lives; None: as long as the other one was made for.
            scope: On whose behalf; None: the owner's.
            request_id: The caller's own identifier of this rotation.

        Raises:
            NotFoundError: There is no such owner, or it has no such key.
            FailedPreconditionError: The key was rotated before, or works no longer.
        """
        scope = scope or self._scope(owner)
        request = self._request(scope, owner, request_id, "Rotate", key_id, _seconds(overlap), _seconds(lifetime))
        async with self._acting(scope, owner) as connection:

            async def rotate() -> _Made:
                return await self._rotate(connection, owner, uuid.UUID(key_id), overlap=overlap, lifetime=lifetime)

            made = await once(connection, request, _KEPT_MADE, rotate)
        return self._new_key(owner, made)

    async def page(self, owner: str, *, page_size: int, token: str, scope: Scope | None = None) -> tuple[list[Key], str]:
        """A page of an owner's keys, newest first, revoked ones included, and the next page's token.

        Raises:
            NotFoundError: There is no such owner.
        """
        limit = page_limit(page_size)
        start = page_start("keys", token, kinds=[datetime, uuid.UUID])
        columns = self._ring.keys.c
        query = select(*self._columns).where(columns[self._ring.owner] == owner)
        if start is not None:
            query = query.where(tuple_(columns.create_time, columns.id) < tuple(start))
        query = query.order_by(columns.create_time.desc(), columns.id.desc()).limit(limit + 1)
        async with self._acting(scope or self._scope(owner), owner) as connection:
            rows = (await connection.execute(query)).all()
        keys = [self._key(row) for row in rows[:limit]]
        return keys, page_token("keys", [keys[-1].create_time, uuid.UUID(keys[-1].id)]) if len(rows) > limit else ""

    async def revoke(self, owner: str, key_id: str, *, scope: Scope | None = None, request_id: str = "") -> Key:
        """Ends a key at once; a second time changes nothing.

        Raises:
            NotFoundError: There is no such owner, or it has no such key.
        """
        scope = scope or self._scope(owner)
        request = self._request(scope, owner, request_id, "Revoke", key_id)
        async with self._acting(scope, owner) as connection:
            return await once(connection, request, _KEPT_KEY, lambda: self._revoke(connection, owner, uuid.UUID(key_id)))

    @asynccontextmanager
    async def _acting(self, scope: Scope, owner: str) -> AsyncIterator[AsyncConnection]:
        """A transaction in a scope that shows the owner."""
        async with self._database.transaction(scope, refusals=RACED) as connection:
            names = self._ring.owners.c.name
            if (await connection.execute(select(names).where(names == owner))).one_or_none() is None:
                raise NotFoundError(self._ring.no_owner)
            yield connection

    def _scope(self, owner: str) -> Scope:
        return Scope(self._ring.owner, owner)

    def _request(self, scope: Scope, owner: str, request_id: str, verb: str, *content: object) -> Request:
        method = f"{verb}{self._ring.noun}"
        if scope.kind == "organization":
            return Request.of_organization(scope.tenant, request_id, method, owner, *content)
        return Request.of(owner, request_id, method, *content)

    async def _rotate(
        self, connection: AsyncConnection, owner: str, key_id: uuid.UUID, *, overlap: timedelta, lifetime: timedelta | None
    ) -> _Made:
        columns, mine = self._ring.keys.c, self._is(owner, key_id)
        has_ended = or_(columns.revoke_time.is_not(None), columns.expire_time <= func.now()).label("has_ended")
        old = (await connection.execute(select(*self._columns, has_ended).where(*mine).with_for_update())).one_or_none()
        if old is None:
            raise NotFoundError(_NO_KEY)
        if old.has_ended:
            raise FailedPreconditionError("the key was revoked or is at its end; create another one")
        if old.successor is not None:
            raise FailedPreconditionError(f"the key was rotated before; {old.successor} took its place")
        if lifetime is None and old.expire_time is not None:
            lifetime = old.expire_time - old.create_time
        made = await self._make(connection, owner, old.roles, label=old.label, lifetime=lifetime)
        end = func.least(columns.expire_time, func.now() + overlap)  # of a key without an end: NULL is left out
        query = update(self._ring.keys).where(*mine).values(expire_time=end, successor=uuid.UUID(made.key.id))
        return dataclasses.replace(made, previous=self._key((await connection.execute(query.returning(*self._columns))).one()))

    async def _make(
        self, connection: AsyncConnection, owner: str, roles: Sequence[str], *, label: str, lifetime: timedelta | None
    ) -> _Made:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        row: dict[str, object] = {
            self._ring.owner: owner,
            "id": uuid.uuid4(),
            "hash": self._vault.key_hash(secret_digest(self._secret(owner, nonce))),
            "roles": sorted(roles),
            "label": label,
            "expire_time": None if lifetime is None else func.now() + lifetime,
        }
        stored = (await connection.execute(insert(self._ring.keys).values(row).returning(*self._columns))).one()
        await self._tell(connection, owner)
        return _Made(self._key(stored), nonce.hex())

    async def _revoke(self, connection: AsyncConnection, owner: str, key_id: uuid.UUID) -> Key:
        keys, mine = self._ring.keys, self._is(owner, key_id)
        query = update(keys).where(*mine, keys.c.revoke_time.is_(None)).values(revoke_time=func.now()).returning(*self._columns)
        row = (await connection.execute(query)).one_or_none()
        if row is not None:
            await self._tell(connection, owner)
            return self._key(row)
        row = (await connection.execute(select(*self._columns).where(*mine))).one_or_none()
        if row is None:
            raise NotFoundError(_NO_KEY)
        return self._key(row)

    async def _tell(self, connection: AsyncConnection, owner: str) -> None:
        if self._ring is TENANT_KEYS:  # data planes know no others
            await record(connection, Change(kind=ChangeKind.KEY, tenant=owner))

    def _is(self, owner: str, key_id: uuid.UUID) -> tuple[Any, Any]:
        columns = self._ring.keys.c
        return columns[self._ring.owner] == owner, columns.id == key_id

    def _new_key(self, owner: str, made: _Made) -> NewKey:
        return NewKey(made.key, self._secret(owner, bytes.fromhex(made.nonce)), made.previous)

    def _secret(self, owner: str, nonce: bytes) -> str:
        whose = owner if self._ring is TENANT_KEYS else f"{self._ring.owner}/{owner}"
        return self._vault.key_secret(whose, nonce)

    def _key(self, row: Row[Any]) -> Key:
        fields = {name: getattr(row, name) for name in (self._ring.owner, "label", "create_time", "expire_time", "revoke_time")}
        return Key(id=str(row.id), roles=tuple(row.roles), successor=str(row.successor or ""), **fields)


def _seconds(time: timedelta | None) -> float | None:
    return None if time is None else time.total_seconds()
