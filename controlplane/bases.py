"""Base models that operators registered."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Row, or_, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from controlplane import models
from controlplane.db import OPERATOR, PUBLIC, Database
from controlplane.paging import page_limit, page_start, page_token
from veneer.artifact import BaseDescription, EdgeDigest, TargetModule
from veneer.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError, Violation


@dataclass(frozen=True, slots=True)
class RegisteredBase:
    """A base with the time of its registration."""

    description: BaseDescription
    create_time: datetime


class Bases:
    """Registers and lists bases. Stateless; any task may call it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def register(self, base: BaseDescription) -> RegisteredBase:
        """Registers a base; the same digest again gives the stored row.

        The row gets the ends of sequences and digests of edges if it has none, and what the request says of conversations.

        Raises:
            InvalidArgumentError: An end of sequences is no token of the base.
            AlreadyExistsError: Another base has the name.
        """
        faults = [
            Violation(f"ends.token_ids[{place}]", f"{id_} is not below the vocabulary's size, {base.vocab_size}")
            for place, id_ in enumerate(base.eos_ids or ())
            if id_ >= base.vocab_size
        ]
        if faults:
            raise InvalidArgumentError.of(faults)
        taken = AlreadyExistsError(f"another base is named {base.name!r}")
        row = {
            "digest": base.digest,
            "name": base.name,
            "family": base.family,
            "num_layers": base.num_layers,
            "modules": [dataclasses.asdict(module) for module in base.modules],
            "vocab_size": base.vocab_size,
            "max_context": base.max_context,
            "known_names": list(base.known_names),
            "eos_ids": None if base.eos_ids is None else list(base.eos_ids),
            "edge_digests": None if base.edge_digests is None else [dataclasses.asdict(one) for one in base.edge_digests],
        }
        chat = {"chat_contents": base.chat_contents, "chat_fault": base.chat_fault}
        chat = {name: value for name, value in chat.items() if value is not None}
        columns = models.bases.c
        later = {"eos_ids": row["eos_ids"], "edge_digests": row["edge_digests"]}
        async with self._database.transaction(OPERATOR, refusals={"uq_bases_name": taken}) as connection:
            await connection.execute(insert(models.bases).values(row | chat).on_conflict_do_nothing(index_elements=["digest"]))
            if chat:
                await connection.execute(update(models.bases).where(columns.digest == base.digest).values(chat))
            for name, value in later.items():
                is_less = (columns.digest == base.digest, columns[name].is_(None))
                if value is not None:
                    await connection.execute(update(models.bases).where(*is_less).values({name: value}))
            stored = (await connection.execute(select(models.bases).where(columns.digest == base.digest))).one()
        return _base(stored)

    async def page(self, *, page_size: int, token: str) -> tuple[list[RegisteredBase], str]:
        """A page of bases, newest first, and the next page's token."""
        limit = page_limit(page_size)
        start = page_start("bases", token, kinds=[datetime, str])
        columns = models.bases.c
        query = select(models.bases).order_by(columns.create_time.desc(), columns.digest.desc()).limit(limit + 1)
        if start is not None:
            query = query.where(tuple_(columns.create_time, columns.digest) < tuple(start))
        async with self._database.transaction(PUBLIC) as connection:
            rows = (await connection.execute(query)).all()
        bases = [_base(row) for row in rows[:limit]]
        last = rows[limit - 1] if len(rows) > limit else None
        return bases, "" if last is None else page_token("bases", [last.create_time, last.digest])

    async def find(self, digest_or_name: str) -> BaseDescription:
        """The base with this digest or name.

        Raises:
            NotFoundError: There is none.
        """
        async with self._database.transaction(PUBLIC) as connection:
            return (await find_base(connection, digest_or_name)).description


async def find_base(connection: AsyncConnection, digest_or_name: str) -> RegisteredBase:
    """The base with this digest, else the one with this name.

    Raises:
        NotFoundError: There is none.
    """
    columns = models.bases.c
    by_digest = (columns.digest == digest_or_name).desc()
    query = (
        select(models.bases)
        .where(or_(columns.digest == digest_or_name, columns.name == digest_or_name))
        .order_by(by_digest)
        .limit(1)
    )
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        raise NotFoundError(f"there is no base with the digest or name {digest_or_name!r}")
    return _base(row)


def _base(row: Row[Any]) -> RegisteredBase:
    description = BaseDescription(
        digest=row.digest,
        name=row.name,
        family=row.family,
        num_layers=row.num_layers,
        modules=tuple(TargetModule(**module) for module in row.modules),
        vocab_size=row.vocab_size,
        max_context=row.max_context,
        known_names=tuple(row.known_names),
        eos_ids=None if row.eos_ids is None else tuple(row.eos_ids),
        edge_digests=None if row.edge_digests is None else tuple(EdgeDigest(**one) for one in row.edge_digests),
        chat_contents=row.chat_contents,
        chat_fault=row.chat_fault,
    )
    return RegisteredBase(description, row.create_time)
