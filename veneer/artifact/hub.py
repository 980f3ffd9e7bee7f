"""What a folder is called: of a snapshot in the cache of the Hugging Face Hub, by its repository and not by its hash."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_REVISION: Final = re.compile(r"[0-9a-f]{40}")
_PREFIX: Final = "models--"


def folder_name(folder: Path) -> str:
    """The folder's own name; of a snapshot (…/models--organisation--name/snapshots/HASH) `organisation/name`."""
    path = folder.resolve()
    repository = path.parent.parent.name
    if _REVISION.fullmatch(path.name) and path.parent.name == "snapshots" and repository.startswith(_PREFIX):
        return repository.removeprefix(_PREFIX).replace("--", "/")
    return path.name
