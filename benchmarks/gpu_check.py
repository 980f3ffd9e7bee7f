"""The first minutes on a GPU: `python -m benchmarks.gpu_check --json gpu.json`.

Parts run in the order of what they decide, each in a process of its own with its own time, so that one that fails or hangs takes
nothing with it; what each found is written at once. Needs torch, triton, numpy and safetensors only; weights are random.

Exit status: 0, 1 if a part failed, 3 if there is no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

NO_DEVICE = 3
_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Figure:
    """One thing that was found.

    Attributes:
        id: Name, stable over releases.
        value: What was measured; text for facts of the machine.
        unit: Unit of value, `ratio` for quotients of two measurements of the same part.
        floor: What the bytes alone allow, or None.
    """

    id: str
    value: float | str
    unit: str = ""
    floor: float | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the check.

    Attributes:
        name: For `--part`.
        limit_s: Time that it may take.
        decides: What its figures decide.
    """

    name: str
    limit_s: float
    decides: str


PARTS = (
    Part("card", 20, "the machine, and the bandwidth that everything is compared with"),
    Part("products", 40, "how near the library's base products come to it, and ours to the library's"),
    Part("launches", 20, "what a launch costs, and whether dependent launch survives a captured graph"),
    Part("correct", 55, "whether the kernels are right, and right to the bit every time"),
    Part("decode", 60, "what 22 adapters of rank 16 cost a decode step of 64 rows, by each path"),
    Part("attention", 30, "whether attention is right, its share of bandwidth, and its time over the library's"),
    Part("engine", 75, "what the engine adds to its bare graph, and adapters to a step with attention"),
    Part("load", 25, "what a load costs the steps beside it"),
    Part("mixes", 35, "other mixes, fp8, and prefill"),
)
NOT_BUILT: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one part.

    Attributes:
        part: Its name.
        seconds: Time that it took.
        fault: What went wrong; empty if nothing did.
        figures: What it found before that.
    """

    part: str
    seconds: float
    fault: str
    figures: tuple[Figure, ...]


def run_part(part: Part, *, command: list[str] | None = None) -> Outcome:
    """Runs one part in a process of its own and returns what it printed, a line a figure, until it ended or its time was up."""
    command = command or [sys.executable, "-m", "benchmarks.gpu_check", "--part", part.name]
    start = time.monotonic()
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=part.limit_s, check=False)
        out, fault = done.stdout, "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]
    except subprocess.TimeoutExpired as error:
        out, fault = _text(error.stdout), f"took more than {part.limit_s:.0f} s"
    figures = tuple(Figure(**json.loads(line)) for line in out.splitlines() if line.startswith("{") and line.endswith("}"))
    return Outcome(part.name, time.monotonic() - start, fault, figures)


def _text(captured: bytes | str | None) -> str:
    return captured.decode(errors="replace") if isinstance(captured, bytes) else captured or ""


def check(parts: Iterable[Part], *, run: Callable[[Part], Outcome] = run_part, path: Path | None = None) -> Iterator[Outcome]:
    """Runs parts one after the other, whatever becomes of each, and writes all outcomes so far after each."""
    outcomes = []
    for part in parts:
        outcomes.append(run(part))
        if path is not None:
            path.write_text(json.dumps({"outcomes": [asdict(one) for one in outcomes], "not_built": NOT_BUILT}, indent=1) + "\n")
        yield outcomes[-1]


def lines(outcome: Outcome) -> list[str]:
    """Returns an outcome as rows of the table in docs/gpu.md."""
    rows = []
    for figure in outcome.figures:
        value = figure.value if isinstance(figure.value, str) else f"{figure.value:.4g}"
        floor = "" if figure.floor is None else f"{figure.floor:.3f}"
        rows.append(f"| {outcome.part} | {figure.id} | {value} | {figure.unit} | {floor} |")
    if outcome.fault:
        rows.append(f"| {outcome.part} | failed | {outcome.fault} | | |")
    return rows


def _child(name: str) -> int:
    from benchmarks import gpu_parts

    for figure in getattr(gpu_parts, name)():
        print(json.dumps(asdict(figure)), flush=True)
    return 0


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Checks and measures the GPU kernels on the GPU of this machine.")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write what was found there, anew after each part")
    parser.add_argument("--part", choices=[part.name for part in PARTS], help="run one part in this process")
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("no GPU: torch finds no CUDA device, so nothing was measured", file=sys.stderr)
        return NO_DEVICE
    if arguments.part:
        return _child(arguments.part)
    print("| part | figure | value | unit | floor |\n|---|---|---|---|---|")
    failed = False
    for outcome in check(PARTS, path=arguments.json):
        print("\n".join(lines(outcome)), flush=True)
        failed = failed or bool(outcome.fault)
    if NOT_BUILT:
        print(f"not built, so not measured: {'; '.join(NOT_BUILT)}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
