"""What is known of each tenant, and the columns of it."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.engine.accounts import Account, Ledger
from dataplane.engine.sequence import Sequence
from tests.dataplane.engine.driving import submit


def opened(ledger: Ledger, count: int) -> list[Account]:
    return [Account(f"t{serial}", 1 + serial % 3, serial, ledger) for serial in range(count)]


def queue(account: Account, name: str) -> Sequence:
    """Puts a request in an account's line."""
    sequence = Sequence(submit(name, tenant=account.name), deadline=None, max_context=99)
    account.waiting.push(sequence)
    account.enter()
    return sequence


def test_charges_of_one_step_add_up_each_over_its_tenants_weight() -> None:
    ledger = Ledger()
    accounts = opened(ledger, 200)
    for account in accounts:
        account.enter()
    rows = [accounts[199].row, accounts[4].row, accounts[199].row]
    ledger.charge(np.array(rows), np.array([2.0, 3.0, 4.0]))
    assert {account.name: account.service for account in accounts if account.service} == {"t199": 3.0, "t4": 1.5}


def test_backlogged_tenants_come_by_service_and_equal_ones_as_they_were_opened() -> None:
    ledger = Ledger()
    first, second, third, idle, going = opened(ledger, 5)
    for account, service in ((first, 2.0), (second, 1.0), (third, 1.0), (idle, 0.0), (going, 0.5)):
        account.service = service
    for account in (first, second, third):
        queue(account, account.name)
    assert ledger.num_backlogged == 3
    assert list(ledger.fairest_first([going])) == [going, second, third, first]
    assert list(ledger.where(ledger.is_backlogged)) == [first, second, third]


def test_a_tenant_is_backlogged_as_long_as_something_of_it_waits_for_its_turn() -> None:
    ledger = Ledger()
    (account,) = opened(ledger, 1)
    sequence = queue(account, "a")
    account.waiting.remove(sequence)
    account.returning.append(sequence)
    account.enter()
    assert list(ledger.where(ledger.is_backlogged)) == [account]
    account.returning.clear()
    account.running.append(sequence)
    account.enter()
    assert ledger.num_backlogged == 0
    assert ledger.num_running[account.row] == 1


@pytest.mark.parametrize("count", [1, 64, 300])
def test_a_row_that_was_closed_is_used_anew_from_nothing(count: int) -> None:
    ledger = Ledger()
    accounts = opened(ledger, count)
    old = accounts[-1]
    queue(old, "a")
    old.service, ledger.num_hungry[old.row] = 7.0, 3
    ledger.close(old)
    assert list(ledger.where(np.ones_like(ledger.is_backlogged))) == accounts[:-1]
    new = Account("new", 1, count, ledger)
    assert (new.row, new.service, ledger.num_hungry[new.row], ledger.num_backlogged) == (old.row, 0.0, 0, 0)
