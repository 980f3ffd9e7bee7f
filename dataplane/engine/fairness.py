"""Shares of tenants: what each was served, who comes next, and who holds more than its part. Integers and floats only."""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sized

from dataplane.engine.accounts import Account, Ledger
from dataplane.engine.sequence import Phase, Sequence

_PRUNE_ABOVE = 1024


class _Parked:
    """Requests that wait for one version, and the virtual time at which the first of them began to."""

    __slots__ = ("sequences", "since")

    def __init__(self, since: float) -> None:
        self.since = since
        self.sequences: OrderedDict[str, Sequence] = OrderedDict()


class Tenants:
    """All tenants that have requests, and those that owe. Owned by the scheduler.

    The tenant with the least virtual service goes first. A tenant that becomes eligible is lifted to the least service among
    the eligible ones, so that idling banks no credit. A tenant whose every request waits for a load is not eligible; when a load
    of it is done it is lifted to what was the least when that load was asked for: its credit is what one load cost it.

    Source: the virtual token counter (Sheng et al., Fairness in Serving Large Language Models, 2024), with other prices.

    Attributes:
        ledger: What of them is compared in every step; others charge there, and read.
        num_waiting: Requests that wait, in line or not.
        weights: Sum of the eligible tenants' weights.
    """

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._accounts: dict[str, Account] = {}
        self._going: set[Account] = set()
        self._heap: list[tuple[float, int, Account]] = []
        self._parked: dict[str, _Parked] = {}
        self._clock = 0.0
        self._num_accounts = 0
        self._num_active = 0
        self.weights = 0
        self._prune_above = _PRUNE_ABOVE
        self.num_waiting = 0

    @property
    def active(self) -> Iterator[Account]:
        """The eligible tenants."""
        return (account for account in self._accounts.values() if account.is_active)

    @property
    def parked_versions(self) -> Iterator[tuple[str, str]]:
        """Versions that requests wait for, first asked for first, and the tenant that did."""
        return ((version, next(iter(parked.sequences.values())).submit.tenant) for version, parked in self._parked.items())

    @property
    def num_loading(self) -> int:
        """Requests that wait for a load."""
        return sum(len(parked.sequences) for parked in self._parked.values())

    @property
    def num_aside(self) -> int:
        """Requests that wait but are not in line: those and preempted ones whose reader is slow."""
        return sum(account.num_parked for account in self._accounts.values())

    def queue_of(self, tenant: str) -> tuple[int, int]:
        """Returns how many requests of a tenant wait, for a load or for a turn, and how many prompt tokens they have."""
        account = self._accounts.get(tenant)
        if account is None:
            return 0, 0
        return len(account.waiting) + len(account.returning) + account.num_parked, account.num_queued_tokens

    def share(self, account: Account) -> float:
        """Returns the part of everything that an eligible tenant is entitled to."""
        return account.weight / (self.weights if account.is_active else self.weights + account.weight)

    def share_of(self, tenant: str, weight: int) -> float:
        """Returns the part that a tenant would be entitled to if it were eligible."""
        account = self._accounts.get(tenant)
        others = self.weights - (account.weight if account is not None and account.is_active else 0)
        return weight / (others + weight)

    def push(self, sequence: Sequence) -> None:
        """Takes a new request in."""
        submit = sequence.submit
        account = self._accounts.get(submit.tenant)
        if account is None:
            self._num_accounts += 1
            account = self._accounts[submit.tenant] = Account(submit.tenant, submit.weight, self._num_accounts, self.ledger)
        elif account.weight != submit.weight:
            self.weights += (submit.weight - account.weight) * account.is_active
            account.weight = submit.weight
        account.max_rank_rows, account.max_arena_bytes = submit.max_rank_rows, submit.max_arena_bytes
        sequence.account = account
        account.waiting.push(sequence)
        account.num_queued_tokens += len(submit.prompt)
        self.num_waiting += 1
        self._activate(account, None)

    def charge(self, tenant: str, cost: float) -> None:
        """Adds a cost to what a tenant was served, if it has requests."""
        account = self._accounts.get(tenant)
        if account is not None:
            account.service += cost / account.weight

    def start(self, sequence: Sequence) -> None:
        """Notes that a waiting request runs now; its prompt is not planned to its end yet."""
        account = sequence.account
        self._take_out(sequence)
        bisect.insort(account.running, sequence, key=_order)
        account.unfinished.append(sequence)
        self._going.add(account)
        account.enter()

    def stop(self, sequence: Sequence, *, returns: bool) -> None:
        """Notes that a request runs no more; a preempted one waits again, before all others that have not run."""
        account = sequence.account
        account.running.remove(sequence)
        if sequence in account.unfinished:
            account.unfinished.remove(sequence)
        if returns:
            if sequence.paused:
                account.num_parked += 1
            elif sequence.order < 0:
                account.waiting.push(sequence, front=True)
            else:
                bisect.insort(account.returning, sequence, key=_order)
            account.num_queued_tokens += len(sequence.submit.prompt)
            self.num_waiting += 1
        self._settle(account)

    def discard(self, sequence: Sequence) -> None:
        """Takes a request out that waits, wherever it stands."""
        self._take_out(sequence)
        self._settle(sequence.account)

    def pause(self, sequence: Sequence) -> None:
        """Takes a request that ran before, and whose reader is slow, out of line; it keeps the seat that it may have."""
        account = sequence.account
        if sequence in account.unfinished:
            account.unfinished.remove(sequence)
        elif sequence.is_parked:
            self._take_from_parked(sequence)
        elif sequence.phase is Phase.WAITING:
            account.returning.remove(sequence)
            account.num_parked += 1
            self._settle(account)

    def resume(self, sequence: Sequence) -> None:
        """Puts it back in line."""
        account = sequence.account
        if sequence.is_unfinished:
            account.unfinished.append(sequence)
            self._going.add(account)
        elif sequence.phase is Phase.WAITING:
            account.num_parked -= 1
            bisect.insort(account.returning, sequence, key=_order)
            self._activate(account, None)

    def park(self, sequence: Sequence) -> None:
        """Puts a waiting request aside until its version is loaded."""
        version, account = sequence.submit.version, sequence.account
        assert version is not None, "the base is always there"
        parked = self._parked.get(version)
        if parked is None:
            parked = self._parked[version] = _Parked(self.least())
        if sequence.order < 0:
            account.waiting.remove(sequence)
        else:
            account.returning.remove(sequence)
        parked.sequences[sequence.submit.request_id] = sequence
        account.num_parked += 1
        sequence.is_parked = True
        self._settle(account)

    def unpark(self, version: str) -> Account | None:
        """Lets the requests that wait for a version be tried again; returns the tenant that asked for it first."""
        parked = self._parked.pop(version, None)
        if parked is None:
            return None
        for sequence in reversed(parked.sequences.values()):
            account = sequence.account
            sequence.is_parked = False
            account.num_parked -= 1
            if sequence.order < 0:
                account.waiting.push(sequence, front=True)
            else:
                bisect.insort(account.returning, sequence, key=_order)
            self._activate(account, parked.since)
        return next(iter(parked.sequences.values())).account

    def least(self) -> float:
        """Returns the least virtual service among the eligible tenants; without one, that of the tenant that left last."""
        heap = self._heap
        while heap:
            service, serial, account = heap[0]
            if not account.is_active:
                heapq.heappop(heap)
                account.in_heap = False
            elif account.service != service:
                heapq.heapreplace(heap, (account.service, serial, account))
            else:
                return service
        return self._clock

    def in_order(self, seats: Sized, *, max_scan: int) -> Iterator[Sequence]:
        """Yields prompts to go on with, fairest first: unfinished ones, and waiting ones while there are seats.

        While others wait, a tenant that has an unfinished prompt starts no other, and one that is shut starts none. The caller
        charges, starts, parks or passes over what was just yielded, and changes nothing else; who is passed over is paid for in
        this call's order only.
        """
        ledger = self.ledger
        self._going = {account for account in self._going if account.unfinished}
        going = sorted(self._going, key=_place)
        had_seats = bool(seats)
        later = ledger.fairest_first(going) if had_seats and self.num_waiting else iter(going)
        heap: list[tuple[float, int, Account, float]] = []  # those that were looked at, and the first of the others
        num_backlogged, num_done = 0, 0
        lines: dict[str, Iterator[Sequence]] = {}
        num_new = 0
        _push_next(heap, later)
        while heap:
            if had_seats and not seats:  # nobody starts any more: all tenants but those that go on are done with
                had_seats = False
                heap = [entry for entry in heap if entry[2].unfinished and entry[2].name in lines]
                heapq.heapify(heap)
                later = (account for account in going if account.name not in lines)
                _push_next(heap, later)
                continue
            _, serial, account, debt = heap[0]
            line = lines.get(account.name)
            if line is None:
                line = lines[account.name] = _ahead(account)
                _push_next(heap, later)
            sequence = next(line, None)
            if sequence is None:
                heapq.heappop(heap)
                num_done += account.is_backlogged
                continue
            is_new = sequence.phase is Phase.WAITING
            num_new += is_new
            if is_new and account.unfinished and not num_backlogged:
                num_backlogged = ledger.num_backlogged - num_done
            if is_new and (not seats or num_new > max_scan or (account.unfinished and num_backlogged > 1)):
                heapq.heappop(heap)
                num_done += account.is_backlogged
                continue
            yield sequence
            if account.is_shut and is_new:
                heapq.heappop(heap)
                num_done += account.is_backlogged
                continue
            if is_new and sequence.phase is Phase.WAITING:
                debt += len(sequence.tokens) / account.weight
            heapq.heapreplace(heap, (account.service + debt, serial, account, debt))

    def _activate(self, account: Account, floor: float | None) -> None:
        account.enter()
        if account.is_active:
            return
        account.service = max(account.service, self.least() if floor is None else floor)
        account.is_active = True
        self.ledger.num_hungry[account.row] = 0
        self._num_active += 1
        self.weights += account.weight
        if not account.in_heap:
            account.in_heap = True
            heapq.heappush(self._heap, (account.service, account.serial, account))

    def _settle(self, account: Account) -> None:
        """Ends a tenant's eligibility when nothing of it runs or could, and forgets it when nothing of it is left to know."""
        account.enter()
        if account.running or account.waiting or account.returning:
            return
        if account.is_active:
            account.is_active = False
            self._num_active -= 1
            self.weights -= account.weight
            if not self._num_active:
                self._clock = account.service
        if not account.num_parked and account.service <= self.least():
            self._forget(account)
        elif len(self._accounts) > self._prune_above:
            self._prune()

    def _prune(self) -> None:
        """Forgets the half that owes least of the tenants that have no request."""
        idle = sorted(
            (other for other in self._accounts.values() if not other.is_active and not other.num_parked),
            key=lambda other: other.service,
        )
        for account in idle[: (len(idle) + 1) // 2]:
            self._forget(account)
        self._prune_above = max(_PRUNE_ABOVE, 2 * len(self._accounts))

    def _forget(self, account: Account) -> None:
        if self._accounts.pop(account.name, None) is account:
            self.ledger.close(account)

    def _take_out(self, sequence: Sequence) -> None:
        account = sequence.account
        self.num_waiting -= 1
        account.num_queued_tokens -= len(sequence.submit.prompt)
        if sequence.is_parked:
            self._take_from_parked(sequence)
            account.num_parked -= 1
        elif sequence in account.waiting:
            account.waiting.remove(sequence)
        elif sequence.paused:
            account.num_parked -= 1
        else:
            account.returning.remove(sequence)

    def _take_from_parked(self, sequence: Sequence) -> None:
        version = sequence.submit.version
        assert version is not None, "the base is always there"
        parked = self._parked[version].sequences
        del parked[sequence.submit.request_id]
        if not parked:
            del self._parked[version]
        sequence.is_parked = False


def _push_next(heap: list[tuple[float, int, Account, float]], accounts: Iterator[Account]) -> None:
    """Puts the next account on a heap, if there is one."""
    account = next(accounts, None)
    if account is not None:
        heapq.heappush(heap, (account.service, account.serial, account, 0.0))


def _place(account: Account) -> tuple[float, int]:
    return account.service, account.serial


def _order(sequence: Sequence) -> int:
    return sequence.order


def _ahead(account: Account) -> Iterator[Sequence]:
    """Yields the prompts of a tenant in order; those that wait are looked at a few at a time, for they are many and lie cold.

    While it runs, nothing changes but that what it yielded may leave the line.
    """
    yield from tuple(account.unfinished)
    yield from tuple(account.returning)
    num_passed, size = 0, 1
    while batch := tuple(itertools.islice(account.waiting, num_passed, num_passed + size)):
        yield from batch
        num_passed += sum(sequence.phase is Phase.WAITING and not sequence.is_parked for sequence in batch)
        size = min(2 * size, 64)
