from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from veneer.errors import FailedPreconditionError
from veneer.local.ports import free_port, is_free, make_private, short_folder
from veneer.local.state import StackState, read_state, remove_state, write_secret, write_state

STATE = StackState(
    control="a", control_operators="b", control_metrics="c", data="d", data_operators="e", data_metrics="f", operator_key="k",
    base_digest="g", base_name="h",
)  # fmt: skip


def test_a_state_is_read_as_it_was_written_until_it_is_removed(tmp_path: Path) -> None:
    assert read_state(tmp_path) is None
    write_state(tmp_path, STATE)
    assert read_state(tmp_path) == STATE
    remove_state(tmp_path)
    assert read_state(tmp_path) is None


def test_a_state_of_another_version_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "stack.json").write_text('{"control": "a", "colour": "blue"}')
    with pytest.raises(FailedPreconditionError, match=r"run `veneer --state \S+ down`"):
        read_state(tmp_path)


def test_a_secret_is_for_the_user_only_whatever_the_mask_and_whatever_was_there(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("old")
    path.chmod(0o644)
    (tmp_path / "key.part").write_text("left by a crash")
    mask = os.umask(0)
    try:
        write_secret(path, "new")
    finally:
        os.umask(mask)
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["key"]


def test_a_free_port_is_free(tmp_path: Path) -> None:
    assert is_free(free_port())


def test_only_a_long_folder_gets_a_short_name_that_stays_the_same(tmp_path: Path) -> None:
    long = Path("/") / ("x" * 90)
    assert short_folder(Path("/short")) == Path("/short")
    assert short_folder(long) == short_folder(long)
    assert len(str(short_folder(long))) < 80
    assert short_folder(long) != short_folder(long / "y")


def test_a_folder_for_sockets_that_somebody_else_could_write_is_refused(tmp_path: Path) -> None:
    make_private(tmp_path / "own")
    make_private(tmp_path / "own")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    for name in ("open", "link"):
        with pytest.raises(FailedPreconditionError, match="somebody else"):
            make_private(tmp_path / name)
