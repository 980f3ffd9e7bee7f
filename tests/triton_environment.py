"""Another version of Triton beside the installed one: `python tests/triton_environment.py 3.6.0` prints where it lies.

It is made once, by pip and the user's own pip settings, in the user's cache folder, some 700 MB with a numpy that this version's
interpreter works with.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_NUMPY = "numpy<2.4"  # triton 3.6's interpreter breaks with 2.4
_NO_INDEX = ("Could not find a version", "No matching distribution", "Max retries", "NewConnectionError", "Temporary failure")


class NoIndexError(RuntimeError):
    """No package index could be reached, or it lacks that version."""


def prepare(version: str) -> Path:
    """Makes sure that this version lies in its folder, and returns the folder.

    Raises:
        NoIndexError: pip found no index, or not this version in it.
        subprocess.CalledProcessError: pip failed otherwise.
    """
    cache = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(cache) if cache else Path.home() / ".cache") / "veneer" / f"triton-{version}-{sys.implementation.cache_tag}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"installing triton {version} into {folder} (once) …", file=sys.stderr)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries=1", "--timeout=20"]
        command = [*pip, "--no-deps", "--target", str(made), f"triton=={version}", _NUMPY]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0 and any(sign in done.stderr for sign in _NO_INDEX):
            raise NoIndexError(f"triton {version} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
        done.check_returncode()
        try:
            made.rename(folder)
        except OSError:  # another process was first
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


if __name__ == "__main__":
    print(prepare(sys.argv[1]))
