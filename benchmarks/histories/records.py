"""What clients asked the catalogue for and what came back: the records that a history is made of.

All of them are immutable and hashable, so that the checker may keep them in its states. Texts are digests and names as the API
has them; an outcome holds only what its call lets the caller know for certain.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

Arms = tuple[tuple[str, int], ...]
"""Version digest and weight of each arm."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Publishes content whose version will have `digest`; an alias is moved too unless it is empty."""

    digest: str
    alias: str = ""


@dataclass(frozen=True, slots=True)
class SetAlias:
    """Moves an alias to arms, if it has the expected generation; None: whatever it has."""

    alias: str
    arms: Arms
    expected: int | None = None


@dataclass(frozen=True, slots=True)
class Rollback:
    """Moves an alias back, to a version or (empty) to the one before."""

    alias: str
    version: str = ""
    expected: int | None = None


@dataclass(frozen=True, slots=True)
class Promote:
    """Gives all of an alias's traffic to the version that another alias (`source`) serves, or to one of its own arms."""

    alias: str
    source: str = ""
    version: str = ""
    expected: int | None = None


@dataclass(frozen=True, slots=True)
class Freeze:
    """Forbids every move of an alias, or allows them again."""

    alias: str
    frozen: bool


@dataclass(frozen=True, slots=True)
class Retire:
    """Ends a version."""

    version: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletes a version; with force also from the aliases that serve it."""

    version: str
    force: bool = False


@dataclass(frozen=True, slots=True)
class DeleteAdapter:
    """Deletes the adapter with versions, aliases and grants; with force also while it has aliases."""

    force: bool = False


@dataclass(frozen=True, slots=True)
class Grant:
    """Lets a tenant use the adapter."""

    grantee: str


@dataclass(frozen=True, slots=True)
class Revoke:
    """Withdraws a grant."""

    grantee: str


@dataclass(frozen=True, slots=True)
class Resolve:
    """Resolves an alias, or a version, for a tenant; an empty one is the owner."""

    caller: str = ""
    alias: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class ReadAliases:
    """Reads all aliases of the adapter."""


@dataclass(frozen=True, slots=True)
class ReadCount:
    """Reads how many versions the adapter ever had."""


@dataclass(frozen=True, slots=True)
class ReadVersions:
    """Reads all versions of the adapter."""


@dataclass(frozen=True, slots=True)
class UseKey:
    """Sends a call with a key; the outcome says whether it was let in."""


@dataclass(frozen=True, slots=True)
class RevokeKey:
    """Ends a key."""


Call = (
    Publish
    | SetAlias
    | Rollback
    | Promote
    | Freeze
    | Retire
    | Delete
    | DeleteAdapter
    | Grant
    | Revoke
    | Resolve
    | ReadAliases
    | ReadCount
    | ReadVersions
    | UseKey
    | RevokeKey
)


MOVES = (SetAlias, Rollback, Promote)
"""Calls that move one alias by compare-and-swap."""
READS = (Resolve, ReadAliases, ReadCount, ReadVersions, UseKey)
"""Calls that change nothing."""


@dataclass(frozen=True, slots=True)
class Moved:
    """An alias as a move left it, or as a read showed it; one without arms points at nothing."""

    alias: str
    generation: int
    arms: Arms
    frozen: bool = False


@dataclass(frozen=True, slots=True)
class Frozen:
    """An alias as it was when its moves were forbidden or allowed."""

    alias: Moved


@dataclass(frozen=True, slots=True)
class Published:
    """A version, and the alias that moved with it."""

    digest: str
    number: int
    moved: Moved | None


@dataclass(frozen=True, slots=True)
class Deleted:
    """Aliases that a deletion moved, by name, and how many versions are gone."""

    moved: tuple[Moved, ...]
    num_versions: int = 1


@dataclass(frozen=True, slots=True)
class Resolved:
    """What may be served: digest, number and weight of each arm, and the version that may answer in its place (or empty)."""

    generation: int
    arms: tuple[tuple[str, int, int, str], ...]


@dataclass(frozen=True, slots=True)
class Listed:
    """What a read showed: aliases by name, versions as (number, digest, state) by number, or one count."""

    items: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """It was done, and there is nothing to tell."""


@dataclass(frozen=True, slots=True)
class Refused:
    """It was not done.

    Attributes:
        code: Status code, or the reason of a resolve.
        generation: Generation that a lost compare-and-swap found.
    """

    code: str
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """It was not done, since it lost against a neighbour in a way that no state explains; it may be tried again."""


Outcome = Moved | Frozen | Published | Deleted | Resolved | Listed | Done | Refused | Lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One attempt of one client.

    Attributes:
        id: Unique in the history, in order of calls.
        client: Who made it.
        subject: Adapter or key that it is about; what has another subject cannot disturb it.
        what: What it asks for.
        call: When it was sent, in nanoseconds of the recorder's clock.
        end: When its answer came, or its client gave up.
        outcome: What is known; None: it may have taken effect at any time after `call`, or never.
        request_id: The client's identifier of the write; attempts with the same one are the same write. Empty: none.
        plane: Number of the control-plane process that it was sent to.
        error: Status code of an outcome that is not known.
    """

    id: int
    client: int
    subject: str
    what: Call
    call: int
    end: int
    outcome: Outcome | None
    request_id: str = ""
    plane: int = 0
    error: str = ""


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
class History:
    """All that was recorded of one run, in order of calls."""

    operations: tuple[Operation, ...]
    feed: Feed | None = None
    faults: tuple[Fault, ...] = field(default=())

    def subjects(self) -> dict[str, list[Operation]]:
        """Operations by what they are about."""
        found: dict[str, list[Operation]] = {}
        for operation in self.operations:
            found.setdefault(operation.subject, []).append(operation)
        return found

    @property
    def num_calls(self) -> int:
        """Calls that were not lost on the way; one may show something of several subjects."""
        return len({(one.client, one.call) for one in self.operations if not isinstance(one.outcome, Lost)})

    def write(self, path: Path) -> None:
        """Writes it as lines of JSON, for looking into what a violation names."""
        lines: list[dict[str, object]] = [
            {"type": type(one.what).__name__, "answer": type(one.outcome).__name__, **asdict(one)} for one in self.operations
        ]
        lines += [{"type": "fault", **asdict(one)} for one in self.faults]
        lines += [{"type": "change", **asdict(one)} for one in (self.feed.changes if self.feed else ())]
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
