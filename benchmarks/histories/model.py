"""One adapter's catalogue, and one key, in sequence: what each call must answer in a given state, and the state after it.

Pure functions over immutable states. Written from the API (`catalog.proto`, `nodes.proto`, `tenants.proto`), so that it says what
is promised and not what the code does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from benchmarks.histories.records import (
    MOVES,
    Arms,
    Delete,
    DeleteAdapter,
    Deleted,
    Done,
    Freeze,
    Frozen,
    Grant,
    Listed,
    Moved,
    Operation,
    Outcome,
    Promote,
    Publish,
    Published,
    ReadAliases,
    ReadCount,
    ReadVersions,
    Refused,
    Resolve,
    Resolved,
    Retire,
    Revoke,
    RevokeKey,
    Rollback,
    SetAlias,
    UseKey,
)

READY, RETIRED = "READY", "RETIRED"
STABLE = "stable"
NOT_FOUND = Refused("NOT_FOUND")
PRECONDITION = Refused("FAILED_PRECONDITION")


@dataclass(frozen=True, slots=True)
class Version:
    """A version that is not deleted."""

    digest: str
    number: int
    state: str = READY


@dataclass(frozen=True, slots=True)
class AdapterState:
    """All that one adapter's answers depend on.

    Attributes:
        num_versions: Versions that it ever had; 0: there is no such adapter yet.
        versions: By number.
        generations: Present generation of each alias, by name.
        moves: What each alias served in each generation that is remembered, oldest first: all that share no deleted version.
        frozen: Aliases that may not move.
        is_deleted: There is no such adapter now, though there was.
        grants: Tenants that may use it.
        answers: Request ids that were answered, with what they asked for and the answer.
    """

    num_versions: int = 0
    versions: tuple[Version, ...] = ()
    generations: tuple[tuple[str, int], ...] = ()
    moves: tuple[Moved, ...] = ()
    frozen: frozenset[str] = frozenset()
    is_deleted: bool = False
    grants: frozenset[str] = frozenset()
    answers: frozenset[tuple[str, object, Outcome]] = frozenset()

    def find(self, digest: str) -> Version | None:
        """The version with a digest."""
        return next((one for one in self.versions if one.digest == digest), None)

    def alias(self, name: str) -> Moved | None:
        """What an alias serves; None when it is absent or points at nothing."""
        generation = dict(self.generations).get(name)
        return next((one for one in self.moves if one.alias == name and one.generation == generation and one.arms), None)

    def aliases(self) -> tuple[Moved, ...]:
        """What all aliases serve, by name."""
        present = (self.alias(name) for name, _ in self.generations)
        return tuple(replace(one, frozen=one.alias in self.frozen) for one in present if one is not None)


@dataclass(frozen=True, slots=True)
class KeyState:
    """A key that was created before the history began."""

    is_valid: bool = True


State = AdapterState | KeyState


def step(state: State, operation: Operation) -> tuple[Outcome, State]:
    """What an operation must answer in a state, and the state after it."""
    if isinstance(state, KeyState):
        return _step_key(state, operation)
    for request_id, asked, answer in state.answers:
        if request_id == operation.request_id:
            return (answer, state) if asked == operation.what else (Refused("INVALID_ARGUMENT"), state)
    outcome, after = _step_adapter(state, operation)
    if operation.request_id and not isinstance(outcome, Refused):
        after = replace(after, answers=after.answers | {(operation.request_id, operation.what, outcome)})
    return outcome, after


def levels(state: State) -> dict[str, int]:
    """What only ever grows, by name: a state that is beyond what an operation saw can never come before it."""
    if isinstance(state, KeyState):
        return {}
    return {"": state.num_versions, **dict(state.generations)}


def ceilings(operation: Operation) -> dict[str, int]:
    """The highest level of each kind at which an operation can have had its outcome; nothing for what may be a stored answer."""
    what, outcome = operation.what, operation.outcome
    if operation.request_id:
        return {}
    if isinstance(outcome, Moved):
        return {outcome.alias: outcome.generation - 1}
    if isinstance(outcome, Frozen):
        return {outcome.alias.alias: outcome.alias.generation}
    if isinstance(outcome, Published):
        moved = {} if outcome.moved is None else {outcome.moved.alias: outcome.moved.generation - 1}
        return {"": outcome.number - 1, **moved}
    if isinstance(outcome, Deleted):
        return {one.alias: one.generation - 1 for one in outcome.moved}
    if isinstance(what, Resolve) and what.alias and isinstance(outcome, Resolved):
        return {what.alias: outcome.generation}
    if isinstance(what, ReadCount) and isinstance(outcome, Listed):
        return {"": int(str(outcome.items[0]))}
    if isinstance(what, MOVES) and isinstance(outcome, Refused) and outcome.generation:
        return {what.alias: outcome.generation}
    if isinstance(outcome, Listed):
        return {one.alias: one.generation for one in outcome.items if isinstance(one, Moved)}
    return {}


def _step_key(state: KeyState, operation: Operation) -> tuple[Outcome, State]:
    if isinstance(operation.what, RevokeKey):
        return Done(), KeyState(is_valid=False)
    assert isinstance(operation.what, UseKey)
    return (Done() if state.is_valid else Refused("UNAUTHENTICATED")), state


def _step_adapter(state: AdapterState, operation: Operation) -> tuple[Outcome, AdapterState]:
    what = operation.what
    if isinstance(what, Publish):
        return _publish(state, what)
    if isinstance(what, Resolve):
        return _resolve(state, what), state
    if state.num_versions == 0 or state.is_deleted:
        return NOT_FOUND, state
    if isinstance(what, ReadAliases):
        return Listed(state.aliases()), state
    if isinstance(what, ReadCount):
        return Listed((state.num_versions,)), state
    if isinstance(what, ReadVersions):
        return Listed(tuple((one.number, one.digest, one.state) for one in state.versions)), state
    if isinstance(what, MOVES):
        return _move_alias(state, what)
    if isinstance(what, Freeze):
        return _freeze(state, what)
    if isinstance(what, Retire):
        return _retire(state, what)
    if isinstance(what, Delete):
        return _delete(state, what)
    if isinstance(what, DeleteAdapter):
        return _delete_adapter(state, what)
    if isinstance(what, Grant):
        return Done(), replace(state, grants=state.grants | {what.grantee})
    assert isinstance(what, Revoke)
    if what.grantee not in state.grants:
        return NOT_FOUND, state
    return Done(), replace(state, grants=state.grants - {what.grantee})


def _publish(state: AdapterState, what: Publish) -> tuple[Outcome, AdapterState]:
    if state.find(what.digest) is not None:
        return Refused("ALREADY_EXISTS"), state
    number = state.num_versions + 1
    is_only = not state.versions
    versions = (*state.versions, Version(what.digest, number))
    name = what.alias or (STABLE if is_only else "")
    if name in state.frozen:
        return PRECONDITION, state
    after = replace(state, num_versions=number, versions=versions, is_deleted=False)
    if not name:
        return Published(what.digest, number, None), after
    moved, after = _moved(after, name, ((what.digest, 1),))
    return Published(what.digest, number, moved), after


def _moved(state: AdapterState, name: str, arms: Arms) -> tuple[Moved, AdapterState]:
    generations = dict(state.generations)
    generations[name] = generations.get(name, 0) + 1
    moved = Moved(name, generations[name], arms)
    moves = (*state.moves, moved) if arms else state.moves
    return moved, replace(state, generations=tuple(sorted(generations.items())), moves=moves)


def _move_alias(state: AdapterState, what: SetAlias | Rollback | Promote) -> tuple[Outcome, AdapterState]:
    present = state.alias(what.alias)
    generation = 0 if present is None else present.generation
    if what.expected is not None and what.expected != generation:
        return Refused("ABORTED", generation), state
    arms = _arms_of(state, what, present)
    if isinstance(arms, Refused):
        return arms, state
    found = [state.find(digest) for digest, _ in arms]
    if any(one is None for one in found):
        return NOT_FOUND, state
    if any(one is not None and one.state != READY for one in found):
        return PRECONDITION, state
    if what.alias in state.frozen:
        return PRECONDITION, state
    return _moved(state, what.alias, arms)


def _arms_of(state: AdapterState, what: SetAlias | Rollback | Promote, present: Moved | None) -> Arms | Refused:
    if isinstance(what, SetAlias):
        return what.arms
    return _target(state, what, present) if isinstance(what, Rollback) else _promoted(state, what, present)


def _promoted(state: AdapterState, what: Promote, present: Moved | None) -> Arms | Refused:
    origin = state.alias(what.source) if what.source else present
    if origin is None:
        return NOT_FOUND
    served = [digest for digest, _ in origin.arms]
    target = what.version or served[0]
    if target not in served or (what.source and len(served) > 1):
        return PRECONDITION
    return ((target, 1),)


def _freeze(state: AdapterState, what: Freeze) -> tuple[Outcome, AdapterState]:
    present = state.alias(what.alias)
    if present is None:
        return NOT_FOUND, state
    frozen = state.frozen | {what.alias} if what.frozen else state.frozen - {what.alias}
    return Frozen(replace(present, frozen=what.frozen)), replace(state, frozen=frozen)


def _target(state: AdapterState, what: Rollback, present: Moved | None) -> Arms | Refused:
    if present is None:
        return NOT_FOUND
    history = [one for one in state.moves if one.alias == what.alias]
    if what.version:
        version = state.find(what.version)
        if version is None:
            return NOT_FOUND
        served = any(digest == what.version for one in history for digest, _ in one.arms)
        return ((what.version, 1),) if served else PRECONDITION
    now = present.arms[0][0] if len(present.arms) == 1 else None
    back = _last_whole(state, history, other_than=now)
    return ((back, 1),) if back else PRECONDITION


def _last_whole(state: AdapterState, moves: Iterable[Moved], *, other_than: str | None) -> str:
    """The last ready version that had all traffic, of these moves; empty when there is none."""
    for one in sorted(moves, key=lambda move: -move.generation):
        version = state.find(one.arms[0][0])
        if len(one.arms) == 1 and version is not None and version.state == READY and version.digest != other_than:
            return version.digest
    return ""


def _retire(state: AdapterState, what: Retire) -> tuple[Outcome, AdapterState]:
    version = state.find(what.version)
    if version is None:
        return NOT_FOUND, state
    if version.state == RETIRED:
        return Done(), state
    if _serving(state, what.version):
        return PRECONDITION, state
    versions = tuple(replace(one, state=RETIRED) if one == version else one for one in state.versions)
    return Done(), replace(state, versions=versions)


def _delete(state: AdapterState, what: Delete) -> tuple[Outcome, AdapterState]:
    if state.find(what.version) is None:
        return NOT_FOUND, state
    serving = _serving(state, what.version)
    if serving and (not what.force or any(one.frozen for one in serving)):
        return PRECONDITION, state
    moved: list[Moved] = []
    for alias in serving:
        one, state = _moved(state, alias.alias, tuple(arm for arm in alias.arms if arm[0] != what.version))
        moved.append(one)
    versions = tuple(one for one in state.versions if one.digest != what.version)
    moves = tuple(one for one in state.moves if all(digest != what.version for digest, _ in one.arms))
    return Deleted(tuple(moved)), replace(state, versions=versions, moves=moves)


def _delete_adapter(state: AdapterState, what: DeleteAdapter) -> tuple[Outcome, AdapterState]:
    """Numbers and generations stay, so that what has the name later goes on from them."""
    present = state.aliases()
    if present and (not what.force or any(one.frozen for one in present)):
        return PRECONDITION, state
    moved: list[Moved] = []
    num_versions = len(state.versions)
    for alias in present:
        one, state = _moved(state, alias.alias, ())
        moved.append(one)
    return Deleted(tuple(moved), num_versions), replace(state, versions=(), moves=(), grants=frozenset(), is_deleted=True)


def _serving(state: AdapterState, digest: str) -> list[Moved]:
    return [one for one in state.aliases() if any(version == digest for version, _ in one.arms)]


def _resolve(state: AdapterState, what: Resolve) -> Outcome:
    if what.caller and what.caller not in state.grants:
        return NOT_FOUND
    if what.version:
        version = state.find(what.version)
        if version is None:
            return NOT_FOUND
        if version.state == RETIRED:
            return Refused(RETIRED)
        return Resolved(0, ((version.digest, version.number, 1, ""),))
    alias = state.alias(what.alias)
    if alias is None:
        return NOT_FOUND
    return Resolved(alias.generation, tuple(_arm(state, alias.alias, digest, weight) for digest, weight in alias.arms))


def _arm(state: AdapterState, alias: str, digest: str, weight: int) -> tuple[str, int, int, str]:
    """An arm with the version that all traffic last went to before the alias first served it."""
    version = state.find(digest)
    assert version is not None
    history = [one for one in state.moves if one.alias == alias]
    first = min(one.generation for one in history if any(served == digest for served, _ in one.arms))
    before = _last_whole(state, (one for one in history if one.generation < first), other_than=None)
    return digest, version.number, weight, before
