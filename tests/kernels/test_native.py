"""Building, choosing and loading the native form."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels.native
from kernels.native import INSTRUCTION_SETS, NativeFormError, best_instruction_set, load_native, openmp_runtimes


@pytest.fixture
def small_source(tmp_path, monkeypatch):
    """A source that builds in no time and has the entry points."""
    names = [f"{name}_{dtype}" for name in kernels.native._SIGNATURES for dtype in ("bfloat16", "float32")]
    source = tmp_path / "small.cpp"
    source.write_text("".join(f'extern "C" __attribute__((visibility("default"))) void {name}() {{}}\n' for name in names))
    monkeypatch.setattr(kernels.native, "SOURCE", source)
    load_native.cache_clear()
    yield source
    load_native.cache_clear()


@pytest.mark.parametrize(
    ("features", "name"),
    [
        ({"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "sse2"}, "AVX512-BF16"),
        ({"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq"}, "AVX-512"),
        ({"avx2", "fma", "avx512f"}, "AVX2"),
        ({"avx2"}, "portable"),
        (set(), "portable"),
    ],
)
def test_the_best_instruction_set_that_the_processor_has_is_chosen(features: set[str], name: str) -> None:
    assert best_instruction_set(frozenset(features)).name == name


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
def test_one_openmp_runtime_serves_torch_and_the_native_form() -> None:
    code = (
        "import torch; from kernels.native import load_native, openmp_runtimes; torch.randn(300, 300) @ torch.randn(300, 300); "
        "load_native(); print(len(openmp_runtimes()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=280)
    assert done.stdout.strip() == "1"
    assert len(openmp_runtimes()) == 1


def test_a_library_is_built_once_for_each_source_and_instruction_set(small_source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = load_native(cache=cache)
    stamp = first.path.stat().st_mtime_ns
    load_native.cache_clear()
    assert load_native(cache=cache).path == first.path
    assert first.path.stat().st_mtime_ns == stamp
    assert load_native(INSTRUCTION_SETS[-1], cache=cache).path != first.path or first.instruction_set == INSTRUCTION_SETS[-1]
    small_source.write_text(small_source.read_text() + "// another\n")
    load_native.cache_clear()
    assert load_native(cache=cache).path != first.path
    assert not [entry for entry in cache.iterdir() if entry.is_dir()]


def test_a_folder_that_cannot_be_written_is_replaced_by_a_temporary_one(small_source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    native = load_native(cache=tmp_path / "file" / "cache")
    assert native.path.exists()
    shutil.rmtree(native.path.parent)


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch, small_source: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(NativeFormError, match="no C\\+\\+ compiler"):
        load_native(cache=tmp_path)


def test_what_the_compiler_says_is_told(small_source: Path, tmp_path: Path) -> None:
    small_source.write_text("this is no program")
    with pytest.raises(NativeFormError, match=r"the compiler fails: .*error"):
        load_native(cache=tmp_path / "cache")
    assert [entry.suffix for entry in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_damaged_library_is_said(small_source: Path, tmp_path: Path) -> None:
    path = load_native(cache=tmp_path / "cache").path
    load_native.cache_clear()
    other = tmp_path / "other" / path.name
    other.parent.mkdir()
    other.write_bytes(b"no library")
    with pytest.raises(NativeFormError, match="does not load"):
        load_native(cache=other.parent)


def test_a_dtype_without_a_native_form_is_said() -> None:
    with pytest.raises(NativeFormError, match=r"not in torch\.float16"):
        load_native().function("linear", torch.float16)
