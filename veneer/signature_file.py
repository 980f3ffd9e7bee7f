"""The signature file that comes with an adapter; `veneer.signature` is about what is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from veneer.errors import InvalidArgumentError, Violation

SIGNATURE_NAME: Final = "model.sig"
"""What the tools call it, in the folder that it is about."""

MAX_SIGNATURE_BYTES: Final = 64 << 10
"""Most that it may have; one that lists 300 files fits."""


def read_signature(folder: Path, signature: Path | None = None) -> bytes:
    """Reads the signature of an adapter's folder.

    Args:
        folder: The folder.
        signature: The file; None: `model.sig` in the folder, if there is one.

    Returns:
        Its bytes; none when there is no file and none was named.

    Raises:
        InvalidArgumentError: The file that was named is not there, or it is empty or too large.
    """
    path = folder / SIGNATURE_NAME if signature is None else signature
    if not path.is_file():
        if signature is None:
            return b""
        raise _refused(path, "is no file")
    size_bytes = path.stat().st_size
    if not 0 < size_bytes <= MAX_SIGNATURE_BYTES:
        raise _refused(path, f"has {size_bytes} bytes; 1 to {MAX_SIGNATURE_BYTES} are allowed")
    return path.read_bytes()


def _refused(path: Path, description: str) -> InvalidArgumentError:
    return InvalidArgumentError.of([Violation(str(path), description)])
