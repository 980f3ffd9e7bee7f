"""What a running local stack tells to later commands: its addresses and keys, in one file that only its user may read."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path

from veneer.errors import FailedPreconditionError

DEFAULT_STATE = Path.home() / ".local" / "state" / "veneer"
"""Folder of the stack that commands mean that name none."""

_FILE = "stack.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class StackState:
    """Addresses and keys.

    Attributes:
        control: Control plane, callers.
        control_operators: Control plane, operators.
        control_metrics: Control plane, Prometheus page.
        data: Data plane, callers.
        data_operators: Data plane, operators.
        data_metrics: Data plane, Prometheus page.
        operator_key: Key of the first operator.
        base_digest: Digest of the base that is served.
        base_name: Its name.
        tenant: Name of the tenant made for the user; empty when none was asked for.
        tenant_key: Its key, with all roles.
    """

    control: str
    control_operators: str
    control_metrics: str
    data: str
    data_operators: str
    data_metrics: str
    operator_key: str
    base_digest: str
    base_name: str
    tenant: str = ""
    tenant_key: str = ""


def read_state(folder: Path) -> StackState | None:
    """The state that a stack wrote to its folder, or None when it wrote none.

    Raises:
        FailedPreconditionError: The file is not one of ours.
    """
    path = folder / _FILE
    try:
        return StackState(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (TypeError, ValueError) as error:
        stop, start = command_for(folder, "down"), command_for(folder, "up")
        raise FailedPreconditionError(f"{path} is of another version: run `{stop}`, remove {folder}, run `{start}`") from error


def command_for(folder: Path, *words: str) -> str:
    """A command of `veneer` about the stack in a folder, as a shell takes it."""
    state = [] if folder.absolute() == DEFAULT_STATE.absolute() else ["--state", str(folder)]
    return shlex.join(["veneer", *state, *words])


def write_state(folder: Path, state: StackState) -> None:
    """Writes the state whole; only the user may read it."""
    write_secret(folder / _FILE, json.dumps(asdict(state), indent=1))


def remove_state(folder: Path) -> None:
    """Says that nothing runs."""
    (folder / _FILE).unlink(missing_ok=True)


def write_secret(path: Path, text: str) -> None:
    """Writes a file whole that only the user may read."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    part.touch(mode=0o600, exist_ok=False)
    part.write_text(text)
    part.replace(path)
