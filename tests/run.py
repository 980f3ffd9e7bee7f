"""Runs the test suites one after the other and prints what each took: `python tests/run.py [--long] [SUITE …]`.

A suite is a choice of folders and markers, with a budget on a machine of two cores; one that takes longer is named, and fails
nothing, since a busy machine is no fault of the code. Every suite runs even if one before it failed; the exit status is 1 if any
failed or ran no test.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Suite:
    """A choice of tests.

    Attributes:
        name: Name on the command line.
        markers: Marker expression.
        paths: Folders and files, as arguments of pytest.
        budget_s: Time that the suite should take without its slow tests.
        workers: Processes to share the tests among; 0 runs them in one.
        postgres: Version of Postgres that it runs on, instead of the installed one; such a suite is run with `--long` alone.
    """

    name: str
    markers: str
    paths: tuple[str, ...]
    budget_s: int
    workers: int = 0
    postgres: str = ""


SUITES = (
    Suite(
        "unit",
        "not oracle and not e2e",
        ("tests", "--ignore=tests/controlplane", "--ignore=tests/kernels/gpu"),
        budget_s=180,
        workers=2,
    ),
    Suite("gpu", "not oracle and not e2e", ("tests/kernels/gpu",), budget_s=60, workers=2),
    Suite("controlplane", "not oracle and not e2e", ("tests/controlplane",), budget_s=180, workers=2),
    # The version of compose.yaml.
    Suite(
        "controlplane-17",
        "postgres and not oracle and not e2e",
        ("tests/controlplane",),
        budget_s=180,
        workers=2,
        postgres="17.10.0",
    ),
    Suite("oracle", "oracle", ("tests",), budget_s=180, workers=2),
    Suite("e2e", "e2e", ("tests",), budget_s=180),
)


def run(suite: Suite, *, long: bool) -> tuple[int, float]:
    """Runs one suite; returns pytest's exit status and the seconds that it took."""
    markers = f"({suite.markers}) and not docker and not gpu" + ("" if long else " and not slow")
    command = [sys.executable, "-m", "pytest", "-q", "-m", markers, *suite.paths, "--durations=5", "--durations-min=2"]
    if suite.workers:
        command += ["-n", str(suite.workers), "--dist=worksteal"]
    if long:
        command += ["--timeout=900"]
    environment = {
        **os.environ,
        "HYPOTHESIS_PROFILE": "long" if long else "default",
        "OMP_NUM_THREADS": "1",  # threads that spin for each other take ten times as long beside any other process
        **({"VENEER_TEST_POSTGRES": suite.postgres} if suite.postgres else {}),
    }
    print(f"── {suite.name} ──", flush=True)
    start = time.monotonic()
    status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    return status, time.monotonic() - start


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Runs the test suites and prints what each took.")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=" ".join(suite.name for suite in SUITES))
    parser.add_argument("--long", action="store_true", help="run the tests marked slow too")
    arguments = parser.parse_args()
    known = {suite.name: suite for suite in SUITES}
    if unknown := set(arguments.suites) - set(known):
        parser.error(f"no such suite: {', '.join(sorted(unknown))}")
    chosen = [known[name] for name in arguments.suites] or [suite for suite in SUITES if arguments.long or not suite.postgres]
    results = [(suite, *run(suite, long=arguments.long)) for suite in chosen]
    failed = False
    print("── suites ──")
    for suite, status, seconds in results:
        failed = failed or status != 0
        late = not arguments.long and seconds > suite.budget_s
        verdict = {0: "ok", 5: "ran no test"}.get(status, f"failed ({status})") + (", over its budget" if late else "")
        print(f"{suite.name:<14}{seconds:7.0f} s of {suite.budget_s} s   {verdict}")
    print(f"{'all':<14}{sum(seconds for _, _, seconds in results):7.0f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
