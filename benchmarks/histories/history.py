"""What was recorded of one run: operations, the change feed, the audit log, faults."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.histories.records import SERVICE, Lost, Moved, Operation


@dataclass(frozen=True, slots=True)
class Change:
    """An event of the change feed; `subject` is empty for what is about no adapter."""

    kind: str
    subject: str
    version: str = ""
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done to the system, and when.

    Attributes:
        kind: `kill`, `restart`, `pause` or `read-only`.
        plane: Process that it struck; None: the database, and so all.
        start: When it began.
        end: When it was over: the process serves again.
    """

    kind: str
    plane: int | None
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Feed:
    """What a reader of the change feed saw from before the first operation until after the last.

    Attributes:
        changes: In the order in which they came.
        resets: For each time that the feed said to read everything again: how many changes had come before.
    """

    changes: tuple[Change, ...] = ()
    resets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """A move of an alias as the audit log has it.

    Attributes:
        subject: The adapter.
        moved: What the alias was moved to.
        is_service: Nobody's key is named: the service did it of itself.
        time_ns: When the transaction that made it began, by the system's clock; no move takes effect before that.
    """

    subject: str
    moved: Moved
    is_service: bool = False
    time_ns: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class History:
    """All that was recorded of one run.

    Attributes:
        operations: In order of calls.
        feed: What the change feed told meanwhile.
        faults: What was done to the system.
        journal: Moves in the audit log, read after all else.
    """

    operations: tuple[Operation, ...]
    feed: Feed | None = None
    faults: tuple[Fault, ...] = ()
    journal: tuple[Entry, ...] | None = None

    def subjects(self) -> dict[str, list[Operation]]:
        """Operations by what they are about."""
        found: dict[str, list[Operation]] = {}
        for operation in self.operations:
            found.setdefault(operation.subject, []).append(operation)
        return found

    @property
    def num_calls(self) -> int:
        """Calls of clients whose outcome is known; one may show something of several subjects."""
        return sum(self.calls_by_client().values())

    def calls_by_client(self) -> Counter[int]:
        """How many calls each client learned the outcome of."""
        known = {
            (one.client, one.call) for one in self.operations if one.outcome is not None and not isinstance(one.outcome, Lost)
        }
        return Counter(client for client, _ in known if client != SERVICE)

    def write(self, path: Path) -> None:
        """Writes it as lines of JSON, for looking into what a violation names."""
        lines: list[dict[str, object]] = [
            {"type": type(one.what).__name__, "answer": type(one.outcome).__name__, **asdict(one)} for one in self.operations
        ]
        lines += [{"type": "fault", **asdict(one)} for one in self.faults]
        lines += [{"type": "change", **asdict(one)} for one in (self.feed.changes if self.feed else ())]
        lines += [{"type": "journal", **asdict(one)} for one in self.journal or ()]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that a history breaks.

    Attributes:
        promise: Which.
        subject: Adapter or key that it is about.
        text: What was seen.
        operations: Ids of the operations that show it.
    """

    promise: str
    subject: str
    text: str
    operations: Sequence[int] = ()
