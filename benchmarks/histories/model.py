"""One adapter's catalogue, and one key, in sequence: what each call must answer in a given state, and the state after it.

Pure functions over immutable states. Written from the API (`catalog.proto`, `nodes.proto`, `tenants.proto`), so that it says what
is promised and not what the code does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.histories import canary_model
from benchmarks.histories.records import (
    MOVES,
    Arms,
    Call,
    Condemn,
    Conduct,
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
    ReadCanary,
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
    Shown,
    StartCanary,
    StopCanary,
    UseKey,
    is_read,
)
from benchmarks.histories.state import (
    NOT_FOUND,
    PRECONDITION,
    READY,
    RETIRED,
    RUNNING,
    STABLE,
    AdapterState,
    KeyState,
    State,
    Version,
    move,
)


def step(state: State, operation: Operation) -> tuple[Outcome, State]:
    """What an operation must answer in a state, and the state after it."""
    if isinstance(state, KeyState):
        return _step_key(state, operation)
    what = operation.what
    asked_for = replace(what, dry_run=False) if isinstance(what, DeleteAdapter) else what
    for request_id, asked, answer in state.answers:
        if request_id == operation.request_id:
            return (answer, state) if asked == asked_for else (Refused("INVALID_ARGUMENT"), state)
    outcome, after = _step_adapter(state, what)
    if is_read(what):
        return outcome, state
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
    if isinstance(outcome, Shown):
        if isinstance(what, StartCanary):
            return {outcome.alias: outcome.generation - 1}
        return {outcome.alias: outcome.generation} if isinstance(what, StopCanary) or outcome.state == RUNNING else {}
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


def _step_adapter(state: AdapterState, what: Call) -> tuple[Outcome, AdapterState]:
    is_absent = state.num_versions == 0 or state.is_deleted
    if is_absent and not isinstance(what, Publish | Resolve | Condemn | Conduct):
        return NOT_FOUND, state
    return _STEPS[type(what)](state, what)


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
    moved, after = move(after, name, ((what.digest, 1),))
    return Published(what.digest, number, moved), after


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
    return move(state, what.alias, arms)


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
        one, state = move(state, alias.alias, tuple(arm for arm in alias.arms if arm[0] != what.version))
        moved.append(one)
    versions = tuple(one for one in state.versions if one.digest != what.version)
    moves = tuple(one for one in state.moves if all(digest != what.version for digest, _ in one.arms))
    canaries = tuple(one for one in state.canaries if what.version not in (one.version, one.stable))
    return Deleted(tuple(moved)), replace(state, versions=versions, moves=moves, canaries=canaries)


def _delete_adapter(state: AdapterState, what: DeleteAdapter) -> tuple[Outcome, AdapterState]:
    """Numbers and generations stay, so that what has the name later goes on from them."""
    present = state.aliases()
    if present and (not what.force or any(one.frozen for one in present)):
        return PRECONDITION, state
    moved: list[Moved] = []
    num_versions = len(state.versions)
    for alias in present:
        one, state = move(state, alias.alias, ())
        moved.append(one)
    after = replace(state, versions=(), moves=(), canaries=(), grants=frozenset(), is_deleted=True)
    return Deleted(tuple(moved), num_versions), after


def _serving(state: AdapterState, digest: str) -> list[Moved]:
    return [one for one in state.aliases() if any(version == digest for version, _ in one.arms)]


def _grant(state: AdapterState, what: Grant) -> tuple[Outcome, AdapterState]:
    return Done(), replace(state, grants=state.grants | {what.grantee})


def _revoke(state: AdapterState, what: Revoke) -> tuple[Outcome, AdapterState]:
    if what.grantee not in state.grants:
        return NOT_FOUND, state
    return Done(), replace(state, grants=state.grants - {what.grantee})


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


_STEPS: Mapping[type[Call], Callable[[AdapterState, Any], tuple[Outcome, AdapterState]]] = {
    Publish: _publish,
    **dict.fromkeys(MOVES, _move_alias),
    Freeze: _freeze,
    Retire: _retire,
    Delete: _delete,
    DeleteAdapter: _delete_adapter,
    StartCanary: canary_model.start,
    StopCanary: canary_model.stop,
    Condemn: canary_model.condemn,
    Conduct: canary_model.conduct,
    Grant: _grant,
    Revoke: _revoke,
    Resolve: lambda state, what: (_resolve(state, what), state),
    ReadAliases: lambda state, _: (Listed(state.aliases()), state),
    ReadCount: lambda state, _: (Listed((state.num_versions,)), state),
    ReadVersions: lambda state, _: (Listed(tuple((one.number, one.digest, one.state) for one in state.versions)), state),
    ReadCanary: lambda state, what: (canary_model.read(state, what), state),
}
