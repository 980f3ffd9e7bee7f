"""Compiles every kernel for every configuration without a GPU and reads what came of it: `python -m kernels.aot`.

A table of registers, spills, shared memory, matrix instructions and the share of 16-byte loads, one line a kernel, target and
configuration. The exit status is 1 if one spills, has no matrix instruction, reads its main loop in narrow loads, or is to be
launched dependent and neither waits nor triggers.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.builds import Build, builds

CAPABILITIES = (80, 90)
_DEPENDENT_LAUNCH = 90
_INT64 = ("a_offset_ptr", "b_offset_ptr", "entry_ptr", "gain_offset_ptr", "shift_offset_ptr", "place_ptr", "page_ptr")
_FLOAT32 = ("plane_ptr", "scale_ptr", "part_ptr", "best_ptr", "total_ptr")
_MODEL_DTYPE = (
    *("x_ptr", "y_ptr", "arena_ptr", "h_ptr", "weight_ptr", "bias_ptr"),
    *("out_ptr", "heads_ptr", "cos_ptr", "sin_ptr", "gate_up_ptr"),
    *("kv_ptr", "qk_ptr", "v_ptr"),
)
_FLOAT_NUMBERS = ("eps", "cap")


@dataclass(frozen=True, slots=True)
class Found:
    """What was read of a compiled kernel.

    Attributes:
        name: Of the build.
        target: Architecture, e.g. `sm_90a`.
        registers: Registers of a thread.
        spills: Accesses to local memory in the code.
        shared: Bytes of shared memory of a program.
        products: Matrix instructions.
        wide: Loads of 16 bytes.
        half: Loads of 8 bytes into shared memory; those of addresses aside, unless they are wide enough.
        narrow: Loads of less into shared memory, and loads of 1 or 2 bytes, to which wide loads degenerate.
        least_bytes: Bytes a thread that there have to be in wide loads.
        is_fp8: Whether loads of 8 bytes are wide enough.
        is_dependent: Whether it is made for dependent launch, as the one that waits, the one that triggers, or both.
        dependencies: Instructions that wait for the kernel in front, or let the one behind begin.
    """

    name: str
    target: str
    registers: int
    spills: int
    shared: int
    products: int
    wide: int
    half: int
    narrow: int
    least_bytes: int
    is_fp8: bool
    is_dependent: bool
    dependencies: int

    @property
    def faults(self) -> list[str]:
        """What must not be."""
        too_narrow = self.narrow + (0 if self.is_fp8 else self.half)
        enough = 16 * self.wide + (8 * self.half if self.is_fp8 else 0) >= self.least_bytes
        return [
            fault
            for fault, found in (
                ("spills", self.spills > 0),
                ("no matrix instruction", self.products == 0 < self.least_bytes),
                ("narrow loads", too_narrow > 0 or not enough),
                ("no dependent launch", self.is_dependent and self.dependencies == 0),
            )
            if found
        ]


def compile_for(build: Build, capability: int, *, dtype: str = "bf16") -> Found:
    """Compiles one kernel for one target as a launch would specialise it, and reads the machine code.

    Pointers, strides and widths are multiples of 16, as they are in service; what a launch does not specialise is left open.
    """
    dependent = capability >= _DEPENDENT_LAUNCH
    constants = {**build.constants, "DEPENDENT": dependent, "UPCAST": False}
    constants = {name: value for name, value in constants.items() if name in build.kernel.arg_names}
    open_arguments = set(build.kernel.do_not_specialize)
    signature, attributes = {}, {}
    for i, name in enumerate(build.kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = "*u8" if name == "arena_ptr" and constants.get("FP8") else _type_of(name, dtype)
        if name not in open_arguments and name not in _FLOAT_NUMBERS:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=build.kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {**build.launch.options(), "launch_pdl": dependent}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return _read(build, compiled, is_dependent=dependent and "DEPENDENT" in constants)


def _type_of(name: str, dtype: str) -> str:
    if not name.endswith("_ptr"):
        return "fp32" if name in _FLOAT_NUMBERS else "i32"
    if name in _MODEL_DTYPE:
        return f"*{dtype}"
    return "*i64" if name in _INT64 else "*fp32" if name in _FLOAT32 else "*i32"


def _read(build: Build, compiled: Any, *, is_dependent: bool) -> Found:
    target = re.search(r"\.target (sm_\w+)", compiled.asm["ptx"])
    assert target is not None, "PTX names its target"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        code = _dump("-sass", path)
        usage = _dump("-res-usage", path)
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, "the resource usage names the registers"

    def count(pattern: str) -> int:
        return len(re.findall(pattern, code))

    copies = [count(rf"\bLDGSTS\S*\.{bits}\b") for bits in (128, 64)]
    half = copies[1] if build.is_fp8 else max(0, copies[1] - build.index_loads)
    return Found(
        name=build.name,
        target=target[1],
        registers=int(registers[1]),
        spills=count(r"\b(?:LDL|STL)\b"),
        shared=compiled.metadata.shared,
        products=count(r"\b(?:HMMA|HGMMA)\b"),
        wide=copies[0] + count(r"\bLDG\.E\S*\.128\b"),
        half=half,
        narrow=count(r"\bLDGSTS\b") - sum(copies) + count(r"\bLDG\.E\S*\.U(?:8|16)\b"),
        least_bytes=build.least_bytes,
        is_fp8=build.is_fp8,
        is_dependent=is_dependent,
        dependencies=count(r"\b(?:ACQBULK|PREEXIT)\b"),
    )


def _dump(option: str, path: Path) -> str:
    tools = Path(knobs.nvidia.nvdisasm.path).parent
    environment = {"PATH": f"{tools}:/usr/bin:/bin"}
    command = [knobs.nvidia.cuobjdump.path, option, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def table(found: list[Found]) -> str:
    """Returns the table in Markdown."""
    columns = ("kernel", "target", "registers", "spills", "shared KiB", "matrix instructions", "16-byte loads", "")
    head = f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|"
    lines = [
        f"| {one.name} | {one.target} | {one.registers} | {one.spills} | {one.shared / 1024:.0f} | {one.products} "
        f"| {one.wide} of {one.wide + one.half + one.narrow} | {', '.join(one.faults) or 'ok'} |"
        for one in found
    ]
    return "\n".join([head, *lines])


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Compiles the Triton kernels without a GPU and checks their machine code.")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16", help="of the model; bf16 unless told")
    dtype = parser.parse_args().dtype
    found = [compile_for(build, capability, dtype=dtype) for capability in CAPABILITIES for build in builds()]
    print(f"triton {triton.__version__}, {dtype}\n\n{table(found)}")
    return int(any(one.faults for one in found))


if __name__ == "__main__":
    sys.exit(main())
