"""Other programs that decode the same workload, each in a process of its own: the bare loop, and transformers.

`python -m benchmarks.contenders NAME --model DIR` loads, prints a line, and then answers each line of JSON on standard input (a
`Workload`) with a line of JSON on standard output (a `Timing`). Between two requests it sleeps and takes no core from others.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch

from benchmarks.bare import Bare, Timing
from benchmarks.workload import Workload

HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class Contender(Protocol):
    """Runs workloads."""

    def run(self, workload: Workload) -> Timing:
        """Generates all tokens once."""


class BareLoop:
    """`benchmarks.bare`; keeps one loop for each number of adapters."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._loops: dict[tuple[int, int, int], Bare] = {}

    def run(self, workload: Workload) -> Timing:
        """See `Contender`."""
        key = (workload.streams, workload.adapters, workload.rank)
        if key not in self._loops:
            self._loops[key] = Bare(self._model, rows=workload.streams, num_adapters=workload.adapters, rank=workload.rank)
            self._loops[key].run(torch.tensor(workload.prompts()), steps=3)
        return self._loops[key].run(torch.tensor(workload.prompts()), steps=workload.output_tokens)


class Transformers:
    """`generate` of transformers, greedy, one batch, the base alone."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def run(self, workload: Workload) -> Timing:
        """See `Contender`."""
        assert workload.adapters == 0, "the base alone"
        prompts = torch.tensor(workload.prompts())
        taken = [self._generate(prompts, count) for count in (1, workload.output_tokens)]
        tokens = workload.streams * workload.output_tokens
        return Timing(tokens / taken[1], taken[0], (taken[1] - taken[0]) / (workload.output_tokens - 1))

    def _generate(self, prompts: torch.Tensor, count: int) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                pad_token_id=0,
            )
        assert out.shape[1] == prompts.shape[1] + count, "every row has all its tokens"
        return time.perf_counter() - start


CONTENDERS: dict[str, Callable[[Path], Contender]] = {"bare": BareLoop, "transformers": Transformers}


class Process:
    """A contender in a process of its own, with huge pages."""

    def __init__(self, name: str, model: Path) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.contenders", name, "--model", str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **HUGE_PAGES},
        )
        self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(60)

    def run(self, workload: Workload) -> Timing:
        """Generates all tokens once."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(dataclasses.asdict(workload)) + "\n")
        self._child.stdin.flush()
        return Timing(**json.loads(self._answer()))

    def _answer(self) -> str:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"the contender ended with status {self._child.wait()}")
        return line


def main() -> None:
    """Entry point of the child."""
    parser = argparse.ArgumentParser(description="Decodes workloads that come on standard input.")
    parser.add_argument("name", choices=CONTENDERS)
    parser.add_argument("--model", type=Path, required=True)
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    contender: Contender = CONTENDERS[arguments.name](arguments.model)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        timing = contender.run(Workload(**json.loads(line)))
        print(json.dumps(dataclasses.asdict(timing)), file=answers, flush=True)


if __name__ == "__main__":
    main()
