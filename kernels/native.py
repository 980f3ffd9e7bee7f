"""Builds, checks and loads the native CPU form (`cpu.cpp` and the parts in `cpp/`), and says why when there is none.

`python -m kernels.native build --out FOLDER [--isa NAME ...]` builds libraries ahead, for images and machines without a compiler.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import functools
import hashlib
import logging
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

_log = logging.getLogger(__name__)

PREBUILT = Path(sys.prefix, "lib", "veneer", "native")
"""Where libraries lie that were built ahead: in the environment of the interpreter, which an image copies whole."""
SOURCE = Path(__file__).with_name("cpu.cpp")
_CACHE = Path(".cache", "veneer", "native")
_FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-Wno-psabi")
_BUILD_TIMEOUT_S = 300
_FILE = re.compile(r"(?P<set>[a-z0-9-]+)-(?P<source>[0-9a-f]{32})-(?P<content>[0-9a-f]{32})\.so")
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

    @property
    def slug(self) -> str:
        """Its name in the names of files and on the command line."""
        return self.name.lower()


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
        slower: Why it is not the best that the processor could run; empty where it is.
    """

    instruction_set: InstructionSet
    path: Path
    functions: dict[tuple[str, torch.dtype], Callable[..., None]]
    slower: str = ""

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
    if not _is_x86():
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


@functools.cache
def load_native(
    instruction_set: InstructionSet | None = None, *, cache: Path | None = None, prebuilt: Path | None = None
) -> Native:
    """Returns the library: one that was built ahead, else one that is built now; once a process.

    A library that was built ahead must be of this source, these flags and this OpenMP runtime, and have the bytes that were built
    (all of it is in its name); another is refused by name, and never opened. Where the best instruction set has none, it is built
    now; where there is no compiler either, the best one that lies there serves, and says so in `slower`.

    The name of a file that is built now is a digest of source, compiler, flags and OpenMP runtime. It is built beside its place
    under a lock and moved there whole, so that processes that start together neither build twice nor see half a file. Where the
    folder cannot be written, a temporary folder of this process serves.

    Args:
        instruction_set: Another than the best one, for tests.
        cache: Folder of libraries that are built now; by default `.cache/veneer/native` of the home folder.
        prebuilt: Folder of libraries that were built ahead; by default `PREBUILT`.

    Raises:
        NativeFormError: None was built ahead, and there is no compiler, or the build or the load fails.
    """
    chosen = instruction_set or best_instruction_set(processor_features())
    folder = prebuilt or PREBUILT
    refused: list[str] = []
    native = _find(folder, chosen, refused)
    for why in refused:
        _log.warning("a library that was built ahead is refused", extra={"cause": why})
    if native is not None:
        return native
    missing = f"{folder} holds no library for {chosen.name}" + "".join(f"; refused {why}" for why in refused)
    try:
        return _build(chosen, cache)
    except NativeFormError as error:
        lesser = INSTRUCTION_SETS[INSTRUCTION_SETS.index(chosen) + 1 :] if instruction_set is None else ()
        for one in lesser:
            if (native := _find(folder, one, [])) is not None:
                return replace(native, slower=f"{one.name} serves in place of {chosen.name}: {error}, and {missing}")
        raise NativeFormError(f"{error}, and {missing}") from error


def build_ahead(out: Path, instruction_sets: Iterable[InstructionSet]) -> list[Path]:
    """Builds a library for each instruction set into a folder, whatever this processor has; returns their files.

    What lay there for the same instruction set is removed.

    Raises:
        NativeFormError: No compiler, or a build fails.
    """
    runtime, compiler = _openmp_runtime(), _compiler()
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for one in instruction_sets:
        with tempfile.TemporaryDirectory(dir=out) as folder:
            linked = _compiled(Path(folder), compiler, one, runtime)
            path = out / f"{one.slug}-{_source_key(one, runtime)}-{_content_key(linked)}.so"
            for old in out.iterdir():
                if (named := _FILE.fullmatch(old.name)) and named["set"] == one.slug:
                    old.unlink()
            linked.chmod(0o644)
            linked.replace(path)
        paths.append(path)
    return paths


