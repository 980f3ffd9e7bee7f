"""Free loopback ports, and folders whose sockets have names short enough for the kernel."""

from __future__ import annotations

import hashlib
import socket
import tempfile
from pathlib import Path

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
