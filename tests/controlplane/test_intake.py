"""The publish check as the control plane runs it: in a child that is locked in."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from controlplane import intake
from controlplane.intake import check_in_jail
from tests.fixtures.adapters import AdapterFiles, make_adapter_folder
from veneer.artifact import ArtifactError, BaseDescription, Limits, Report, check
from veneer.errors import UnavailableError


async def _check(
    folder: Path, base: BaseDescription, *, limits: Limits | None = None, timeout_s: float = 30, **more: Any
) -> Report:
    files = (folder / "adapter_config.json", folder / "adapter_model.safetensors")
    return await check_in_jail(*files, base, limits or Limits(), timeout_s=timeout_s, **more)


async def test_the_report_is_that_of_the_plain_check(tmp_path: Path, tiny_base: BaseDescription) -> None:
    folder = make_adapter_folder(
        tmp_path, tiny_base, ranks={"q_proj": 3, "down_proj": 5}, modules=("q_proj", "down_proj"), dtype="BF16"
    )
    files = AdapterFiles.of(folder)
    assert await _check(folder, tiny_base) == check(files.config, files.weights, tiny_base).report


async def test_a_refusal_lists_every_fault_as_the_plain_check_does(tmp_path: Path, tiny_base: BaseDescription) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        names = list(tensors)
        del tensors[names[0]]
        tensors["base_model.model.lm_head.weight"] = tensors.pop(names[3])

    folder = make_adapter_folder(tmp_path, tiny_base, config={"use_dora": True, "mystery": 1}, edit=spoil)
    files = AdapterFiles.of(folder)
    with pytest.raises(ArtifactError) as plain:
        check(files.config, files.weights, tiny_base)
    with pytest.raises(ArtifactError) as jailed:
        await _check(folder, tiny_base)
    assert len(plain.value.violations) >= 5
    assert jailed.value.violations == plain.value.violations


@pytest.mark.parametrize(
    "config",
    [
        b"",
        b"[" * 500_000,
        b'{"a":' * 1000,
        b"\xff\xfe",
        b"{" + b'"k": 1e999' + b"}",
        b'{"r": ' + b"9" * 100_000 + b"}",
        b'{"r": NaN}',
    ],
)
async def test_a_hostile_configuration_is_a_typed_refusal(config: bytes, tmp_path: Path, tiny_base: BaseDescription) -> None:
    folder = make_adapter_folder(tmp_path, tiny_base)
    (folder / "adapter_config.json").write_bytes(config)
    with pytest.raises(ArtifactError, match=r"adapter_config\.json"):
        await _check(folder, tiny_base)


async def test_a_configuration_that_needs_too_much_memory_is_a_typed_refusal(tmp_path: Path, tiny_base: BaseDescription) -> None:
    folder = make_adapter_folder(tmp_path, tiny_base)
    (folder / "adapter_config.json").write_bytes(b'{"a": [' + b"[]," * 1_000_000 + b"[]]}")
    with pytest.raises(ArtifactError, match="exceed its memory of 33554432 bytes"):
        await _check(folder, tiny_base, limits=Limits(max_config_bytes=1 << 24), memory_bytes=32 << 20)


async def test_a_check_that_takes_too_long_is_ended_and_refused(tmp_path: Path, tiny_base: BaseDescription) -> None:
    patterns = {f"(a|.*|b*)*(c|.*)*{number}(q_proj)+": 8 for number in range(4000)}
    folder = make_adapter_folder(
        tmp_path, tiny_base, modules=[module.name for module in tiny_base.modules], config={"rank_pattern": patterns}
    )
    started = time.monotonic()
    with pytest.raises(ArtifactError, match="exceed its time of 1 s"):
        await _check(folder, tiny_base, timeout_s=1, limits=Limits(max_pattern_steps=1 << 62))
    assert time.monotonic() - started < 10


async def test_a_child_ended_for_its_processor_time_is_refused_for_its_time(
    tmp_path: Path, tiny_base: BaseDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot = """import os, signal; os.write(1, b'{"jail": null}\\n'); os.kill(os.getpid(), signal.SIGXCPU)"""
    monkeypatch.setattr(intake, "_BOOT", boot)
    with pytest.raises(ArtifactError, match="exceed its time of 30 s"):
        await _check(make_adapter_folder(tmp_path, tiny_base), tiny_base)


async def test_a_child_that_dies_is_a_typed_refusal(
    tmp_path: Path, tiny_base: BaseDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        intake, "_BOOT", """import os, signal; os.write(1, b'{"jail": null}\\n'); os.kill(os.getpid(), signal.SIGSEGV)"""
    )
    with pytest.raises(ArtifactError, match="ended with status -11"):
        await _check(make_adapter_folder(tmp_path, tiny_base), tiny_base)


async def test_a_child_that_answers_without_end_is_cut_off(
    tmp_path: Path, tiny_base: BaseDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "_BOOT", "import os\nos.write(1, b'{\"jail\": null}\\n')\nwhile True: os.write(1, b'x' * 65536)")
    with pytest.raises(ArtifactError, match="exceed its limits"):
        await _check(make_adapter_folder(tmp_path, tiny_base), tiny_base)


async def test_without_a_jail_nothing_is_read_and_the_cause_is_named(
    tmp_path: Path, tiny_base: BaseDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoiled = intake._BOOT.replace(
        "main(", "import controlplane.jail as j; j._NUMBERS[j.platform.machine()]['seccomp'] = 9999; main("
    )
    monkeypatch.setattr(intake, "_BOOT", spoiled)
    with pytest.raises(UnavailableError, match="the kernel refused the seccomp filter: Function not implemented"):
        await _check(make_adapter_folder(tmp_path, tiny_base), tiny_base)


async def test_a_child_that_cannot_start_is_unavailable(
    tmp_path: Path, tiny_base: BaseDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake.sys, "executable", str(tmp_path / "absent"))
    with pytest.raises(UnavailableError, match="could not be started"):
        await _check(make_adapter_folder(tmp_path / "adapter", tiny_base), tiny_base)


async def test_links_and_pipes_are_refused_without_waiting(tmp_path: Path, tiny_base: BaseDescription) -> None:
    folder = make_adapter_folder(tmp_path, tiny_base)
    (folder / "adapter_config.json").rename(folder / "elsewhere")
    (folder / "adapter_config.json").symlink_to(folder / "elsewhere")
    with pytest.raises(ArtifactError, match="cannot be opened"):
        await _check(folder, tiny_base)
    (folder / "adapter_config.json").unlink()
    os.mkfifo(folder / "adapter_config.json")
    with pytest.raises(ArtifactError, match="regular file"):
        await _check(folder, tiny_base)


def _open_files() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def _children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


async def test_cancelling_ends_the_child_and_closes_the_files(
    tmp_path: Path, tiny_base: BaseDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_adapter_folder(tmp_path / "adapter", tiny_base)
    os.mkfifo(tmp_path / "started")
    started = os.open(tmp_path / "started", os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setattr(intake, "_BOOT", f"open({str(tmp_path / 'started')!r}, 'w').write('x'); __import__('signal').pause()")
    before = _open_files(), _children()
    task = asyncio.create_task(_check(folder, tiny_base))
    seen = asyncio.Event()
    asyncio.get_running_loop().add_reader(started, seen.set)
    await seen.wait()
    asyncio.get_running_loop().remove_reader(started)
    assert len(_children()) == len(before[1]) + 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    os.close(started)
    assert _children() == before[1]
    assert len(_open_files()) == len(before[0]) - 1


async def test_the_child_sees_no_environment_and_no_site_packages(
    tmp_path: Path, tiny_base: BaseDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VENEER_CONTROLPLANE_PEPPER", "secret")
    show = (
        "import os, sys, json; os.write(1, json.dumps({'jail': json.dumps([sorted(os.environ), sys.flags.isolated])}).encode())"
    )
    monkeypatch.setattr(intake, "_BOOT", show)
    with pytest.raises(UnavailableError) as error:
        await _check(make_adapter_folder(tmp_path, tiny_base), tiny_base)
    names, isolated = json.loads(error.value.message.partition("could not be set up: ")[2])
    assert isolated == 1
    assert set(names) <= {*intake._ENVIRONMENT, "LC_CTYPE"}
