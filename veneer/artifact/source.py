"""Bytes of a file by offset, each read once when asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import UnsupportedOperation
from pathlib import Path
from typing import BinaryIO

from veneer.errors import DataLossError


class Source:
    """Reads a file by position, without a shared cursor where the operating system allows it.

    Borrows the file: whoever opened it closes it.

    Args:
        file: A seekable binary file.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        try:
            file.fileno()
            self._has_descriptor = True
        except (UnsupportedOperation, AttributeError):
            self._has_descriptor = False
        # Not by fstat: some C libraries make it a call that takes a path, which the jail of the publish check refuses.
        position = file.tell()
        self.size_bytes = file.seek(0, os.SEEK_END)
        file.seek(position)

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Reads exactly the wanted bytes.

        Raises:
            DataLossError: The file ends before them.
            ValueError: The file was closed: its number may be another file's by now.
        """
        if not self._has_descriptor:
            self._file.seek(offset)
            data = self._file.read(size_bytes)
        else:
            descriptor = self._file.fileno()
            data = os.pread(descriptor, size_bytes, offset)
            while 0 < len(data) < size_bytes:  # a single read gives at most 2 GiB, and fewer when a signal comes
                more = os.pread(descriptor, size_bytes - len(data), offset + len(data))
                if not more:
                    break
                data += more
        if len(data) != size_bytes:
            raise DataLossError(f"the file ended at byte {offset + len(data)}, {offset + size_bytes} were expected")
        return data


@contextmanager
def opened(file: BinaryIO | Path) -> Iterator[Source]:
    """Opens a path for reading, or borrows an open file."""
    if isinstance(file, Path):
        with file.open("rb") as stream:
            yield Source(stream)
    else:
        yield Source(file)
