"""A contender's process, from inside: `python -m benchmarks.contenders NAME SETUP`.

It loads, says on standard output how it is set, and then answers each line of JSON on standard input (a `Workload`) with one on
standard output (a `Run`). Waiting for the next line it takes no core from others.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import json
import os
import signal
import sys
from contextlib import AbstractContextManager
from typing import Any, Protocol

from benchmarks.contenders.process import Setup
from benchmarks.workload import Run, Workload

CONTENDERS = {
    "bare": "bare.BareLoop",
    "veneer": "veneer.Veneer",
    "streams": "streams.Streams",
    "profile": "profile.Profile",
    "transformers": "transformers.Transformers",
    "vllm": "vllm.Vllm",
}
"""Where each is; loaded only where asked for, since no environment has all that they import."""


_PR_SET_PDEATHSIG = 1


class Contender(Protocol):
    """Runs workloads; a context manager where it has something to end."""

    settings: dict[str, Any]

    def run(self, workload: Workload) -> Run:
        """Generates all tokens once."""


def main(name: str, setup: Setup, *, parent: int) -> None:
    """Answers until the input ends, or until the benchmark dies: a stopped process would not see the end of its input."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # it died before the signal was asked for
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    module, _, kind = CONTENDERS[name].partition(".")
    contender: Contender = getattr(importlib.import_module(f"benchmarks.contenders.{module}"), kind)(setup)
    print(json.dumps(contender.settings), file=answers, flush=True)
    try:
        for line in sys.stdin:
            run = contender.run(Workload(**json.loads(line)))
            print(json.dumps(dataclasses.asdict(run)), file=answers, flush=True)
    finally:
        if isinstance(contender, AbstractContextManager):
            contender.__exit__(None, None, None)


if __name__ == "__main__":
    main(sys.argv[1], Setup(**json.loads(sys.argv[2])), parent=int(sys.argv[3]))
