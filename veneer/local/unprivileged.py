"""Runs a command for a root user as somebody who is not root: `python unprivileged.py COMMAND …`.

Postgres refuses to run as root. In a user namespace of its own the process is `nobody` to itself and root to the file system, so
no account, no change of owner and no change of any folder's mode is needed. A program of its own rather than a hook between fork
and exec, because a process with threads (gRPC has some) must not run Python there. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

NOBODY = 65534
_CLONE_NEWUSER = 0x10000000


def enter_user_namespace() -> None:
    """Makes this process `nobody` in a new user namespace.

    Raises:
        OSError: The kernel or a sandbox forbids it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUSER) != 0:
        raise OSError(ctypes.get_errno(), "unshare of the user namespace")
    for name, value in (("setgroups", "deny"), ("uid_map", f"{NOBODY} 0 1"), ("gid_map", f"{NOBODY} 0 1")):
        Path(f"/proc/self/{name}").write_text(value)


def main() -> None:
    """Enters the namespace and becomes the command."""
    enter_user_namespace()
    os.execv(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
