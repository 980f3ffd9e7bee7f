"""Statements on a held connection, each transaction in one round trip, and many of them on their way at once.

What the libraries do around a query takes several times as long as a query that looks into an index. Here a statement is prepared
once, its parameters go out in binary form, and what came is read when the socket has it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg
from psycopg.adapt import Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ConnStatus, ExecStatus
from psycopg.pq.abc import PGresult

Rows = list[tuple[Any, ...]]

_BINARY: Final = 1
_OF_ROWS: Final = (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK)


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement with parameters `$1`, `$2` and so on, and its name on the connection where it is prepared."""

    name: str
    sql: str


@dataclass(slots=True)
class _Transaction:
    answer: asyncio.Future[list[Rows]]
    asked_s: float = field(default_factory=time.monotonic)
    rows: list[Rows] = field(default_factory=list)
    error: psycopg.Error | None = None


class Pipeline:
    """A connection that runs transactions one after the other without waiting in between. Owned by one event loop.

    Attributes:
        connection: Used by this object alone.
        is_open: Whether it can be asked; it stays closed once it failed.
    """

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        """Takes over a connection that does nothing, in autocommit mode: statements that are asked together are a transaction."""
        self.connection = connection
        self.is_open = True
        self._pgconn = connection.pgconn
        self._transactions: deque[_Transaction] = deque()
        self._types = Transformer(connection)
        self._loop = asyncio.get_running_loop()
        self._pgconn.enter_pipeline_mode()
        # A duplicate, which this object closes: libpq closes its own socket when a connection is lost, and the event loop would
        # go on watching a number that is another file's by then.
        self._socket = socket.socket(fileno=os.dup(self._pgconn.socket))
        self._loop.add_reader(self._socket, self._read)

    @property
    def num_asked(self) -> int:
        """How many transactions are on their way."""
        return len(self._transactions)

    @property
    def waits_s(self) -> float:
        """For how long the first of these has been on its way; 0 where there is none."""
        return time.monotonic() - self._transactions[0].asked_s if self._transactions else 0.0

    async def prepare(self, *statements: Statement) -> None:
        """Prepares statements.

        Raises:
            psycopg.Error: What the database says; or the connection failed.
        """

        def send() -> None:
            for one in statements:
                self._pgconn.send_prepare(one.name.encode(), one.sql.encode())

        await self._run(send)

    async def ask(self, *steps: tuple[Statement, Sequence[bytes | None]]) -> list[Rows]:
        """Runs prepared statements as one transaction; returns the rows of each.

        Args:
            steps: Statements with their parameters in Postgres's binary form: a text is its UTF-8.

        Raises:
            psycopg.Error: What the database says of the first statement that fails; or the connection failed.
        """

        def send() -> None:
            for statement, parameters in steps:
                self._pgconn.send_query_prepared(statement.name.encode(), parameters, [_BINARY] * len(parameters))

        return await self._run(send)

    async def close(self) -> None:
        """Closes the connection; who waits is told that it failed."""
        self._fail(psycopg.OperationalError("the connection was closed"))
        await self.connection.close()

    async def _run(self, send: Callable[[], object]) -> list[Rows]:
        if not self.is_open:
            raise psycopg.OperationalError("the connection is closed")
        transaction = _Transaction(self._loop.create_future())
        try:
            send()
            self._pgconn.pipeline_sync()
            if self._pgconn.flush():
                self._loop.add_writer(self._socket, self._write_on)
        except psycopg.Error as error:
            self._fail(error)
            raise
        self._transactions.append(transaction)
        return await transaction.answer

    def _write_on(self) -> None:
        try:
            is_left = self._pgconn.flush()
        except psycopg.Error as error:
            self._fail(error)
            return
        if not is_left:
            self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            self._pgconn.consume_input()
            is_end = False  # None ends the results of a statement; a second one says that there is nothing more for now
            while self._transactions and not self._pgconn.is_busy():
                result = self._pgconn.get_result()
                if result is not None:
                    self._take(self._transactions[0], result)
                elif is_end:
                    break
                is_end = result is None
            if self._pgconn.status != ConnStatus.OK:  # what came was no answer of a database: libpq gave the connection up
                raise psycopg.OperationalError("the connection was lost")
        except psycopg.Error as error:
            self._fail(error)

    def _take(self, transaction: _Transaction, result: PGresult) -> None:
        if result.status in _OF_ROWS:
            self._types.set_pgresult(result)
            transaction.rows.append(self._types.load_rows(0, result.ntuples, tuple))
        elif result.status == ExecStatus.PIPELINE_SYNC:
            self._transactions.popleft()
            if transaction.answer.done():
                return  # whoever asked went away
            if transaction.error is None:
                transaction.answer.set_result(transaction.rows)
            else:
                transaction.answer.set_exception(transaction.error)
        elif result.status != ExecStatus.PIPELINE_ABORTED:
            transaction.error = error_from_result(result)

    def _fail(self, error: psycopg.Error) -> None:
        if not self.is_open:
            return
        self.is_open = False
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        while self._transactions:
            answer = self._transactions.popleft().answer
            if not answer.done():
                answer.set_exception(error)
