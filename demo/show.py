"""What the demonstration shows: live while a terminal watches, plain lines where none does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from demo.conservation import Holdings
from demo.stream import Stream
from veneer.dataplane.v1 import admin_pb2, generation_pb2

_PLAIN_WIDTH = 140
_WHOSE = {"tenant": 8, "adapter": 7, "version": 11}
"""Columns that say what answers, with their widths in characters."""
_HEAD = 12
"""Characters of an answer that stay in view while its end moves on: its marker."""
_CLOSING_WIDTH, _LIVE_WIDTH = 74, 37
"""Width of all but the last column of the closing table, and of the live view."""
_REASONS = {
    generation_pb2.FALLBACK_REASON_NOT_FOUND: "not found",
    generation_pb2.FALLBACK_REASON_NOT_READY: "not ready",
    generation_pb2.FALLBACK_REASON_NOT_INVOKED: "not invoked",
}


class Screen:
    """Writes the story to a console. Owned by the event loop."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @classmethod
    def of_stdout(cls) -> Screen:
        """The screen of this process; where no terminal watches, lines are wide enough for the tables."""
        console = Console()
        return cls(console if console.is_terminal else Console(width=_PLAIN_WIDTH))

    def say(self, text: str) -> None:
        """Writes one line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(self, title: str) -> None:
        """Begins a part of the story."""
        self._console.print()
        self._console.print(Text(f"▸ {title}", style="bold"))

    @contextmanager
    def uploads(self) -> Iterator[Callable[[str], Callable[[int, int], None]]]:
        """Shows uploads; gives a function that opens a bar by its title and returns what to call with bytes sent and in all."""
        columns = TextColumn("  {task.description:<24}"), BarColumn(), TaskProgressColumn(), DownloadColumn()
        with Progress(*columns, console=self._console, disable=not self._console.is_terminal) as progress:

            def bar(title: str) -> Callable[[int, int], None]:
                task = progress.add_task(title, total=None)
                return lambda sent, total: progress.update(task, completed=sent, total=total)

            yield bar

    @contextmanager
    def streams(self, streams: Sequence[Stream]) -> Iterator[Callable[[Stream], None]]:
        """Shows streams while they run; gives a function to call when one has ended."""
        if not self._console.is_terminal:
            yield lambda stream: self._console.print(_line(stream), highlight=False, soft_wrap=True)
            return
        with Live(
            get_renderable=lambda: _live_table(streams, room=self._console.width - _LIVE_WIDTH),
            console=self._console,
            refresh_per_second=10,
        ):
            yield lambda _: None

    def closing_table(self, streams: Sequence[Stream]) -> None:
        """Writes what became of every request."""
        table = Table(title="Requests", title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
        for name, width in {"#": 2, "part": 7, **_WHOSE, "arm": 3, "fallback": 9}.items():
            table.add_column(name, no_wrap=True, min_width=width)
        for name in ("TTFT", "tokens/s"):
            table.add_column(name, justify="right", no_wrap=True, min_width=8)
        table.add_column("first words", no_wrap=True)
        room = max(self._console.width - _CLOSING_WIDTH, 8)
        for number, stream in enumerate(streams, 1):
            ask, served = stream.ask, stream.served
            cells = [str(number), ask.phase, ask.tenant, _adapter(stream), _version(stream)]
            if served is None:
                cells += ["", "", "", "", _refusal(stream)[:room]]
            else:
                cells += [
                    str(served.arm) if served.sticky else "",
                    _REASONS.get(served.fallback_reason, "") if served.fallback else "",
                    f"{stream.time_to_first_token_s * 1000:.0f} ms",
                    f"{stream.tokens_per_s:.1f}",
                    _words(stream)[:room],
                ]
            table.add_row(*(Text(cell) for cell in cells))
        self._console.print()
        self._console.print(table)

    def engine_table(self, residency: admin_pb2.GetResidencyResponse, *, start: Holdings, end: Holdings) -> None:
        """Writes what the engine counted, and what it holds now beside what it held at the start."""
        engine = residency.engine
        requests = residency.device_hits + residency.host_hits + residency.disk_hits + residency.store_loads
        table = Table(title="Engine", title_justify="left", show_header=False, box=SIMPLE_HEAD, pad_edge=False)
        rows = {
            "most adapters in one step": f"{engine.max_adapters_in_step}",
            "steps with at least two adapters and base rows": f"{engine.mixed_steps} of {engine.steps}",
            "rows per step, at most": f"{engine.max_rows_in_step}",
            "tokens out per step, on average": f"{_ratio(engine.generated_tokens, engine.steps):.1f}",
            "adapter found on the device": _share(residency.device_hits, requests),
            "adapter found in host memory": _share(residency.host_hits, requests),
            "adapter found on the disk": _share(residency.disk_hits, requests),
            "adapter loaded from the store": _share(residency.store_loads, requests),
            "cold load, store to disk": f"{residency.mean_store_load_s * 1000:.0f} ms on average",
            "cold load, disk to host": f"{residency.mean_disk_load_s * 1000:.1f} ms on average",
            "cold load, host to device": f"{residency.mean_device_load_s * 1000:.1f} ms on average",
            "KV pages in use": f"{end.kv_pages} (at the start {start.kv_pages}) of {engine.kv_pages_total}",
            "leases held": f"{end.leases} (at the start {start.leases})",
            "arena bytes in use": f"{end.arena_bytes} (at the start {start.arena_bytes}) of {engine.arena_bytes_total}",
            "tasks": f"{end.tasks} (at the start {start.tasks})",
        }
        for name, value in rows.items():
            table.add_row(name, value)
        self._console.print()
        self._console.print(table)

    def verdict(self, faults: Sequence[str], *, checked: str) -> None:
        """Writes what was wrong, or that nothing was."""
        self._console.print()
        for fault in faults:
            self._console.print(Text(f"✗ {fault}", style="red"))
        if not faults:
            self._console.print(Text(f"✓ {checked}", style="green"))


def _live_table(streams: Sequence[Stream], *, room: int) -> Table:
    table = Table(padding=(0, 1, 0, 0), pad_edge=False, box=None)
    for name, width in _WHOSE.items():
        table.add_column(name, no_wrap=True, min_width=width)
    table.add_column("tokens", justify="right", min_width=6)
    table.add_column("answer", no_wrap=True)
    for stream in streams:
        style = "" if stream.is_running else "red" if stream.error else "dim" if stream.end_s else "yellow"
        cells = stream.ask.tenant, _adapter(stream), _version(stream), str(stream.num_tokens), _tail(stream, room)
        table.add_row(*(Text(cell, style=style) for cell in cells))
    return table


def _line(stream: Stream) -> Text:
    words = _words(stream) if stream.error is None else _refusal(stream)
    return Text(f"  {stream.ask.tenant:<9}{_adapter(stream):<9}{_version(stream):<12}{stream.num_tokens:>4} tokens  {words}")


def _adapter(stream: Stream) -> str:
    return stream.ask.adapter or "(base)"


def _version(stream: Stream) -> str:
    served = stream.served
    return f"v{served.version_number} {served.version[:8]}" if served is not None and served.version else ""


def _refusal(stream: Stream) -> str:
    return f"refused: {stream.error.status}" if stream.error is not None else "nothing came"


def _words(stream: Stream) -> str:
    return " ".join(stream.text.split())[:60]


def _tail(stream: Stream, room: int) -> str:
    if stream.error is not None:
        return _refusal(stream)
    if stream.served is None:
        return "…"
    text, room = " ".join(stream.text.split()), max(room, 2 * _HEAD)
    return text if len(text) <= room else f"{text[:_HEAD]}…{text[_HEAD + 1 - room :]}"


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} requests ({_ratio(part, whole):.0%})"


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
