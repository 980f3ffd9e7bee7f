"""Stored answers: a write that comes again under the same request_id is answered as it was, and done once."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, TypeVar

from pydantic import TypeAdapter
from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from controlplane import models
from controlplane.catalog import Alias, Arm, Version
from controlplane.constraints import CONSTRAINTS
from controlplane.locks import Lock, hold
from controlplane.organization_tables import organization_requests
from controlplane.probe_report import ProbeReport
from veneer.access import current_kind
from veneer.artifact import Report
from veneer.errors import InvalidArgumentError, VeneerError, Violation
from veneer.signature import SignatureReport

_T = TypeVar("_T")

RACED: Final[Mapping[str, VeneerError]] = {name: CONSTRAINTS[name] for name in ("pk_requests", "pk_organization_requests")}
"""Refusals of a transaction that keeps an answer."""

_TABLES = {"tenant": models.requests, "organization": organization_requests}
"""By kind of caller, which is also the name of the column that says whose an identifier is."""
_LOCKS = {"tenant": Lock.ANSWER, "organization": Lock.ORGANIZATION_ANSWER}


@dataclass(frozen=True, slots=True)
class Request:
    """A write as its caller identifies it.

    Attributes:
        tenant: Whose request_id it is; in the space of organisations that of an organisation.
        id: The request_id; empty: the write is done each time that it comes.
        method: Name of the write.
        fingerprint: Digest of everything that the write says.
        field: Where the request_id stood, for refusals.
        space: What kind of caller's identifiers it is one of: those of tenants and organisations never meet.
    """

    tenant: str
    id: str
    method: str
    fingerprint: bytes
    field: str = "request_id"
    space: Literal["tenant", "organization"] = "tenant"

    @classmethod
    def of(cls, tenant: str, request_id: str, method: str, *content: object) -> Request:
        """A write with what it says, in values that JSON can spell; an operator's is kept apart (see `of_operator`)."""
        digest = hashlib.sha256(json.dumps([method, *content]).encode()).digest()
        return cls(tenant, _apart(request_id) if current_kind() == "operator" else request_id, method, digest)

    @classmethod
    def of_organization(cls, organization: str, request_id: str, method: str, *content: object) -> Request:
        """A write of an organisation, to its own rows or to a tenant's."""
        return dataclasses.replace(cls.of(organization, request_id, method, *content), space="organization")

    @classmethod
    def of_operator(
        cls,
        owner: str,
        request_id: str,
        method: str,
        *content: object,
        space: Literal["tenant", "organization"] = "tenant",
    ) -> Request:
        """A write to the row of a tenant or organisation that only operators may do.

        It is kept apart: nobody else's request_id is as long.
        """
        return dataclasses.replace(cls.of(owner, request_id, method, *content), id=_apart(request_id), space=space)


def _apart(request_id: str) -> str:
    return f"operator/{hashlib.sha512(request_id.encode()).hexdigest()}" if request_id else ""


async def answered(connection: AsyncConnection, request: Request) -> dict[str, Any] | None:
    """The answer that was given to this request before; None when it is new.

    The same request at the same time waits until this transaction ends.

    Raises:
        InvalidArgumentError: The request_id was used for a write that says something else.
    """
    if not request.id:
        return None
    table = _TABLES[request.space]
    await hold(connection, _LOCKS[request.space], f"{request.tenant}/{request.id}")
    mine = (table.c[request.space] == request.tenant, table.c.request_id == request.id)
    query = select(table.c.fingerprint, table.c.answer).where(*mine)
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        return None
    if bytes(row.fingerprint) != request.fingerprint:
        raise InvalidArgumentError.of([Violation(request.field, "was used before for a request with other content")])
    answer: dict[str, Any] = row.answer
    return answer


async def was_answered(connection: AsyncConnection, tenant: str, request_id: str) -> bool:
    """Whether a write with this request_id was done, whatever it said."""
    columns = models.requests.c
    query = select(columns.request_id).where(columns.tenant == tenant, columns.request_id == request_id)
    return (await connection.execute(query)).one_or_none() is not None


async def keep(connection: AsyncConnection, request: Request, answer: Mapping[str, Any]) -> None:
    """Keeps the answer of a request, in the transaction that does what it asks for."""
    if not request.id:
        return
    row = {
        request.space: request.tenant,
        "request_id": request.id,
        "method": request.method,
        "fingerprint": request.fingerprint,
        "answer": answer,
    }
    await connection.execute(insert(_TABLES[request.space]).values(row))


async def once(connection: AsyncConnection, request: Request, kind: TypeAdapter[_T], do: Callable[[], Awaitable[_T]]) -> _T:
    """Does what a request asks for, unless it was done before; returns the answer that it gets, or got.

    Args:
        connection: In the transaction of the write; see `RACED` for its refusals.
        request: The write.
        kind: How its answer is kept.
        do: Does it.

    Raises:
        InvalidArgumentError: The request_id was used for a write that says something else.
    """
    known = await answered(connection, request)
    if known is not None:
        return kind.validate_python(known)
    answer = await do()
    await keep(connection, request, kind.dump_python(answer, mode="json"))
    return answer


async def complete(connection: AsyncConnection, request: Request, answer: Mapping[str, Any]) -> None:
    """Replaces the kept answer of a request that was answered with something left to do."""
    columns = models.requests.c
    mine = (columns.tenant == request.tenant, columns.request_id == request.id)
    await connection.execute(update(models.requests).where(*mine).values(answer=answer))


def alias_to_json(alias: Alias) -> dict[str, Any]:
    """An alias as it is kept."""
    return {**dataclasses.asdict(alias), "update_time": alias.update_time.isoformat()}


def alias_from_json(fields: Mapping[str, Any]) -> Alias:
    """An alias as it was kept."""
    arms = tuple(Arm(**arm) for arm in fields["arms"])
    return Alias(**{**fields, "arms": arms, "update_time": datetime.fromisoformat(fields["update_time"])})


def version_to_json(version: Version) -> dict[str, Any]:
    """A version as it is kept."""
    retire_time = None if version.retire_time is None else version.retire_time.isoformat()
    return {**dataclasses.asdict(version), "create_time": version.create_time.isoformat(), "retire_time": retire_time}


def version_from_json(fields: Mapping[str, Any]) -> Version:
    """A version as it was kept."""
    retire_time = None if fields["retire_time"] is None else datetime.fromisoformat(fields["retire_time"])
    times = {"create_time": datetime.fromisoformat(fields["create_time"]), "retire_time": retire_time}
    report, probe = Report.from_fields(fields["report"]), ProbeReport.from_fields(fields.get("probe"))
    signature = SignatureReport.from_fields(fields.get("signature"))
    return Version(**{**fields, **times, "report": report, "probe": probe, "signature": signature})
