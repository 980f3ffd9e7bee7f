"""Files that their owner alone may read, from the moment that they are made."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Literal, cast

_OWNER_ONLY = 0o600


def open_private(path: Path, mode: Literal["xb", "wb"]) -> BinaryIO:
    """Makes a file for writing that its owner alone may read; the file object is the only owner of the descriptor.

    Args:
        path: The file.
        mode: `xb` refuses a file that is there; `wb` empties it, and leaves its mode as it is.

    Raises:
        FileExistsError: The file is there, and the mode is `xb`.
        OSError: It cannot be made.
    """
    return cast("BinaryIO", open(path, mode, opener=_open))


def _open(path: str, flags: int) -> int:
    return os.open(path, flags, _OWNER_ONLY)
