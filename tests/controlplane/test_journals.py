"""The ledger counts each record of a journal once, though answers are lost and processes are killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from dataplane import journal as journals
from dataplane import usage_reports
from dataplane.usage import UseCounts, UseKey, summed
from dataplane.usage_reports import UsageReporter
from tests.controlplane.using import listed, node_client, use_of
from tests.fixtures.controlplane import BASE_DIGEST, World
from veneer.errors import UnavailableError

ROOT = Path(__file__).resolve().parents[2]

CHILD = """
import asyncio, sys
from pathlib import Path
from dataplane.catalog_client import CatalogClient, open_channel
from dataplane.usage import Use
from dataplane.usage_reports import UsageReporter

async def main(address, base, secret, folder, use):
    async with open_channel(address, ca_pem=None) as channel:
        client = CatalogClient(channel, base_digest=base, timeout_s=60)
        client._secret = secret
        reporter = UsageReporter(Path(folder), client.reports.usage, interval_s=0)
        sending = asyncio.create_task(reporter.run())
        told = Use(*use[:6], *map(int, use[6:]))._replace(status="UNAVAILABLE")
        while True:
            entry = reporter.entry()
            entry.tell(told)
            await asyncio.sleep(0)
            entry.end(told._replace(status="OK"))
            print("noted", flush=True)

