"""A journal keeps every record that was added, and nothing of a line that was torn."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataplane import journal as journals
from dataplane.journal import Journal
from dataplane.usage import Use, UseCounts, UseKey, summed


def use(number: int, *, status: str = "OK", unix_s: int = 3600) -> Use:
    return Use("acme", "acme", "bot", "a" * 64, "ab" * 32, status, unix_s, number, 1, 2)


def test_records_come_back_in_order_and_in_parts(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for number in range(5):
        journal.add(use(number))
    journal.sync()
    first, end = journals.read(journal.path, 0, max_records=3)
    rest, end = journals.read(journal.path, end, max_records=3)
    assert [one.prompt_tokens for one in first + rest] == [0, 1, 2, 3, 4]
    assert end == journal.size_bytes
    assert journals.read(journal.path, end, max_records=3) == ([], end)
    journal.close()


@pytest.mark.parametrize("torn", [b"0", b"00000000 [", b"00000000 [1]\n", b"\xff\x00" * 40 + b"\n"])
def test_a_torn_line_is_no_record_and_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    journal = Journal(tmp_path)
    journal.add(use(1))
    journal.close()
    with journal.path.open("ab") as file:
        file.write(torn)
    uses, end = journals.read(journal.path, 0, max_records=10)
    assert uses == [use(1)]
    assert journals.cut_tail(journal.path, end) == len(torn)
    assert journal.path.stat().st_size == end


def test_every_cut_of_a_journal_leaves_whole_records(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for number in range(3):
        journal.add(use(number))
    journal.close()
    whole = journal.path.read_bytes()
    for length in range(len(whole) + 1):
        journal.path.write_bytes(whole[:length])
        uses, end = journals.read(journal.path, 0, max_records=10)
        assert uses == [use(number) for number in range(whole[:length].count(b"\n"))]
        assert end == sum(len(line) for line in whole.splitlines(keepends=True)[: len(uses)])


def test_only_journals_that_nobody_writes_are_left_behind(tmp_path: Path) -> None:
    journal, other = Journal(tmp_path), Journal(tmp_path)
    assert journals.left_behind(tmp_path) == []
    other.close()
    assert journals.left_behind(tmp_path) == [other.path]
    journals.set_aside(other.path)
    assert journals.left_behind(tmp_path) == []
    journal.close()


def test_uses_are_summed_by_version_and_hour() -> None:
    sums = summed([use(5), use(6, status="CANCELLED", unix_s=7199), use(7, unix_s=7200)])
    key = UseKey("acme", "acme", "bot", "a" * 64, "ab" * 32, 3600)
    assert sums == {key: UseCounts(2, 1, 11, 2, 4), key._replace(hour=7200): UseCounts(1, 0, 7, 1, 2)}
