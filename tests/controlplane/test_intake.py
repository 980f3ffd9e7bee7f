"""The publish check as the control plane runs it: in a child that is locked in."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from controlplane import intake
from controlplane.intake import JailedChecks
from tests.fixtures.adapters import AdapterFiles, make_adapter_folder
from tests.fixtures.descriptors import num_open_files
from veneer.artifact import ArtifactError, BaseDescription, Limits, Report, check
from veneer.errors import UnavailableError

_ROOT = Path(__file__).resolve().parents[2]
_WITHOUT_FORK_HANDLERS = {**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0"}  # as the product runs where it uses uvloop


async def _check(
    folder: Path,
    base: BaseDescription,
    *,
    limits: Limits | None = None,
    timeout_s: float = 30,
    jail: JailedChecks | None = None,
    **more: Any,
) -> Report:
    """A check; by a jail of its own unless one is given."""
    if jail is None:
        async with JailedChecks(**more) as jail:
            return await _check(folder, base, limits=limits, timeout_s=timeout_s, jail=jail)
    files = (folder / "adapter_config.json", folder / "adapter_model.safetensors")
    return await jail(*files, base, limits or Limits(), timeout_s=timeout_s)


def _instead(code: str) -> str:
    """Start of a server whose children run this code in place of the check."""
    serving = "from controlplane.fork_server import serve; serve(lambda order: exec(CODE))"
    return f"import sys; sys.path += sys.argv[1:3]; CODE = {code!r}; {serving}"


async def test_the_report_is_that_of_the_plain_check(tmp_path: Path, tiny_base: BaseDescription) -> None:
    folder = make_adapter_folder(
        tmp_path, tiny_base, ranks={"q_proj": 3, "down_proj": 5}, modules=("q_proj", "down_proj"), dtype="BF16"
    )
    files = AdapterFiles.of(folder)
    assert await _check(folder, tiny_base) == check(files.config, files.weights, tiny_base, norms=True).report


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
    with pytest.raises(ArtifactError, match="exceed its time of 1 s"):
        await _check(folder, tiny_base, timeout_s=1, limits=Limits(max_pattern_steps=1 << 62))


async def test_a_child_ended_for_its_processor_time_is_refused_for_its_time(
    tmp_path: Path, tiny_base: BaseDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot = """import os, signal; os.write(1, b'{"jail": null}\\n'); os.kill(os.getpid(), signal.SIGXCPU)"""
    monkeypatch.setattr(intake, "_BOOT", _instead(boot))
    with pytest.raises(ArtifactError, match="exceed its time of 30 s"):
        await _check(make_adapter_folder(tmp_path, tiny_base), tiny_base)


async def test_a_child_that_dies_is_a_typed_refusal(
    tmp_path: Path, tiny_base: BaseDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        intake,
        "_BOOT",
        _instead("""import os, signal; os.write(1, b'{"jail": null}\\n'); os.kill(os.getpid(), signal.SIGSEGV)"""),
    )
    with pytest.raises(ArtifactError, match="ended with status -11"):
        await _check(make_adapter_folder(tmp_path, tiny_base), tiny_base)


async def test_a_child_that_answers_without_end_is_cut_off(
    tmp_path: Path, tiny_base: BaseDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        intake, "_BOOT", _instead("import os\nos.write(1, b'{\"jail\": null}\\n')\nwhile True: os.write(1, b'x' * 65536)")
    )
    with pytest.raises(ArtifactError, match="exceed its limits"):
        await _check(make_adapter_folder(tmp_path, tiny_base), tiny_base)


async def test_without_a_jail_nothing_is_read_and_the_cause_is_named(
    tmp_path: Path, tiny_base: BaseDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoiled = intake._BOOT.replace(
        "serve(", "import controlplane.jail as j; j._NUMBERS[j.platform.machine()]['seccomp'] = 9999; serve("
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


def _children(of: str = "") -> set[str]:
    parent = of or str(os.getpid())
    return {child for file in Path(f"/proc/{parent}/task").glob("*/children") for child in file.read_text().split()}


async def _gone(process: str) -> None:
    """Waits until a process has ended and was asked for its status."""
    while Path(f"/proc/{process}").exists():  # noqa: ASYNC110  the kernel has no event for the end of another's child
        await asyncio.sleep(0.01)


_NAME_THE_CHILD = "import os, json; os.write(1, json.dumps({'jail': str(os.getpid())}).encode() + b'\\n'); os._exit(0)"


async def _child_of(jail: JailedChecks, folder: Path, base: BaseDescription) -> str:
    """Process id of the child of a check."""
    with pytest.raises(UnavailableError) as error:
        await _check(folder, base, jail=jail)
    return error.value.message.partition("could not be set up: ")[2]


async def test_cancelling_ends_the_child_and_closes_the_files(
    tmp_path: Path, tiny_base: BaseDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_adapter_folder(tmp_path / "adapter", tiny_base)
    os.mkfifo(tmp_path / "started")
    started = os.open(tmp_path / "started", os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setattr(
        intake, "_BOOT", _instead(f"open({str(tmp_path / 'started')!r}, 'w').write('x'); __import__('signal').pause()")
    )
    others = _children()
    async with JailedChecks() as jail:
        [server] = _children() - others
        before = num_open_files()
        task = asyncio.create_task(_check(folder, tiny_base, jail=jail))
        seen = asyncio.Event()
        asyncio.get_running_loop().add_reader(started, seen.set)
        await seen.wait()
        asyncio.get_running_loop().remove_reader(started)
        assert len(_children(server)) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert _children(server) == set()
        assert num_open_files() <= before
    os.close(started)
    assert _children() == others


async def test_each_check_is_a_process_of_its_own_and_the_server_stays(
    tmp_path: Path, tiny_base: BaseDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "_BOOT", _instead(_NAME_THE_CHILD))
    folder = make_adapter_folder(tmp_path, tiny_base)
    others = _children()
    async with JailedChecks() as jail:
        [server] = _children() - others
        children = await asyncio.gather(*(_child_of(jail, folder, tiny_base) for _ in range(6)))
        assert len(set(children)) == 6
        assert _children() == {server} | others


async def test_a_server_is_replaced_after_a_child_that_did_not_end_by_itself(
    tmp_path: Path, tiny_base: BaseDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """import os, signal; os.write(1, b'{"jail": null}\\n'); os.kill(os.getpid(), signal.SIGSEGV)"""
    monkeypatch.setattr(intake, "_BOOT", _instead(code))
    folder = make_adapter_folder(tmp_path, tiny_base)
    others = _children()
    async with JailedChecks() as jail:
        [server] = _children() - others
        with pytest.raises(ArtifactError, match="ended with status -11"):
            await _check(folder, tiny_base, jail=jail)
        monkeypatch.setattr(intake, "_BOOT", _instead(_NAME_THE_CHILD))
        await _child_of(jail, folder, tiny_base)
        await asyncio.wait_for(_gone(server), 60)


async def test_a_server_is_replaced_after_so_many_children(
    tmp_path: Path, tiny_base: BaseDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "_MAX_FORKS", 2)
    folder = make_adapter_folder(tmp_path, tiny_base)
    others = _children()
    async with JailedChecks() as jail:
        servers = _children() - others
        for _ in range(5):
            await _check(folder, tiny_base, jail=jail)
            servers |= _children() - others
    assert len(servers) == 3
    assert _children() == others


async def test_after_a_server_was_killed_checks_go_on(tmp_path: Path, tiny_base: BaseDescription) -> None:
    folder = make_adapter_folder(tmp_path, tiny_base)
    others = _children()
    async with JailedChecks() as jail:
        for _ in range(3):
            await _check(folder, tiny_base, jail=jail)
            [server] = _children() - others
            os.kill(int(server), signal.SIGKILL)
            await asyncio.wait_for(_gone(server), 60)


async def test_the_child_sees_no_environment_and_no_site_packages(
    tmp_path: Path, tiny_base: BaseDescription, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VENEER_CONTROLPLANE_PEPPER", "secret")
    show = (
        "import os, sys, json; os.write(1, json.dumps({'jail': json.dumps([sorted(os.environ), sys.flags.isolated])}).encode())"
    )
    monkeypatch.setattr(intake, "_BOOT", _instead(show))
    with pytest.raises(UnavailableError) as error:
        await _check(make_adapter_folder(tmp_path, tiny_base), tiny_base)
    names, isolated = json.loads(error.value.message.partition("could not be set up: ")[2])
    assert isolated == 1
    assert set(names) <= {*intake._ENVIRONMENT, "LC_CTYPE"}


def test_under_uvloop_no_check_closes_a_file_that_is_another_ones(tmp_path: Path, tiny_base: BaseDescription) -> None:
    folder = make_adapter_folder(tmp_path / "adapter", tiny_base)
    (tmp_path / "base.json").write_text(tiny_base.to_json())
    command = [sys.executable, "-m", "tests.controlplane.checks_beside_others", str(tmp_path / "base.json"), str(folder), "400"]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, cwd=_ROOT, env=_WITHOUT_FORK_HANDLERS)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout, "nothing was seen"
    for num_opened, num_faults in json.loads(ran.stdout):
        assert num_opened > 1000
        assert num_faults == 0
