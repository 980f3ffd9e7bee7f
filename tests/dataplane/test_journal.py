"""A journal keeps every record that was added, and nothing of a line that was torn."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import zlib
from pathlib import Path

import pytest

from dataplane import journal as journals
from dataplane.journal import Entry, Journal
from dataplane.usage import Use, UseCounts, UseKey, summed
from tests.fixtures.descriptors import num_open_files


def use(number: int, *, status: str = "OK", unix_s: int = 3600) -> Use:
    return Use("acme", "acme", "bot", "a" * 64, "ab" * 32, status, unix_s, number, 1, 2)


def test_records_come_back_in_order_and_in_parts(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for number in range(5):
        journal.add(use(number))
    journal.sync()
    first, end = journals.read(journal.path, 0, max_records=3)
    rest, end = journals.read(journal.path, end, max_records=3)
    assert [line.use for line in first + rest] == [use(number) for number in range(5)]
    assert end == journal.size_bytes
    assert journals.read(journal.path, end, max_records=3) == ([], end)
    journal.close()


@pytest.mark.parametrize("torn", [b"0", b"00000000 [", b"00000000 [1]\n", b"\xff\x00" * 40 + b"\n"])
def test_a_torn_line_is_no_record(tmp_path: Path, torn: bytes) -> None:
    journal = Journal(tmp_path)
    journal.add(use(1))
    journal.close()
    with journal.path.open("ab") as file:
        file.write(torn)
    (line,), end = journals.read(journal.path, 0, max_records=10)
    assert line.use == use(1)
    assert journals.rest(journal.path, end) == torn


@pytest.mark.parametrize("odd", [b"\n", b"00000000 [1]\n", b"\xff\n\x00\n", b"%08x [1]\n" % zlib.crc32(b"[1]")])
def test_a_line_that_does_not_read_keeps_its_number_and_hides_none_behind_it(tmp_path: Path, odd: bytes) -> None:
    journal = Journal(tmp_path)
    journal.add(use(1))
    with journal.path.open("ab") as file:
        file.write(odd)
    assert len(journals.read(journal.path, 0, max_records=10)[0]) == 1  # it may be torn: nothing says yet that more comes
    journal.add(use(2))
    journal.close()
    lines, end = journals.read(journal.path, 0, max_records=10)
    assert [line.use for line in lines] == [use(1), *[None] * odd.count(b"\n"), use(2)]
    assert b"".join(line.raw for line in lines) == journal.path.read_bytes()
    assert journals.rest(journal.path, end) == b""
    first, end = journals.read(journal.path, 0, max_records=2)
    assert first + journals.read(journal.path, end, max_records=2)[0] == lines


def test_every_cut_of_a_journal_leaves_whole_records(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for number in range(3):
        journal.add(use(number))
    journal.close()
    whole = journal.path.read_bytes()
    for length in range(len(whole) + 1):
        journal.path.write_bytes(whole[:length])
        lines, end = journals.read(journal.path, 0, max_records=10)
        assert [line.use for line in lines] == [use(number) for number in range(whole[:length].count(b"\n"))]
        assert end == sum(len(line) for line in whole.splitlines(keepends=True)[: len(lines)])


def test_what_a_request_told_counts_where_its_end_is_missing(tmp_path: Path) -> None:
    journal, lost = Journal(tmp_path), list[int]()
    entries = [Entry(lambda: journal, lambda use, _: lost.append(use.prompt_tokens)) for _ in range(4)]
    for number, entry in enumerate(entries[:3]):
        entry.tell(use(number, status="UNAVAILABLE"))
    entries[1].end(use(11))
    entries[3].end(use(13))  # it never ran
    entries[2].tell(use(22, status="UNAVAILABLE"))
    assert journal.is_awaited
    lines, end = journals.read(journal.path, 0, max_records=10)
    assert (len(lines), end) == (6, journal.size_bytes)
    assert [line.counted for line in lines if line.counted is not None] == [use(11), use(13)]
    unended = [use(0, status="UNAVAILABLE"), use(22, status="UNAVAILABLE")]
    with journal.path.open("ab") as file:
        file.write(b"0123")  # the end of the third one, torn
    for _ in range(2):
        assert [line.counted for line in journals.unended(journal.path)] == unended
    journal.close()
    for entry in entries[:2]:
        entry.tell(use(5))
    entries[2].end(use(6))
    assert lost == [6]


def test_a_journal_waits_for_the_requests_that_told_it_something(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    first, second, third = (Entry(lambda: journal, lambda *_: None) for _ in range(3))
    assert not journal.is_awaited
    for entry in (first, second, second):
        entry.tell(use(1))
    third.end(use(1))
    for entry in (first, second):
        assert journal.is_awaited
        entry.end(use(1))
    assert not journal.is_awaited
    assert journals.unended(journal.path) == []
    journal.close()


def test_only_journals_that_nobody_writes_are_left_behind(tmp_path: Path) -> None:
    journal, other = Journal(tmp_path), Journal(tmp_path)
    assert journals.left_behind(tmp_path) == []
    other.close()
    assert journals.left_behind(tmp_path) == [other.path]
    for _ in range(2):
        journals.set_aside(other.path, 7, [b"one\n", b"two\n"])
    other.path.unlink()
    assert journals.left_behind(tmp_path) == []
    assert [path.read_bytes() for path in tmp_path.glob("*.refused")] == [b"one\ntwo\n"]
    journal.close()


def test_uses_are_summed_by_version_and_hour() -> None:
    sums = summed([use(5), use(6, status="CANCELLED", unix_s=7199), use(7, unix_s=7200)])
    key = UseKey("acme", "acme", "bot", "a" * 64, "ab" * 32, 3600)
    assert sums == {key: UseCounts(2, 1, 11, 2, 4), key._replace(hour=7200): UseCounts(1, 0, 7, 1, 2)}


def test_a_journal_that_is_being_made_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, seen = fcntl.flock, list[list[Path]]()

    def locked(file: int, operation: int) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "flock", lock)
            seen.append(journals.left_behind(tmp_path))  # as another process would see it
        lock(file, operation)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", locked)
        journal = Journal(tmp_path)
    assert seen == [[]]
    assert list(tmp_path.iterdir()) == [journal.path]
    journal.close()


def test_what_processes_left_that_ended_while_they_made_a_journal_is_swept_away(tmp_path: Path) -> None:
    (tmp_path / "dead.made").touch()
    with (tmp_path / "alive.made").open("w") as being_made:
        fcntl.flock(being_made, fcntl.LOCK_EX)
        journal = Journal(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"alive.made", journal.path.name}
    journal.close()


def test_a_journal_that_is_swept_away_before_it_is_locked_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, others = fcntl.flock, list[Journal]()

    def locked(file: int, operation: int) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "flock", lock)
            others.extend([Journal(tmp_path)] if not others else [])  # another process begins
        lock(file, operation)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", locked)
        journal = Journal(tmp_path)
    assert {*tmp_path.iterdir()} == {journal.path, others[0].path}
    assert journals.left_behind(tmp_path) == []
    journal.add(use(1))
    assert journals.read(journal.path, 0, max_records=9)[0]
    for one in (journal, *others):
        one.close()


def test_a_journal_that_is_closed_takes_nothing_and_closes_nothing_of_others(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.add(use(1))
    journal.close()
    with (tmp_path / "another").open("xb") as other:  # has the journal's number by now
        journal.close()
        journal.sync()
        with pytest.raises(OSError, match="closed"):
            journal.add(use(2))
        other.write(b"its own")
    assert (tmp_path / "another").read_bytes() == b"its own"


def test_a_journal_is_not_closed_while_another_thread_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    begun, go, valid = threading.Event(), threading.Event(), list[bool]()

    def wait(descriptor: int) -> None:
        begun.set()
        go.wait(30)
        valid.append(os.fstat(descriptor).st_ino == journal.path.stat().st_ino)

    monkeypatch.setattr(os, "fsync", wait)
    syncing = threading.Thread(target=journal.sync)
    syncing.start()
    begun.wait(30)
    closing = threading.Thread(target=journal.close)
    closing.start()
    go.set()
    syncing.join()
    closing.join()
    assert valid == [True]


def test_a_journal_that_cannot_be_locked_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    Journal(tmp_path).close()
    monkeypatch.setattr(fcntl, "flock", refuse)
    before = num_open_files()
    with pytest.raises(OSError, match="no locks"):
        Journal(tmp_path)
    assert num_open_files() <= before