address, base, secret, folder, *use = sys.argv[1:]
asyncio.run(main(address, base, secret, folder, use))
"""


async def test_lost_answers_and_a_control_plane_that_is_away_lose_and_double_nothing(world: World, tmp_path: Path) -> None:
    await world.base()
    acme, node = await world.tenant("acme"), await world.node()
    await world.publish(acme)
    async with node_client(world, node) as client:
        use = await use_of(client, acme)
        fates = iter(["lost", "away", "fine", "lost"])

        async def report(
            journal: str, first: int, last: int, uses: Mapping[UseKey, UseCounts], /, *, is_over: bool = False
        ) -> int:
            fate = next(fates, "fine")
            if fate == "away":
                raise UnavailableError("away")
            taken = await client.reports.usage(journal, first, last, uses, is_over=is_over)
            if fate == "lost":
                raise UnavailableError("lost")
            return taken

        reporter, num_added = UsageReporter(tmp_path, report), 0
        for number in (3, 4, 1, 2, 5):  # more comes between an answer that was lost and the next report
            for _ in range(number):
                reporter.add(use)
            num_added += number
            try:
                await reporter.send()
            except UnavailableError:
                continue
            (usage,) = await listed(acme)
            assert usage.requests == num_added
        await reporter.close()
    assert (num_added, usage.output_tokens) == (15, 45)


async def test_a_data_plane_that_is_killed_again_and_again_loses_and_doubles_nothing(world: World, tmp_path: Path) -> None:
    await world.base()
    acme, node = await world.tenant("acme"), await world.node()
    await world.publish(acme)
    assert world.plane.server.addresses is not None
    folder, noted, kills = tmp_path / "usage", 0, (1, 40, 150)
    async with node_client(world, node) as client:
        use = await use_of(client, acme)
        arguments = [world.plane.server.addresses.callers, BASE_DIGEST, node.secret, str(folder), *map(str, use)]
        for kill_at in kills:
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", CHILD, *arguments, stdout=asyncio.subprocess.PIPE, cwd=ROOT
            )
            assert child.stdout is not None
            for _ in range(kill_at):
                assert await child.stdout.readline() == b"noted\n"
            os.kill(child.pid, signal.SIGKILL)
            noted += kill_at + (await child.stdout.read()).count(b"\n")
            await child.wait()
        for path in folder.glob("*.journal"):
            with path.open("ab") as file:
                file.write(b"0123")  # a line that the last kill tore
        reporter = UsageReporter(folder, client.reports.usage)
        await reporter.send()
        assert list(folder.iterdir()) == [reporter.journal.path]
        await reporter.close()
    (usage,) = await listed(acme)
    served = usage.requests - usage.failed_requests
    assert noted <= served <= noted + len(kills)  # a kill may come between a record and the child's word of it
    assert usage.failed_requests <= len(kills)  # one request runs at a time
    assert usage.prompt_tokens == 10 * usage.requests


async def test_a_journal_that_is_over_takes_no_report_that_comes_late(world: World, tmp_path: Path) -> None:
    await world.base()
    acme, node = await world.tenant("acme"), await world.node()
    await world.publish(acme)
    async with node_client(world, node) as client:
        use = await use_of(client, acme)
        folder, fates = tmp_path / "usage", iter(["fine", "lost", "away"])

        async def report(
            journal: str, first: int, last: int, uses: Mapping[UseKey, UseCounts], /, *, is_over: bool = False
        ) -> int:
            fate = next(fates) if is_over or uses else "fine"
            taken = 0 if fate == "away" else await client.reports.usage(journal, first, last, uses, is_over=is_over)
            if fate != "fine":
                raise UnavailableError(fate)
            return taken

        earlier = UsageReporter(folder, report)
        earlier.add(use)
        earlier.journal.close()
        name = journals.name_of(earlier.journal.path)
        reporter = UsageReporter(folder, report)
        for _ in range(2):  # that it is over is not heard of the first time, as far as its node knows
            with pytest.raises(UnavailableError):
                await reporter.send()
            assert {path.suffix for path in folder.iterdir()} == {".journal", ".sent"}
        fates = iter(["fine"])
        await reporter.send()
        assert [path.suffix for path in folder.iterdir()] == [".journal"]
        for first, last in ((1, 1), (2, 2)):
            assert await client.reports.usage(name, first, last, summed([use])) == 1
        assert await client.reports.usage("f" * 32, 10**12, 10**12, {}, is_over=True) == 0  # of which nothing was ever told
        await reporter.close()
    assert [one.requests for one in await listed(acme)] == [1]


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_record_that_is_refused_or_torn_is_set_aside_and_costs_no_other(
    world: World, tmp_path: Path, is_lost: bool
) -> None:
    await world.base()
    acme, rival, node = await world.tenant("acme"), await world.tenant("rival"), await world.node()
    await world.publish(acme)
    async with node_client(world, node) as client:
        good, other = await use_of(client, acme), await use_of(client, rival, "")
        bad, worse = good._replace(ticket="00"), other._replace(tenant="acme")
        earlier = UsageReporter(tmp_path, client.reports.usage)
        for one in (bad, bad, good, other, worse, good):
            earlier.add(one)
        with earlier.journal.path.open("ab") as file:
            file.write(b"neither a record\nnor torn\n")
        earlier.add(good)
        if is_lost:  # a report came through, and the process ended
            await client.reports.usage(journals.name_of(earlier.journal.path), 1, 4, summed([good, other]))
        earlier.journal.close()
        only_bad = UsageReporter(tmp_path, client.reports.usage)
        only_bad.add(bad)
        only_bad.journal.close()

        reporter = UsageReporter(tmp_path, client.reports.usage)
        reporter.add(worse)
        await reporter.send()
        for one in (bad, good):
            reporter.add(one)
            await reporter.send()
        left = list(tmp_path.glob("*.journal"))
        assert left == [reporter.journal.path]
        await reporter.close()
    assert [one.requests for one in await listed(acme)] == [4]
    assert [one.requests for one in await listed(rival)] == [1]
    aside = b"".join(path.read_bytes() for path in tmp_path.glob("*.refused"))
    assert aside.count(b"\n") >= 3 + 2 + 1 + 2
    assert b"neither a record\nnor torn\n" in aside


async def test_a_journal_of_records_that_are_all_refused_goes_on_after_them(world: World, tmp_path: Path) -> None:
    await world.base()
    acme, node = await world.tenant("acme"), await world.node()
    await world.publish(acme)
    async with node_client(world, node) as client:
        good = await use_of(client, acme)
        earlier = UsageReporter(tmp_path, client.reports.usage)
        for one in (*[good._replace(ticket="00")] * 1001, good):  # more than one report tells of
            earlier.add(one)
        earlier.journal.close()
        reporter = UsageReporter(tmp_path, client.reports.usage)
        await reporter.send()
        await reporter.close()
    assert [one.requests for one in await listed(acme)] == [1]


async def test_requests_that_ran_when_their_process_was_killed_count_once_as_failed(world: World, tmp_path: Path) -> None:
    await world.base()
    acme, rival, node = await world.tenant("acme"), await world.tenant("rival"), await world.node()
    await world.publish(acme)
    async with node_client(world, node) as client:
        use, other = await use_of(client, acme), await use_of(client, rival, "")
        is_lost = True

        async def report(
            journal: str, first: int, last: int, uses: Mapping[UseKey, UseCounts], /, *, is_over: bool = False
        ) -> int:
            nonlocal is_lost
            taken = await client.reports.usage(journal, first, last, uses, is_over=is_over)
            is_lost = is_lost if is_over else not is_lost
            if is_lost and not is_over:
                raise UnavailableError("lost")
            return taken

        killed = UsageReporter(tmp_path, report)
        for tenants in (use, other):
            entries = [killed.entry() for _ in range(1100)]  # more than one report tells of
            for entry in entries:
                entry.tell(tenants._replace(status="UNAVAILABLE", output_tokens=0))
            entries[0].tell(tenants._replace(status="UNAVAILABLE", output_tokens=128))
            for entry in entries[-100:]:
                entry.end(tenants)
        killed.entry().tell(use._replace(ticket="00"))
        killed.journal.close()
        for _ in range(20):  # each process hears of no more than one report of two
            reporter = UsageReporter(tmp_path, report)
            with contextlib.suppress(UnavailableError):
                await reporter.send()
            reporter.journal.close()
        assert [one.suffix for one in tmp_path.glob("*.*") if one != reporter.journal.path] == [".refused"]
    for tenant in (acme, rival):
        (usage,) = await listed(tenant)
        assert (usage.requests, usage.failed_requests) == (1100, 1000)
        assert (usage.prompt_tokens, usage.output_tokens) == (11_000, 100 * 3 + 128)


async def test_a_request_ends_in_the_journal_in_which_it_began(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.base()
    acme, node = await world.tenant("acme"), await world.node()
    await world.publish(acme)
    monkeypatch.setattr(usage_reports, "_MAX_BYTES", 1)
    async with node_client(world, node) as client:
        use = await use_of(client, acme)
        reporter = UsageReporter(tmp_path, client.reports.usage)
        long = reporter.entry()
        long.tell(use)
        await reporter.send()
        for _ in range(2):
            reporter.add(use)
            await reporter.send()
        assert sum(path.suffix == ".journal" for path in tmp_path.iterdir()) == 2
        assert [one.requests for one in await listed(acme)] == [2]
        long.end(use)
        for _ in range(3):
            await reporter.send()
        assert list(tmp_path.glob("*.*")) == [reporter.journal.path]
        await reporter.close()
    assert [(one.requests, one.failed_requests) for one in await listed(acme)] == [(3, 0)]


async def test_a_journal_that_is_longer_than_a_report_goes_on_where_an_earlier_process_was(world: World, tmp_path: Path) -> None:
    await world.base()
    acme, node = await world.tenant("acme"), await world.node()
    await world.publish(acme)
    async with node_client(world, node) as client:
        use = await use_of(client, acme)
        earlier = UsageReporter(tmp_path, client.reports.usage)
        for _ in range(1500):
            earlier.add(use)
        for first, last in ((1, 700), (701, 1300)):  # its reports end elsewhere than those of the next process
            sums = summed([use] * (last - first + 1))
            assert await client.reports.usage(journals.name_of(earlier.journal.path), first, last, sums) == last
        earlier.journal.close()
        reporter = UsageReporter(tmp_path, client.reports.usage)
        await reporter.send()
        await reporter.close()
    assert [one.requests for one in await listed(acme)] == [1500]
