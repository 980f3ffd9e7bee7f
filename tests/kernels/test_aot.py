"""Ahead-of-time compilation, in processes of its own: the tests beside this one may have put Triton into its interpreter."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.other_versions import NoIndexError, prepare
from tests.test_layers import ROOT

pytestmark = pytest.mark.timeout(600)


def run(*command: str, other: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "OMP_NUM_THREADS": "1"}
    if other is not None:
        environment["PYTHONPATH"] = str(other)
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


ONE_OF_EACH = """
from kernels.aot import builds, compile_for
for build in {build.kernel: build for build in builds()}.values():
    print(compile_for(build, 90).faults)
"""


def test_one_configuration_of_each_kernel_compiles_for_a_gpu_without_one():
    result = run("-c", ONE_OF_EACH)
    assert result.stdout.split() == ["[]"] * 11, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_configuration_compiles_without_spills_and_with_wide_loads(dtype):
    result = run("-m", "kernels.aot", "--dtype", dtype)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("| ok |") == 2 * result.stdout.count("sm_80")


@pytest.fixture(scope="session")
def older_triton() -> Path:
    """The version of the GPU machines; skipped, which CI takes for a failure, where no index can be reached."""
    try:
        return prepare("triton", "3.6.0")
    except NoIndexError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_configuration_compiles_with_an_older_triton_too(older_triton):
    result = run("-m", "kernels.aot", other=older_triton)
    assert result.stdout.startswith("triton 3.6.0"), result.stderr
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_kernels_are_right_in_the_interpreter_of_an_older_triton(older_triton):
    tests = ("tests/kernels/gpu/test_low_rank.py", "tests/kernels/gpu/test_attention.py")
    numpys = "ignore:Conversion of an array:DeprecationWarning"  # of its interpreter
    result = run("-m", "pytest", "-q", "-m", "not slow", "-W", numpys, *tests, other=older_triton)
    assert result.returncode == 0, result.stdout[-3000:]


SPOILT = """
import triton.language as tl
import kernels.gpu.expand as module
from kernels.aot import builds, compile_for
from kernels.gpu.tiles import Launch
from dataclasses import replace

wide = next(build for build in builds() if build.kernel is module.expand)
print(compile_for(replace(wide, constants={**wide.constants, "BLOCK_N": 256, "BLOCK_M": 64}, launch=Launch(1, 1)), 80).faults)
"""


@pytest.mark.slow
def test_a_configuration_that_spills_is_reported():
    assert "spills" in run("-c", SPOILT).stdout


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({}, []),
        ({"spills": 2}, ["spills"]),
        ({"products": 0}, ["no matrix instruction"]),
        ({"narrow": 1}, ["narrow loads"]),
        ({"half": 1}, ["narrow loads"]),
        ({"half": 2, "wide": 7, "is_fp8": True}, []),
        ({"wide": 7}, ["narrow loads"]),
        ({"products": 0, "least_bytes": 0}, []),
        ({"dependencies": 0}, ["no dependent launch"]),
        ({"dependencies": 0, "is_dependent": False}, []),
    ],
)
def test_what_must_not_be_is_named(changes, faults):
    from kernels.aot import Found, table

    good = Found(
        name="shrink",
        target="sm_90a",
        registers=64,
        spills=0,
        shared=1024,
        products=8,
        wide=8,
        half=0,
        narrow=0,
        least_bytes=128,
        is_fp8=False,
        is_dependent=True,
        dependencies=1,
    )
    found = replace(good, **changes)
    assert found.faults == faults
    assert table([found]).endswith(f"| {', '.join(faults) or 'ok'} |")
