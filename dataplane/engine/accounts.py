"""What is known of each tenant; what every step compares lies in columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from dataplane.engine.line import Line
from dataplane.engine.plan import Integers
from dataplane.engine.sequence import Lack, Sequence

_NUM_ROWS = 64


class Account:
    """One tenant. Changed by `Tenants` and the scheduler only.

    Attributes:
        name: The tenant.
        weight: Its share relative to others.
        serial: Its place among all accounts by when they were opened.
        row: Its row of the ledger.
        waiting: Requests that have not run, by priority and then first come first.
        returning: Preempted requests, oldest first; they come before those that wait.
        running: Requests that hold a seat, oldest first.
        unfinished: Running requests whose prompt is not planned to its end.
        num_parked: Requests that wait but are not in line: their adapter is loading, or they were preempted and their reader is
            slow.
        num_queued_tokens: Prompt tokens of all its requests that wait.
        is_active: Whether it counts: something of it runs or could.
        lacks: What the first of its requests that was passed over in the last step lacked; its budget only where none lacked
            anything else.
        is_shut: It starts nothing more in this step.
        max_rank_rows: Rank rows that the adapters of its running requests may have; 0 for no limit.
        max_arena_bytes: Bytes of the arena that copies charged to it may take; 0 for no limit.
    """

    __slots__ = (
        "_ledger",
        "in_heap",
        "is_active",
        "is_shut",
        "lacks",
        "max_arena_bytes",
        "max_rank_rows",
        "name",
        "num_parked",
        "num_queued_tokens",
        "returning",
        "row",
        "running",
        "serial",
        "unfinished",
        "waiting",
        "weight",
    )

    def __init__(self, name: str, weight: int, serial: int, ledger: Ledger) -> None:
        self.name = name
        self.weight = weight
        self.serial = serial
        self.waiting = Line()
        self.returning: list[Sequence] = []
        self.running: list[Sequence] = []
        self.unfinished: list[Sequence] = []
        self.num_parked = 0
        self.num_queued_tokens = 0
        self.is_active = False
        self.in_heap = False
        self.lacks: Lack | None = None
        self.is_shut = False
        self.max_rank_rows = self.max_arena_bytes = 0
        self._ledger = ledger
        self.row = ledger.open(self)

    @property
    def service(self) -> float:
        """Virtual service: cost of what it was served over its weight."""
        return float(self._ledger.service[self.row])

    @service.setter
    def service(self, service: float) -> None:
        self._ledger.service[self.row] = service

    @property
    def is_backlogged(self) -> bool:
        """Whether a request of it waits for nothing but its turn."""
        return bool(self.waiting or self.returning)

    def enter(self) -> None:
        """Brings the ledger up to date, after a change of weight or of who waits or runs."""
        ledger, row = self._ledger, self.row
        ledger.weight[row] = self.weight
        ledger.num_running[row] = len(self.running)
        ledger.is_backlogged[row] = self.is_backlogged


class Ledger:
    """Accounts in columns, a row each, so that a step charges and compares them with operations on whole arrays.

    Owned by `Tenants`. A row that no account has is neither backlogged nor hungry.

    Attributes:
        service: float64, what each was served; see `Account`.
        weight: int64, shares relative to others.
        num_running: int64, requests that hold a seat.
        num_hungry: int64, steps in a row in which a tenant waited although it holds less than its share; kept by `Relief`.
        is_backlogged: Whether a request waits for nothing but its turn.
    """

    def __init__(self) -> None:
        self._accounts: list[Account | None] = []
        self._free: list[int] = []
        self._serial = np.zeros(0, dtype=np.int64)
        self.service = np.zeros(0)
        self.weight = np.ones(0, dtype=np.int64)
        self.num_running = np.zeros(0, dtype=np.int64)
        self.num_hungry = np.zeros(0, dtype=np.int64)
        self.is_backlogged = np.zeros(0, dtype=np.bool_)

    @property
    def num_backlogged(self) -> int:
        """Tenants of which a request waits for nothing but its turn."""
        return int(np.count_nonzero(self.is_backlogged))

    def open(self, account: Account) -> int:
        """Returns a row for an account."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._accounts[row] = account
        self._serial[row] = account.serial
        self.service[row] = 0.0
        return row

    def close(self, account: Account) -> None:
        """Takes the row of an account back that nothing runs or waits for."""
        row = account.row
        self._accounts[row] = None
        self.num_running[row] = self.num_hungry[row] = self.is_backlogged[row] = 0
        self._free.append(row)

    def charge(self, rows: Integers, costs: npt.NDArray[np.float64]) -> None:
        """Adds costs to the service of the accounts of these rows, which may repeat."""
        np.add.at(self.service, rows, costs / self.weight[rows])

    def lift(self, accounts: Iterable[Account]) -> None:
        """Lifts accounts to the least service among all others that run or wait, if there are any: they bank no credit."""
        rows = np.fromiter((account.row for account in accounts), dtype=np.int64)
        is_other = self.is_backlogged | (self.num_running > 0)
        is_other[rows] = False
        if is_other.any():
            self.service[rows] = np.maximum(self.service[rows], self.service[is_other].min())

    def where(self, is_one: npt.NDArray[np.bool_]) -> Iterator[Account]:
        """Yields the accounts of the rows for which this holds, as they were opened."""
        rows = is_one.nonzero()[0]
        return self._at(rows[self._serial[rows].argsort()])

    def fairest_first(self, more: Iterable[Account]) -> Iterator[Account]:
        """Yields the backlogged accounts and some more, by what they were served; equal ones as they were opened."""
        is_one = self.is_backlogged.copy()
        is_one[[account.row for account in more]] = True
        rows = is_one.nonzero()[0]
        return self._at(rows[np.lexsort((self._serial[rows], self.service[rows]))])

    def _at(self, rows: Integers) -> Iterator[Account]:
        return (account for row in rows.tolist() if (account := self._accounts[row]) is not None)

    def _grow(self) -> None:
        size = len(self._accounts)
        more = max(_NUM_ROWS, size)
        self._accounts += [None] * more
        self._free += range(size + more - 1, size - 1, -1)
        self._serial = np.append(self._serial, np.zeros(more, dtype=np.int64))
        self.service = np.append(self.service, np.zeros(more))
        self.weight = np.append(self.weight, np.ones(more, dtype=np.int64))
        self.num_running = np.append(self.num_running, np.zeros(more, dtype=np.int64))
        self.num_hungry = np.append(self.num_hungry, np.zeros(more, dtype=np.int64))
        self.is_backlogged = np.append(self.is_backlogged, np.zeros(more, dtype=np.bool_))
