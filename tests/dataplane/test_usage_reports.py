"""Every request is in a journal that is open: in one that still takes requests when it begins, and in that one when it ends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from dataplane import usage_reports
from dataplane.usage import UseCounts, UseKey
from dataplane.usage_reports import UsageReporter
from tests.dataplane.test_journal import use


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
