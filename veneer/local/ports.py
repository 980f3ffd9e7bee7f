"""Free loopback ports, and folders whose sockets have names short enough for the kernel."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import tempfile
from pathlib import Path

from veneer.errors import FailedPreconditionError
from veneer.local.unprivileged import NOBODY

_MAX_SOCKET_FOLDER = 80  # sun_path holds 107 bytes; the rest is for the socket's own name


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now. Somebody may take it before the caller does: be ready to retry."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether nobody listens on a TCP port of 127.0.0.1 now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a connection that just ended does not hold the port
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def short_folder(folder: Path) -> Path:
    """`folder` itself when a unix socket fits in it, else a name in the temporary folder that depends on `folder` alone."""
    if len(str(folder).encode()) <= _MAX_SOCKET_FOLDER:
        return folder
    return Path(tempfile.gettempdir()) / f"veneer-{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"


def make_private(folder: Path) -> None:
    """Makes a folder that only we may enter, or checks that the one that is there is ours.

    Raises:
        FailedPreconditionError: Somebody else made it: sockets in it could be swapped.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    owners = {os.geteuid(), *((NOBODY,) if os.geteuid() == 0 else ())}  # Postgres of a root user may run as nobody
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in owners or found.st_mode & 0o022:
        raise FailedPreconditionError(f"{folder} belongs to somebody else: remove it, or name a shorter state folder")
