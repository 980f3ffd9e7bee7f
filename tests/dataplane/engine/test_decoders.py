"""Rows of sequences that decode, in columns."""

from __future__ import annotations

from typing import Any

import pytest

from dataplane.engine.accounts import Account, Ledger
from dataplane.engine.decoders import NAME_AFTER, Decoders
from dataplane.engine.limits import Prices
from dataplane.engine.messages import Sampling, Submit
from dataplane.engine.sequence import Sequence
from dataplane.lora.holdings import Lease
from tests.dataplane.engine.driving import limits

PAGE = 4
LEDGER = Ledger()


def sequence(seat: int, *, computed: int, slot: int = -1, max_tokens: int = 20, **fields: Any) -> Sequence:
    """A sequence whose prompt of `computed` tokens is planned."""
    sampling = Sampling(max_tokens=max_tokens, **fields)
    submit = Submit(request_id=f"s{seat}", tenant="t", prompt=(1,) * computed, sampling=sampling)
    made = Sequence(submit, deadline=None, max_context=99)
    made.seat, made.order, made.num_scheduled = seat, seat, computed
    made.pages = [100 * seat + i for i in range(-(-computed // PAGE))]
    made.account = Account("t", 2, seat, LEDGER)
    made.account.enter()
    if slot >= 0:
        made.lease, made.rank_rows = Lease(seat, f"v{slot}", slot, 16, 1), 16
    return made


def never(_sequence: Sequence) -> int | None:
    raise AssertionError("no row needs a page")


def test_rows_are_ordered_by_slot_and_positions_advance() -> None:
    decoders = Decoders(limits(), LEDGER, page_size=PAGE)
    members = [sequence(0, computed=5, slot=2), sequence(1, computed=6), sequence(3, computed=7, slot=1)]
    for member in members:
        decoders.add(member)
    rows, sequences = decoders.plan(never)
    assert sequences == [members[1], members[2], members[0]]
    assert rows.picks.seats.tolist() == [1, 3, 0]
    assert rows.slots.tolist() == [-1, 1, 2]
    assert rows.starts.tolist() == [6, 7, 5]
    assert rows.picks.sample_indexes.tolist() == [1, 1, 1]
    decoders.remove(members[0])
    decoders.remove(members[0])
    assert (members[0].num_scheduled, members[0].num_charged) == (6, 6)
    assert decoders.plan(lambda member: 40 + member.seat)[1] == [members[1], members[2]]


def test_a_row_that_fills_a_new_page_gets_it_and_who_has_none_stands_back() -> None:
    decoders = Decoders(limits(), LEDGER, page_size=PAGE)
    lucky, poor, roomy = sequence(0, computed=4), sequence(1, computed=8), sequence(2, computed=7)
    for member in (lucky, poor, roomy):
        decoders.add(member)
    asked: list[Sequence] = []

    def grow(member: Sequence) -> int | None:
        asked.append(member)
        return None if member is poor else 77

    rows, sequences = decoders.plan(grow)
    assert asked == [lucky, poor]
    assert sequences == [lucky, roomy]
    assert rows.new_pages == ((0, 1, 77),)
    rows, sequences = decoders.plan(lambda _: 78)
    assert sequences == [lucky, poor, roomy]
    assert rows.new_pages == ((1, 2, 78), (2, 2, 78))
    assert rows.starts.tolist() == [5, 8, 8]


def test_who_gives_way_to_an_older_one_has_no_row_and_no_page() -> None:
    decoders = Decoders(limits(), LEDGER, page_size=PAGE)
    old, new = sequence(1, computed=4), sequence(0, computed=4)
    old.order, new.order = 0, 1
    decoders.add(old)
    decoders.add(new)

    def grow(member: Sequence) -> int | None:
        assert member is old
        decoders.remove(new)
        new.seat = -1
        return 9

    rows, sequences = decoders.plan(grow)
    assert sequences == [old]
    assert rows.new_pages == ((1, 1, 9),)


def test_no_row_is_planned_past_the_last_token() -> None:
    decoders = Decoders(limits(), LEDGER, page_size=PAGE)
    member = sequence(0, computed=5, max_tokens=3)
    decoders.add(member)
    assert decoders.append(decoders.plan(never)[0], [1]) == {}
    assert decoders.append(decoders.plan(never)[0], [2]) == {0: "length"}
    assert member.tokens[-2:] == [1, 2]
    assert decoders.plan(never)[1] == []
    single = sequence(1, computed=5, max_tokens=1)
    decoders.add(single)
    assert decoders.plan(never)[1] == []


def test_tokens_go_to_their_sequences_even_to_those_that_left_meanwhile() -> None:
    decoders = Decoders(limits(), LEDGER, page_size=PAGE)
    stopping, leaving = sequence(0, computed=5, stop_token_ids=(8, 9)), sequence(1, computed=6, stop_token_ids=(7,))
    decoders.add(stopping)
    decoders.add(leaving)
    rows = decoders.plan(never)[0]
    decoders.remove(leaving)
    assert decoders.append(rows, [9, 8]) == {0: "stop"}
    assert (stopping.tokens[5:], leaving.tokens[6:]) == ([9], [8])
    assert (decoders.request_ids(rows), decoders.prompt_tokens(rows)) == (["s0", "s1"], [5, 6])


def test_rows_that_fill_pages_to_be_named_are_found() -> None:
    decoders = Decoders(limits(), LEDGER, page_size=PAGE)
    for seat, computed in enumerate((PAGE - 1, NAME_AFTER * PAGE - 1, NAME_AFTER * PAGE)):
        decoders.add(sequence(seat, computed=computed))
    assert decoders.filling_pages(decoders.plan(lambda _: 50)[0]) == [1]


def test_rank_rows_are_charged_once_for_all_that_share_them() -> None:
    prices = Prices(decode_token=2.0, rank_row=0.5)
    decoders = Decoders(limits(prices=prices), LEDGER, page_size=PAGE)
    members = [sequence(0, computed=5), sequence(1, computed=5, slot=0), sequence(2, computed=5, slot=0)]
    for member in members:
        decoders.add(member)
    assert decoders.charge(decoders.plan(never)[0]) == pytest.approx(3 * 2 + 16 * 0.5)
    assert [member.account.service for member in members] == [1.0, 3.0, 3.0]


def test_what_is_not_plain_is_named_with_its_rules() -> None:
    decoders = Decoders(limits(), LEDGER, page_size=PAGE)
    plain, biased = sequence(0, computed=5), sequence(1, computed=6, logit_bias=((3, 1.0),))
    decoders.add(plain)
    decoders.add(biased)
    picks = decoders.plan(never)[0].picks
    assert list(picks.special) == [1]
    assert picks.special[1][:3] == (1, biased.submit.sampling, 1)
    assert picks.settings == [plain.submit.sampling, biased.submit.sampling]
