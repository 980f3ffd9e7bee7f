"""What commands print: tables for people, JSON for programs; never a terminal's control codes that came from elsewhere."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console
from rich.table import Table
from rich.text import Text

from veneer.cli.hints import hint_for
from veneer.errors import VeneerError

_WITHOUT_CONTROLS = {code: None for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}

_WIDTH_IN_PIPES = 160

console = Console(width=None if sys.stdout.isatty() else _WIDTH_IN_PIPES)
error_console = Console(stderr=True)


def plain(text: str) -> str:
    """The text without control codes: what a model or another tenant wrote must not steer this terminal."""
    return text.translate(_WITHOUT_CONTROLS)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints rows, or that there are none."""
    table = Table(title=title, title_justify="left", header_style="bold", show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")  # cut off, an identifier could not be copied
    for row in rows:
        table.add_row(*(Text(plain(str(cell))) for cell in row))
    if table.row_count:
        console.print(table)
    else:
        console.print(f"{title}: none", markup=False)


def print_json(value: Any) -> None:
    """Prints a message, a list of messages, or plain data as one JSON document."""
    typer.echo(json.dumps(_as_data(value), indent=2, ensure_ascii=False))


def print_json_line(value: Any) -> None:
    """Prints one JSON document in one line."""
    typer.echo(json.dumps(_as_data(value), ensure_ascii=False))


def say(text: str) -> None:
    """Prints a line for people."""
    console.print(plain(text), markup=False, highlight=False, soft_wrap=True)


def note(text: str) -> None:
    """Prints a line beside the output, to standard error."""
    error_console.print(plain(text), markup=False, highlight=False, style="dim", soft_wrap=True)


def stream(text: str) -> None:
    """Prints a piece of a model's output at once, as it is but for control codes."""
    sys.stdout.write(plain(text))
    sys.stdout.flush()


def print_error(error: VeneerError, *, command: str = "") -> None:
    """Prints what went wrong, everything that is wrong with the input, and what to do where its message does not say that.

    Args:
        error: What went wrong.
        command: First word of the command that met it.
    """
    if error.violations:
        error_console.print(f"error: {error.status}", style="bold red", markup=False, highlight=False)
        for violation in error.violations:
            error_console.print(f"  • {plain(str(violation))}", markup=False, highlight=False, soft_wrap=True)
    else:
        message = f"error: {error.status}: {plain(error.message)}"
        error_console.print(message, style="bold red", markup=False, highlight=False, soft_wrap=True)
    if hint := hint_for(error, command):
        note(hint)


def print_fault(text: str) -> None:
    """Prints what went wrong on this machine."""
    error_console.print(f"error: {plain(text)}", style="bold red", markup=False, highlight=False, soft_wrap=True)


def short(digest: str) -> str:
    """The first characters of a digest, enough to tell versions of one adapter apart."""
    return digest[:12]


def version_name(owner: str, adapter: str, number: int) -> str:
    """What people call a version, or a dash while nothing but its digest is known."""
    return f"{owner}/{adapter} v{number}" if adapter else "–"


def when(time: Timestamp) -> str:
    """Local time, or a dash when there is none."""
    return "–" if not time.ByteSize() else time.ToDatetime(datetime.UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def size(size_bytes: int) -> str:
    """Bytes for people."""
    amount = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def _as_data(value: Any) -> Any:
    if isinstance(value, Message):
        return MessageToDict(value, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    if isinstance(value, (list, tuple)):
        return [_as_data(one) for one in value]
    if isinstance(value, dict):
        return {key: _as_data(one) for key, one in value.items()}
    return value
