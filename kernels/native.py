"""Builds, checks and loads the native CPU form (`cpu.cpp` and the parts in `cpp/`), and says why when there is none."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("cpu.cpp")
_CACHE = Path(".cache", "veneer", "native")
_FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-Wno-psabi")
_BUILD_TIMEOUT_S = 300
_SUFFIX = {torch.bfloat16: "bfloat16", torch.float32: "float32"}

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "layers": (_POINTER, _POINTER),
    "linear": (_POINTER, _POINTER, _COUNT, _POINTER, _COUNT, _COUNT),
    "attention": (_POINTER, _POINTER, _COUNT, _POINTER, _COUNT, _POINTER, _COUNT, _COUNT),
    "low_rank": (_POINTER, _POINTER, _COUNT, _POINTER, _COUNT, _COUNT),
    "epilogue": (_POINTER, _POINTER, _COUNT, _COUNT),
    "add_norm": (
        _POINTER, _COUNT, _POINTER, _POINTER, _COUNT, _POINTER, _COUNT, _COUNT, _COUNT, ctypes.c_float, _COUNT,
    ),
    "rotate": (_POINTER, _COUNT, _POINTER, _POINTER, _COUNT, _COUNT, _COUNT, _COUNT, _COUNT),
    "silu_mul": (_POINTER, _POINTER, _COUNT, _COUNT, _COUNT),
    "gelu_tanh_mul": (_POINTER, _POINTER, _COUNT, _COUNT, _COUNT),
    "softcap": (_POINTER, _COUNT, ctypes.c_float, _COUNT),
    "likeliest": (_POINTER, _POINTER, _POINTER, _COUNT, _COUNT, _COUNT),
}  # fmt: skip


class Weight(ctypes.Structure):
    """Mirrors `Weight` of cpp/products.hpp: one packed matrix, [in, out], and its bias."""

    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("depth", ctypes.c_int64),
        ("width", ctypes.c_int64),
    )


class NativeFormError(Exception):
    """There is no native form for this machine or these shapes; the message says why."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """What the source is compiled for.

    Attributes:
        name: For people.
        needs: Features that the processor must have, as Linux names them.
        flags: Of the compiler.
    """

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]


_AVX2 = frozenset({"avx2", "fma"})
_FLAGS_AVX2 = ("-mavx2", "-mfma")
_FLAGS_AVX512 = (*_FLAGS_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
INSTRUCTION_SETS = (
    InstructionSet("AVX512-BF16", _AVX512 | {"avx512_bf16"}, (*_FLAGS_AVX512, "-mavx512bf16")),
    InstructionSet("AVX-512", _AVX512, _FLAGS_AVX512),
    InstructionSet("AVX2", _AVX2, _FLAGS_AVX2),
    InstructionSet("portable", frozenset(), ()),
)
"""Best first; the last runs everywhere (on ARM its vectors are NEON)."""


@dataclass(frozen=True, slots=True)
class Native:
    """The loaded library.

    Attributes:
        instruction_set: What it was compiled for.
        path: The file.
        functions: Entry points by name and dtype.
    """

    instruction_set: InstructionSet
    path: Path
    functions: dict[tuple[str, torch.dtype], Callable[..., None]]

    @property
    def has_best_product(self) -> bool:
        """Whether its product of bfloat16 matrices is the fastest here: there are pair products, and no matrix unit (AMX)."""
        return "avx512_bf16" in self.instruction_set.needs and "amx_bf16" not in processor_features()

    def function(self, name: str, dtype: torch.dtype) -> Callable[..., None]:
        """Returns an entry point of `cpu.cpp`.

        Raises:
            NativeFormError: There is none for the dtype.
        """
        try:
            return self.functions[name, dtype]
        except KeyError:
            raise NativeFormError(f"the native CPU form computes in bfloat16 and float32, not in {dtype}") from None


def best_instruction_set(features: frozenset[str]) -> InstructionSet:
    """Returns the best instruction set for a processor with these features."""
    return next(one for one in INSTRUCTION_SETS if one.needs <= features)


@functools.cache
def processor_features() -> frozenset[str]:
    """Returns the features of this machine's processor; none where they cannot be read, and `portable` then serves."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


@functools.cache
def load_native(instruction_set: InstructionSet | None = None, *, cache: Path | None = None) -> Native:
    """Returns the library, built first where the cache folder does not hold it; once a process.

    The file's name is a digest of source, compiler, flags and OpenMP runtime. It is built beside its place under a lock and moved
    there whole, so that processes that start together neither build twice nor see half a file. Where the folder cannot be
    written, a temporary folder of this process serves.

    Args:
        instruction_set: Another than the best one, for tests.
        cache: Folder of built libraries; by default `.cache/veneer/native` of the home folder.

    Raises:
        NativeFormError: No compiler, or the build or the load fails.
    """
    chosen = instruction_set or best_instruction_set(processor_features())
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        raise NativeFormError("no C++ compiler (c++, g++ or clang++) is on the search path")
    runtime = _openmp_runtime()
    version = _run([compiler, "--version"])
    texts = [path.read_text() for path in (SOURCE, *sorted(SOURCE.parent.glob("cpp/*.hpp")))]
    parts = (*texts, compiler, version, " ".join(_FLAGS + chosen.flags), str(runtime))
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32] + ".so"
    try:
        cache = cache or Path.home() / _CACHE
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = _built(cache / name, compiler, chosen, runtime)
    except (OSError, RuntimeError):  # no home folder is a RuntimeError
        path = _built(Path(tempfile.mkdtemp(prefix="veneer-native-")) / name, compiler, chosen, runtime)
    return _open(path, chosen)


def _open(path: Path, instruction_set: InstructionSet) -> Native:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeFormError(f"the built library does not load: {error}") from error
    functions: dict[tuple[str, torch.dtype], Callable[..., None]] = {}
    for name, signature in _SIGNATURES.items():
        for dtype, suffix in _SUFFIX.items():
            function = library[f"{name}_{suffix}"]
            function.argtypes, function.restype = signature, None
            functions[name, dtype] = function
    return Native(instruction_set, path, functions)


def _built(path: Path, compiler: str, chosen: InstructionSet, runtime: Path | None) -> Path:
    if path.exists():
        return path
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                compiled, linked = Path(folder, "cpu.o"), Path(folder, "cpu.so")
                _run([compiler, *_FLAGS, *chosen.flags, "-c", str(SOURCE), "-o", str(compiled)])
                openmp = "-fopenmp" if runtime is None else str(runtime)
                _run([compiler, "-shared", str(compiled), openmp, "-o", str(linked)])
                linked.replace(path)
    return path


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeFormError(f"the compiler does not run: {error}") from error
    if done.returncode:
        raise NativeFormError(f"the compiler fails: {done.stderr.strip()[-2000:]}")
    return done.stdout


def openmp_runtimes() -> list[Path]:
    """Returns the files of the GNU OpenMP runtime that this process has mapped."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    return sorted({Path(line.split(maxsplit=5)[5]) for line in lines if "/libgomp" in line})


def _openmp_runtime() -> Path | None:
    """Returns the runtime that torch brought: the library is linked with that very file, so that one thread pool serves both."""
    return next(iter(openmp_runtimes()), None)
