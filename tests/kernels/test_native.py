"""Building, choosing and loading the native form."""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import kernels.native
from kernels.native import (
    INSTRUCTION_SETS,
    NativeFormError,
    best_instruction_set,
    build_ahead,
    instruction_sets_here,
    load_native,
    main,
    openmp_runtimes,
    processor_features,
)

ROOT = Path(__file__).resolve().parents[2]


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


@pytest.fixture
def ahead(small_source: Path, tmp_path: Path) -> Path:
    """A folder of libraries of the small source that were built ahead."""
    folder = tmp_path / "ahead"
    build_ahead(folder, INSTRUCTION_SETS)
    return folder


def library(folder: Path, slug: str) -> Path:
    (path,) = folder.glob(f"{slug}-*.so")
    return path


def best_slug() -> str:
    return best_instruction_set(processor_features()).slug


_WITHOUT_COMPILER = """
import sys
from pathlib import Path
import kernels.native
kernels.native.SOURCE = Path(sys.argv[1])
native = kernels.native.load_native(cache=Path("/nowhere"), prebuilt=Path(sys.argv[2]))
print(native.path.name, native.slower)
"""


def test_a_library_that_was_built_ahead_serves_where_there_is_no_compiler(small_source: Path, ahead: Path) -> None:
    command = [sys.executable, "-c", _WITHOUT_COMPILER, str(small_source), str(ahead)]
    done = subprocess.run(command, env={"PATH": ""}, cwd=ROOT, capture_output=True, text=True, check=True, timeout=280)
    assert done.stdout == f"{library(ahead, best_slug()).name} \n"


def test_what_was_built_ahead_is_taken_before_anything_is_built(ahead: Path, tmp_path: Path) -> None:
    assert load_native(cache=tmp_path / "cache", prebuilt=ahead).path.parent == ahead
    assert not (tmp_path / "cache").exists()


def test_a_lesser_library_serves_where_the_best_is_not_there_and_says_so(
    ahead: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernels.native, "processor_features", lambda: INSTRUCTION_SETS[2].needs)
    assert load_native(cache=tmp_path, prebuilt=ahead).slower == ""
    load_native.cache_clear()
    library(ahead, "avx2").unlink()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    native = load_native(cache=tmp_path, prebuilt=ahead)
    assert native.instruction_set.name == "portable"
    for word in ("portable serves in place of AVX2", "no C++ compiler", f"{ahead} holds no library for AVX2"):
        assert word in native.slower


def _flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _renamed(path: Path) -> None:
    path.rename(path.with_name(f"{path.stem}0.so"))


def _of_another_source(path: Path) -> None:
    slug, source, content = path.name.rsplit("-", 2)
    path.rename(path.with_name(f"{slug}-{'0' * len(source)}-{content}"))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize(
    ("damage", "says"),
    [(_flipped, "its bytes"), (_cut, "its bytes"), (_renamed, "its name"), (_of_another_source, "another source")],
)
def test_a_library_that_is_not_what_was_built_is_refused_by_name(
    ahead: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, damage: Callable, says: str
) -> None:
    damage(library(ahead, best_slug()))
    (damaged,) = ahead.glob(f"{best_slug()}-*.so")
    native = load_native(cache=tmp_path / "cache", prebuilt=ahead)
    assert native.path.parent == tmp_path / "cache", "it is built now"
    (record,) = caplog.records
    assert damaged.name in record.cause
    assert says in record.cause
    load_native.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for path in ahead.iterdir():
        if path != damaged:
            path.unlink()
    with pytest.raises(NativeFormError, match="no C\\+\\+ compiler") as caught:
        load_native(cache=tmp_path / "other", prebuilt=ahead)
    assert damaged.name in str(caught.value)
    assert says in str(caught.value)


def test_bytes_that_are_no_library_are_refused_though_their_digest_is_right(ahead: Path, tmp_path: Path) -> None:
    path = library(ahead, best_slug())
    path.write_bytes(b"no library")
    slug, source, _ = path.name.rsplit("-", 2)
    path.rename(path.with_name(f"{slug}-{source}-{hashlib.sha256(b'no library').hexdigest()[:32]}.so"))
    assert load_native(cache=tmp_path / "cache", prebuilt=ahead).path.parent == tmp_path / "cache"


def test_a_changed_source_makes_what_was_built_ahead_stale(small_source: Path, ahead: Path, tmp_path: Path) -> None:
    small_source.write_text(small_source.read_text() + "// another\n")
    assert load_native(cache=tmp_path / "cache", prebuilt=ahead).path.parent == tmp_path / "cache"


def test_building_ahead_again_leaves_one_library_for_each_set(small_source: Path, ahead: Path) -> None:
    small_source.write_text(small_source.read_text() + "// another\n")
    again = build_ahead(ahead, INSTRUCTION_SETS[2:])
    assert len(list(ahead.iterdir())) == len(INSTRUCTION_SETS)
    assert again == [library(ahead, "avx2"), library(ahead, "portable")]


def test_the_command_builds_what_it_is_asked_for(small_source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--out", str(tmp_path / "ahead"), "--isa", "avx2", "portable"]) == 0
    assert sorted(capsys.readouterr().out.split()) == sorted(map(str, (tmp_path / "ahead").iterdir()))
    small_source.write_text("this is no program")
    assert main(["build", "--out", str(tmp_path / "ahead")]) == 1
    assert "the compiler fails" in capsys.readouterr().err


def test_on_arm_the_portable_form_alone_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert [one.name for one in instruction_sets_here()] == ["portable"]


_PRODUCTS = """
import sys, torch
from pathlib import Path
from kernels.native import INSTRUCTION_SETS, load_native, processor_features
from dataplane.model.pieces import NativePieces
torch.manual_seed(5)
x, y, weight = torch.randn(9, 576), torch.randn(9, 576), torch.randn(576)
added = (x + y).double()
want = added / (added.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
for one in INSTRUCTION_SETS:
    if one.needs <= processor_features():
        native = load_native(one, prebuilt=Path(sys.argv[1]))
        assert native.path.parent == Path(sys.argv[1])
        got = NativePieces(native, torch.float32).add_norm(x.clone(), y, weight, 1e-5)
        torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=8e-6)
        print(one.name)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_library_that_this_processor_runs_computes_as_the_reference_without_a_compiler(tmp_path: Path) -> None:
    build_ahead(tmp_path, instruction_sets_here())
    command = [sys.executable, "-c", _PRODUCTS, str(tmp_path)]
    done = subprocess.run(command, env={"PATH": ""}, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [one.name for one in INSTRUCTION_SETS if one.needs <= processor_features()]
