"""Every request is in a journal that is open: in one that still takes requests when it begins, and in that one when it ends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from dataplane import journal as journals
from dataplane import usage_reports
from dataplane.usage import UseCounts, UseKey
from dataplane.usage_reports import UsageReporter
from tests.dataplane.test_journal import use
from veneer.errors import InternalError, InvalidArgumentError, UnavailableError, VeneerError


async def test_a_request_that_waits_while_a_journal_grows_large_is_noted_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, taken, lost = UseCounts(), dict[str, int](), list[None]()

    async def report(journal: str, first: int, last: int, uses: Mapping[UseKey, UseCounts], /, *, is_over: bool = False) -> int:
        nonlocal counts
        if not is_over and first == taken.get(journal, 0) + 1:
            counts = UseCounts(*(sum(numbers) for numbers in zip(counts, *uses.values(), strict=True)))
            taken[journal] = last
        return taken.get(journal, 0)

    monkeypatch.setattr(usage_reports, "_MAX_BYTES", 0)
    reporter = UsageReporter(tmp_path, report, on_lost=lambda: lost.append(None))
    running, waiting, refused = (reporter.entry() for _ in range(3))
    running.tell(use(1, status="UNAVAILABLE"))
    reporter.add(use(2))
    await reporter.send()
    running.end(use(3))
    await reporter.send()  # nobody waits for the first journal any more
    waiting.tell(use(4, status="UNAVAILABLE"))
    await reporter.send()
    waiting.end(use(5))
    refused.end(use(6))
    await reporter.send()
    await reporter.close()
    assert (counts.requests, counts.prompt_tokens, lost) == (4, 2 + 3 + 5 + 6, [])


async def test_a_ledger_that_was_set_back_is_told_again_of_what_it_forgot(tmp_path: Path) -> None:
    taken, counted = 0, list[int]()

    async def report(journal: str, first: int, last: int, uses: Mapping[UseKey, UseCounts], /, *, is_over: bool = False) -> int:
        nonlocal taken
        if first == taken + 1:
            taken = last
            counted.append(sum(one.prompt_tokens for one in uses.values()))
        return taken

    reporter = UsageReporter(tmp_path, report)
    for number in (1, 2, 4):
        reporter.add(use(number))
        await reporter.send()
    taken, counted = 1, [1]  # a copy of the database from before
    reporter.add(use(8))
    with pytest.raises(OSError, match="knows 1 records of a journal that was sent to 3"):
        await reporter.send()
    await reporter.send()
    await reporter.close()
    assert (sum(counted), taken) == (1 + 2 + 4 + 8, 4)


def _left(folder: Path, *, requests: int) -> str:
    """A journal that an earlier process left; returns its name."""
    earlier = UsageReporter(folder, _unasked)
    for _ in range(requests):
        earlier.add(use(1))
    earlier.journal.close()
    return journals.name_of(earlier.journal.path)


async def _unasked(*_: object, is_over: bool = False) -> int:
    raise AssertionError("nothing is sent")


@pytest.mark.parametrize(
    ("refusal", "num_held"),
    [(InvalidArgumentError("a name of old"), 1), (InternalError("a constraint was violated"), 1), (UnavailableError("away"), 0)],
)
async def test_a_journal_that_is_refused_holds_up_no_other_is_told_of_and_stays_until_it_is_taken(
    refusal: VeneerError, num_held: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [_left(tmp_path, requests=number) for number in (1, 2, 3)]
    taken, held, is_refused = dict[str, int](), list[int](), True

    async def report(journal: str, first: int, last: int, uses: Mapping[UseKey, UseCounts], /, *, is_over: bool = False) -> int:
        if journal == names[1] and is_refused:
            raise refusal
        if not is_over and first == taken.get(journal, 0) + 1:
            taken[journal] = last
        return taken.get(journal, 0)

    reporter = UsageReporter(tmp_path, report, on_held=held.append)
    reporter.add(use(1))
    with pytest.raises(type(refusal)):
        await reporter.send()
    running = journals.name_of(reporter.journal.path)
    assert taken == {names[0]: 1, names[2]: 3, running: 1}
    assert held == [num_held]
    told = [(record.__dict__["journal"], record.__dict__["detail"]) for record in caplog.records if record.levelname == "ERROR"]
    assert told == [(names[1], str(refusal))] * num_held
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.journal" for name in (names[1], running)}

    is_refused = False
    reporter.add(use(1))
    await reporter.send()
    assert (taken[running], names[1] in taken) == (2, not num_held)  # what is held is not tried at every look
    reporter._held = dict.fromkeys(reporter._held, 0.0)  # a minute later
    await reporter.send()
    assert (taken[names[1]], held[-1]) == (2, 0)
    await reporter.close()


async def test_a_journal_that_is_over_for_the_control_plane_is_held_and_not_lost(tmp_path: Path) -> None:
    name, held = _left(tmp_path, requests=2), list[int]()

    async def report(journal: str, first: int, last: int, uses: Mapping[UseKey, UseCounts], /, *, is_over: bool = False) -> int:
        return 0 if journal == name else last

    reporter = UsageReporter(tmp_path, report, on_held=held.append)
    with pytest.raises(OSError, match="knows 0 records of a journal that was sent to 0"):
        await reporter.send()
    await reporter.send()
    assert held == [1, 1]
    assert (tmp_path / f"{name}.journal").exists()
    await reporter.close()
