from __future__ import annotations

import asyncio
import logging
import subprocess
import sys

import pytest

from veneer.background import end_tasks

STUCK = """
import threading, veneer.server
veneer.server._END_S = 0.5
async def main(): threading.Thread(target=threading.Event().wait, name="forgotten").start()
veneer.server.run_main(main())
print("done", flush=True)
"""


async def wait() -> None:
    await asyncio.Event().wait()


async def test_tasks_are_ended_and_one_that_goes_on_is_named_and_left(caplog: pytest.LogCaptureFixture) -> None:
    free = asyncio.Event()

    async def deaf() -> None:
        while not free.is_set():
            try:
                await free.wait()
            except asyncio.CancelledError:
                continue

    async def broken() -> None:
        raise ValueError

    tasks = [asyncio.create_task(work, name=name) for name, work in (("w", wait()), ("deaf", deaf()), ("b", broken()))]
    await asyncio.sleep(0)
    with caplog.at_level(logging.ERROR):
        await end_tasks(tasks, timeout_s=0.05)
    assert [task.done() for task in tasks] == [True, False, True]
    [record] = caplog.records
    assert (record.__dict__["task"], "deaf" in record.__dict__["where"]) == ("deaf", True)
    free.set()
    await tasks[1]
    await end_tasks([])


def test_a_process_whose_work_is_done_ends_and_shows_what_kept_it() -> None:
    ended = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (1, "done\n")
    assert "Timeout (0:00:00.5" in ended.stderr
    assert 'threading.py", line' in ended.stderr
