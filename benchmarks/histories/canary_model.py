"""Canaries in sequence: what each call must answer, and what the service does of itself."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.histories.records import Arms, Condemn, Conduct, Done, Outcome, ReadCanary, Refused, StartCanary, StopCanary
from benchmarks.histories.state import (
    NOT_FOUND,
    PRECONDITION,
    PROMOTED,
    READY,
    ROLLED_BACK,
    RUNNING,
    STOPPED,
    AdapterState,
    Canary,
    move,
)

NOT_DUE = Refused("NOT_DUE")
"""What no move of the service is ever recorded with: it may not be made here."""


def start(state: AdapterState, what: StartCanary) -> tuple[Outcome, AdapterState]:
    """Begins a canary with its first step."""
    present = state.alias(what.alias)
    generation = 0 if present is None else present.generation
    if what.expected is not None and what.expected != generation:
        return Refused("ABORTED", generation), state
    if present is None:
        return NOT_FOUND, state
    stable = present.arms[0][0]
    if len(present.arms) > 1 or stable == what.version:
        return PRECONDITION, state
    version = state.find(what.version)
    if version is None:
        return NOT_FOUND, state
    if version.state != READY or what.alias in state.frozen:
        return PRECONDITION, state
    canary = Canary(what.alias, what.version, stable, what.weights, generation + 1)
    moved, state = move(state, what.alias, canary.shown().moved.arms)
    assert moved == canary.shown().moved
    return canary.shown(), replace(state, canaries=(*state.canaries, canary))


def stop(state: AdapterState, what: StopCanary) -> tuple[Outcome, AdapterState]:
    """Ends a canary and gives all traffic back."""
    canary = _running(state, what.alias)
    if canary is None or what.alias in state.frozen:
        return PRECONDITION, state
    ended = replace(canary, state=STOPPED)
    _, state = move(state, what.alias, ((canary.stable, 1),))
    return ended.shown(), _with(state, canary, ended)


def read(state: AdapterState, what: ReadCanary) -> Outcome:
    """The last canary: one whose alias somebody moved is stopped."""
    last = next((one for one in reversed(state.canaries) if one.alias == what.alias), None)
    if last is None:
        return NOT_FOUND
    is_outrun = last.state == RUNNING and _running(state, what.alias) is None
    return last.shown(STOPPED if is_outrun else "")


def condemn(state: AdapterState, what: Condemn) -> tuple[Outcome, AdapterState]:
    """A canary must go back once that was reported of one of its steps; otherwise it changes nothing."""
    canary = _running(state, what.alias)
    if canary is None or not canary.first <= what.generation <= canary.first + canary.step:
        return Done(), state
    return Done(), _with(state, canary, replace(canary, is_condemned=True))


def conduct(state: AdapterState, what: Conduct) -> tuple[Outcome, AdapterState]:
    """Takes the canary's next step, or its roll-back if it is condemned: of one that runs on an alias that nobody else moved."""
    canary = _running(state, what.alias)
    if canary is None or what.alias in state.frozen:
        return NOT_DUE, state
    if canary.is_condemned:
        after = replace(canary, state=ROLLED_BACK)
    elif canary.step + 1 < len(canary.weights):
        after = replace(canary, step=canary.step + 1)
    else:
        after = replace(canary, state=PROMOTED)
    ends: dict[str, Arms] = {ROLLED_BACK: ((canary.stable, 1),), PROMOTED: ((canary.version, 1),)}
    moved, state = move(state, what.alias, ends.get(after.state, after.shown().moved.arms))
    return moved, _with(state, canary, after)


def _running(state: AdapterState, alias: str) -> Canary | None:
    """The canary that runs on an alias; none when its last one ended, or somebody else has moved the alias."""
    last = next((one for one in reversed(state.canaries) if one.alias == alias), None)
    present = state.alias(alias)
    if last is None or present is None or last.state != RUNNING or present.generation != last.first + last.step:
        return None
    return last


def _with(state: AdapterState, canary: Canary, changed: Canary) -> AdapterState:
    return replace(state, canaries=tuple(changed if one == canary else one for one in state.canaries))