def instruction_sets_here() -> tuple[InstructionSet, ...]:
    """Returns what a compiler of this architecture can build for: on ARM the portable form alone, whose vectors are NEON."""
    return INSTRUCTION_SETS if _is_x86() else INSTRUCTION_SETS[-1:]


def _find(folder: Path, chosen: InstructionSet, refused: list[str]) -> Native | None:
    """Opens the library of an instruction set that was built ahead; what is not right is added to a list, with the reason."""
    try:
        files = sorted(entry for entry in folder.iterdir() if entry.name.startswith(f"{chosen.slug}-"))
    except OSError:
        return None
    expected = _source_key(chosen, _openmp_runtime())
    for path in files:
        named = _FILE.fullmatch(path.name)
        if named is None or named["set"] != chosen.slug:
            refused.append(f"{path.name}: its name is not that of a library that was built ahead")
        elif named["source"] != expected:
            refused.append(f"{path.name}: it is of another source, architecture or OpenMP runtime")
        else:
            try:
                if _content_key(path) != named["content"]:
                    refused.append(f"{path.name}: its bytes are not those that were built")
                    continue
                return _open(path, chosen)
            except (OSError, NativeFormError) as error:
                refused.append(f"{path.name}: {error}")
    return None


def _build(chosen: InstructionSet, cache: Path | None) -> Native:
    compiler = _compiler()
    runtime = _openmp_runtime()
    version = _run([compiler, "--version"])
    parts = (*_texts(), compiler, version, " ".join(_FLAGS + chosen.flags), str(runtime))
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32] + ".so"
    try:
        cache = cache or Path.home() / _CACHE
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = _built(cache / name, compiler, chosen, runtime)
    except (OSError, RuntimeError):  # no home folder is a RuntimeError
        path = _built(Path(tempfile.mkdtemp(prefix="veneer-native-")) / name, compiler, chosen, runtime)
    return _open(path, chosen)


def _compiler() -> str:
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        raise NativeFormError("no C++ compiler (c++, g++ or clang++) is on the search path")
    return compiler


def _texts() -> list[str]:
    return [path.read_text() for path in (SOURCE, *sorted(SOURCE.parent.glob("cpp/*.hpp")))]


def _source_key(chosen: InstructionSet, runtime: Path | None) -> str:
    """Digest of what a library that is built ahead is made of; the compiler is not there where it is looked for."""
    parts = (*_texts(), " ".join(_FLAGS + chosen.flags), platform.machine(), "" if runtime is None else runtime.name)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _content_key(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def _is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def _open(path: Path, instruction_set: InstructionSet) -> Native:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeFormError(f"the built library does not load: {error}") from error
    functions: dict[tuple[str, torch.dtype], Callable[..., None]] = {}
    for name, signature in _SIGNATURES.items():
        for dtype, suffix in _SUFFIX.items():
            try:
                function = library[f"{name}_{suffix}"]
            except AttributeError as error:
                raise NativeFormError(f"the built library has no {name}_{suffix}") from error
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
                _compiled(Path(folder), compiler, chosen, runtime).replace(path)
    return path


def _compiled(folder: Path, compiler: str, chosen: InstructionSet, runtime: Path | None) -> Path:
    compiled, linked = folder / "cpu.o", folder / "cpu.so"
    _run([compiler, *_FLAGS, *chosen.flags, "-c", str(SOURCE), "-o", str(compiled)])
    openmp = "-fopenmp" if runtime is None else str(runtime)
    _run([compiler, "-shared", str(compiled), openmp, "-o", str(linked)])
    return linked


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


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    here = {one.slug: one for one in instruction_sets_here()}
    parser = argparse.ArgumentParser(prog="kernels.native", description="The native CPU form.")
    build = parser.add_subparsers(dest="command", required=True).add_parser("build", help="build libraries ahead")
    build.add_argument("--out", type=Path, required=True, help=f"folder to build into; {PREBUILT} is where they are looked for")
    build.add_argument("--isa", choices=here, nargs="+", default=list(here), help="instruction sets; all by default")
    arguments = parser.parse_args(argv)
    try:
        for path in build_ahead(arguments.out, [here[slug] for slug in arguments.isa]):
            print(path)
    except (NativeFormError, OSError) as error:
        print(f"kernels.native: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
