"""Veneer beside vLLM's CPU build, transformers and peft: `python -m benchmarks.peers [--json PATH] [--only ROW …]`.

Every contender gets the same token ids and, as files of one folder, the same adapters; bfloat16, greedy, the whole length, no
prefix cache, huge pages, both cores. Each is a process of its own, stopped while another runs; they take turns. vLLM lives in an
environment that the first run installs (3 GB in the user's cache folder), in the faster of its eager and compiled modes, with as
many adapter places as there are adapters. A contender that generates other tokens is not compared: its row is no number.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report
from benchmarks.contenders.process import Process, Setup
from benchmarks.report import Row
from benchmarks.rounds import Taken, Turn, prefill_s, ratio, take_turns, tokens_per_s
from benchmarks.speed import ADAPTERS, write_adapters
from benchmarks.vllm_environment import prepare_vllm
from benchmarks.workload import Run, Workload, agreement
from demo.prepare import prepare
from veneer.artifact import describe_base

STREAMS, CONTEXT, OUTPUT = 64, 352, 64
SAME = 0.5
"""Share of equal tokens from which on two contenders count as computing the same: most."""


@dataclass(frozen=True, slots=True)
class Match:
    """One comparison.

    Attributes:
        id: Of the row.
        peer: `vllm`, `transformers` or `peft`.
        workload: What both run.
        target: Bound of the row.
        measure: What is divided: Veneer's over the peer's for a speed, the peer's over Veneer's for a time.
    """

    id: str
    peer: str
    workload: Workload
    target: str
    measure: Callable[[Run], float] = tokens_per_s


def matches(vocab_size: int) -> list[Match]:
    """Returns all comparisons."""

    def base(streams: int, prompt: int = 32) -> Workload:
        return Workload(streams, prompt, OUTPUT, vocab_size)

    mixed = Workload(STREAMS, 32, OUTPUT, vocab_size, adapters=ADAPTERS)
    return [
        Match("mixed_vs_vllm", "vllm", mixed, ">= 7"),
        Match("mixed_prefill_vs_vllm", "vllm", mixed, ">= 15", prefill_s),
        Match("base64_vs_vllm", "vllm", base(64), ">= 1.6"),
        Match("base8_vs_vllm", "vllm", base(8), ">= 1.8"),
        Match("base1_vs_vllm", "vllm", base(1), ">= 1.8"),
        Match("base64_long_vs_vllm", "vllm", base(64, 284), ">= 1.4"),
        Match("mixed_vs_peft", "peft", mixed, ">= 25"),
        Match("base_vs_transformers", "transformers", base(64), ">= 2"),
    ]


def measure(chosen: Sequence[Match], model: Path, folder: Path, *, rounds: int, python: Path) -> list[Row]:
    """Runs the comparisons.

    Args:
        chosen: Which.
        model: Hugging Face folder.
        folder: Adapters go there.
        rounds: Alternations of which the median counts.
        python: Of vLLM's environment.
    """
    write_adapters(folder, describe_base(model), count=ADAPTERS)
    with ExitStack() as stack:
        base = Setup(str(model), str(folder), streams=STREAMS, context=CONTEXT)
        setups = {0: base, ADAPTERS: dataclasses.replace(base, max_adapters=ADAPTERS)}
        contenders = {"veneer": stack.enter_context(Process("veneer", setups[ADAPTERS]))}
        _say("veneer", contenders["veneer"])
        for name in sorted({_contender(match) for match in chosen}):
            if name.startswith("vllm"):
                workload = next(match.workload for match in chosen if _contender(match) == name)
                contenders[name] = _best_vllm(setups[workload.adapters], workload, python, stack)
            else:
                contenders[name] = stack.enter_context(Process("transformers", setups[ADAPTERS if name == "peft" else 0]))
                _say(name, contenders[name])
        turns = {}
        for match in chosen:
            turns[_label("veneer", match)] = Turn(contenders["veneer"], match.workload)
            turns[_label(match.peer, match)] = Turn(contenders[_contender(match)], match.workload)
        taken = take_turns(turns, rounds=rounds)
    return [row for match in chosen for row in compare(match, taken)]


def compare(match: Match, taken: Taken) -> list[Row]:
    """Returns the row of a comparison and, beside it, the share of equal tokens."""
    ours, theirs = _label("veneer", match), _label(match.peer, match)
    same = statistics.median(agreement(one, other) for one, other in zip(taken[ours], taken[theirs], strict=True))
    order = (theirs, ours) if match.measure is prefill_s else (ours, theirs)
    value = ratio(taken, *order, match.measure) if same >= SAME else math.nan
    return [Row(match.id, value, target=match.target), Row(f"{match.id}_same_tokens", same, unit="share")]


def _label(who: str, match: Match) -> str:
    workload = match.workload
    adapters = f", {workload.adapters} adapters" if workload.adapters else ""
    return f"{who} {workload.streams} x {workload.prompt_tokens}{adapters}"


def _contender(match: Match) -> str:
    return f"vllm of {match.workload.adapters}" if match.peer == "vllm" else match.peer


def _best_vllm(setup: Setup, workload: Workload, python: Path, stack: ExitStack) -> Process:
    """Tries both modes and returns the faster, of the first comparison that it serves."""
    modes = {}
    for name, eager in (("eager", True), ("compiled", False)):
        modes[name] = Process("vllm", dataclasses.replace(setup, options={"eager": eager}), python=str(python))
        stack.callback(modes[name].close)
        _say(f"vllm, {name}, {setup.max_adapters} adapters", modes[name])
    taken = take_turns({f"vllm, {name}": Turn(process, workload) for name, process in modes.items()}, rounds=1)
    best = max(modes, key=lambda name: taken[f"vllm, {name}"][0].tokens_per_s)
    print(f"vllm with {setup.max_adapters} adapters: {best} is faster", flush=True)
    for name, process in modes.items():
        if name != best:
            process.close()
    return modes[best]


def _say(name: str, process: Process) -> None:
    print(f"{name}: {json.dumps(process.settings)}", flush=True)


def main() -> None:
    """Entry point."""
    parser = report.parser("Measures Veneer beside other engines on SmolLM2-135M in bfloat16.")
    parser.add_argument("--rounds", type=int, default=3, help="alternations of which the median counts")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="rows to measure (default: all)")
    parser.add_argument("--vllm", type=Path, metavar="FOLDER", help="environment of vLLM (default: in the user's cache folder)")
    arguments = parser.parse_args()
    model = prepare()
    known = {match.id: match for match in matches(describe_base(model).vocab_size)}
    if unknown := set(arguments.only or ()) - set(known):
        parser.error(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    chosen = [known[name] for name in arguments.only or known]
    python = prepare_vllm(arguments.vllm)
    print(f"some {5 + 2.5 * arguments.rounds:.0f} minutes on two cores, if all rows are measured", flush=True)
    with tempfile.TemporaryDirectory(prefix="veneer-bench-") as folder:
        rows = measure(chosen, model, Path(folder), rounds=arguments.rounds, python=python)
    title = f"64 streams at most, {OUTPUT} tokens each, bfloat16"
    raise SystemExit(0 if report.publish(rows, path=arguments.json, title=title) else 1)


if __name__ == "__main__":
    main()
