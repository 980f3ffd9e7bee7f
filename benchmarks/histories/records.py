"""What clients asked the catalogue for and what came back: the records that a history is made of.

All of them are immutable and hashable, so that the checker may keep them in its states. Texts are digests and names as the API
has them; an outcome holds only what its call lets the caller know for certain.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """Deletes the adapter with versions, aliases and grants; with force also while it has aliases.

    A dry run only tells what that would do.
    """

    force: bool = False
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class StartCanary:
    """Gives a version more and more of an alias's traffic: percent of each step, of which each takes `step_ms` at least."""

    alias: str
    version: str
    weights: tuple[int, ...]
    step_ms: int = 0
    expected: int | None = None


@dataclass(frozen=True, slots=True)
class StopCanary:
    """Ends the canary of an alias and gives all traffic back."""

    alias: str


@dataclass(frozen=True, slots=True)
class ReadCanary:
    """Reads the present or last canary of an alias."""

    alias: str


@dataclass(frozen=True, slots=True)
class Condemn:
    """Tells, as a data plane, that a canary's version failed so often in a generation that it must be rolled back."""

    alias: str
    generation: int
    version: str
    stable: str


@dataclass(frozen=True, slots=True)
class Conduct:
    """Does what is due with the canary of an alias. No client asks for it: the service does so of itself."""

    alias: str


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
    | StartCanary
    | StopCanary
    | ReadCanary
    | Condemn
    | Conduct
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
READS = (Resolve, ReadAliases, ReadCount, ReadVersions, ReadCanary, UseKey)
"""Calls that change nothing, whatever their arguments."""
SERVICE = -1
"""Client, and control plane, of what the service does of itself."""


def is_read(what: Call) -> bool:
    """Whether a call changes nothing: one that only reads, or a dry run."""
    return isinstance(what, READS) or (isinstance(what, DeleteAdapter) and what.dry_run)


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
class Shown:
    """A canary.

    Attributes:
        stable: Version that had all traffic before.
        weights: Percent of the traffic that the version gets, by step.
        step: Index of the present or last one.
        generation: Of the alias in that step.
        state: RUNNING, PROMOTED, ROLLED_BACK or STOPPED.
    """

    alias: str
    version: str
    stable: str
    weights: tuple[int, ...]
    step: int
    generation: int
    state: str

    @property
    def moved(self) -> Moved:
        """The alias as the step left it."""
        weight = self.weights[self.step]
        return Moved(self.alias, self.generation, ((self.stable, 100 - weight), (self.version, weight)))


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


Outcome = Moved | Frozen | Published | Deleted | Shown | Resolved | Listed | Done | Refused | Lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One attempt of one client.

    Attributes:
        id: Unique in the history, in order of calls.
        client: Who made it, or `SERVICE`.
        subject: Adapter or key that it is about; what has another subject cannot disturb it.
        what: What it asks for.
        call: When it was sent, in nanoseconds of the recorder's clock.
        end: When its answer came, or its client gave up.
        outcome: What is known; None: it may have taken effect at any time after `call`, or never.
        request_id: The client's identifier of the write; attempts with the same one are the same write. Empty: none.
        plane: Number of the control-plane process that it was sent to, or `SERVICE`.
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
