"""A contender's process, seen from the benchmark: started, asked, and stopped while others run."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from benchmarks.workload import Run, Workload

_ROOT = Path(__file__).resolve().parents[2]
_STILL = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)


@dataclass(frozen=True, slots=True)
class Setup:
    """What a contender is told at its start.

    Attributes:
        model: Hugging Face folder.
        adapters: Folder of adapters in PEFT's format; empty for none.
        streams: Requests at the same time at most.
        context: Tokens of prompt and output together at most.
        max_adapters: Distinct adapters in a workload at most; 0 for the base alone.
        max_rank: Largest rank.
        options: What only this contender knows.
    """

    model: str
    adapters: str = ""
    streams: int = 64
    context: int = 96
    max_adapters: int = 0
    max_rank: int = 16
    options: dict[str, Any] = field(default_factory=dict)


class Process:
    """A contender in a process of its own, with huge pages. It is stopped (SIGSTOP), with all its children, unless it runs.

    Attributes:
        settings: What it says of itself, for print.
    """

    def __init__(self, name: str, setup: Setup, *, python: str = sys.executable, environment: Mapping[str, str] | None = None):
        self._name = name
        self._child = subprocess.Popen(
            [python, "-m", "benchmarks.contenders", name, json.dumps(dataclasses.asdict(setup)), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env={**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", **(environment or {})},
        )
        self.settings: dict[str, Any] = self._answer()
        self._suspend()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def run(self, workload: Workload) -> Run:
        """Generates all tokens once."""
        assert self._child.stdin is not None
        self._resume()
        self._child.stdin.write(json.dumps(dataclasses.asdict(workload)) + "\n")
        self._child.stdin.flush()
        run = Run(**self._answer())
        self._suspend()
        return run

    def close(self) -> None:
        """Ends it. Idempotent."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._resume()
        self._child.stdin.close()
        self._child.stdout.close()
        self._child.wait(120)

    def _answer(self) -> Any:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError(f"the contender {self._name} ended with status {self._child.wait()}")
        return json.loads(line)

    def _resume(self) -> None:
        for one in self._family():
            one.resume()

    def _suspend(self) -> None:
        """Returns when all stand still: one that waits for its turn stops only then."""
        family = self._family()
        for one in family:
            one.suspend()
        while any(one.status() not in _STILL for one in family):
            time.sleep(0.001)

    def _family(self) -> list[psutil.Process]:
        if self._child.poll() is not None:
            return []
        process = psutil.Process(self._child.pid)
        return [process, *process.children(recursive=True)]
