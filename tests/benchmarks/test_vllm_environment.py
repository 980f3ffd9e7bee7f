"""What of vLLM's requirements is installed, and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.vllm_environment import VERSION, _wanted, prepare_vllm


def test_what_reads_pictures_sound_and_film_is_left_out_and_torch_loses_its_label() -> None:
    listed = [
        "torch==2.13.0+cpu; platform_machine == 'x86_64'",
        "torchvision; platform_machine != 'riscv64'",
        "torchaudio",
        "torchcodec>=0.14",
        "numpy",
    ]
    assert _wanted(listed) == ["torch==2.13.0; platform_machine == 'x86_64'", "numpy"]


def test_an_environment_that_is_whole_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "veneer-peer.txt").write_text(f"{VERSION} whole\n")
    assert prepare_vllm(tmp_path) == tmp_path / "bin" / "python"


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letters").touch()
    with pytest.raises(RuntimeError, match="not empty"):
        prepare_vllm(tmp_path)
    assert (tmp_path / "letters").exists()
