"""Histories of a right catalogue, drawn at random."""

from __future__ import annotations

import dataclasses
import random

from benchmarks.histories.model import step
from benchmarks.histories.records import (
    Call,
    Condemn,
    Conduct,
    Delete,
    DeleteAdapter,
    Freeze,
    Grant,
    Operation,
    Promote,
    Publish,
    ReadAliases,
    ReadCanary,
    ReadCount,
    ReadVersions,
    Refused,
    Resolve,
    Retire,
    Revoke,
    Rollback,
    SetAlias,
    StartCanary,
    StopCanary,
)
from benchmarks.histories.state import AdapterState, State

SUBJECT = "style"
_WITH_ANSWERS = (Publish, SetAlias, Rollback, Promote, Freeze, Delete, DeleteAdapter, StartCanary, StopCanary)
"""Calls whose answers are kept by request id."""


def random_history(seed: int, *, num_operations: int = 120, num_clients: int = 6, unknown: float = 0.05) -> list[Operation]:
    """What clients see who overlap at a catalogue that does each thing at some moment between call and return."""
    chance = random.Random(seed)
    digests = [f"{number:064x}" for number in range(1, 12)]
    state: State = AdapterState()
    free = [0] * num_clients
    planned: list[tuple[int, Operation]] = []
    for number in range(num_operations):
        client = min(range(num_clients), key=lambda one: free[one])
        call = free[client] + chance.randrange(1, 4)
        point = call + chance.randrange(1, 40)
        end = point + chance.randrange(1, 40)
        free[client] = end
        alias, digest = chance.choice(["stable", "canary"]), chance.choice(digests)
        other = chance.choice(digests)
        calls: list[Call] = [
            Publish(digest, chance.choice(["", "stable"])),
            SetAlias(alias, ((digest, 1),), chance.choice([None, chance.randrange(1, 20)])),
            SetAlias(alias, tuple(sorted({(digest, 1), (other, 1)}))),
            Rollback(alias),
            Promote(alias, chance.choice(["", "stable"]), digest),
            Promote(alias, "stable"),
            Freeze(alias, frozen=chance.random() < 0.3),
            Retire(digest),
            Delete(digest, force=chance.random() < 0.5),
            DeleteAdapter(force=chance.random() < 0.2),
            DeleteAdapter(force=True, dry_run=True),
            *[StartCanary(alias, digest, (10, 50)), Conduct(alias), Conduct(alias)] * 2,
            StopCanary(alias),
            ReadCanary(alias),
            Condemn(alias, chance.randrange(1, 20), digest, other),
            Grant("guest"),
            Revoke("guest"),
            *[Resolve(chance.choice(["", "guest"]), alias), ReadAliases(), ReadVersions(), ReadCount()] * 2,
        ]
        request_id = f"r{chance.randrange(num_operations // 2)}" if chance.random() < 0.3 else ""
        one = Operation(
            id=number, client=client, subject=SUBJECT, what=chance.choice(calls), call=call, end=end, outcome=None,
            request_id=request_id,
        )  # fmt: skip
        planned.append((point, one))
    seen = []
    for _, one in sorted(planned, key=lambda pair: pair[0]):
        if chance.random() < unknown and chance.random() < 0.5 and not isinstance(one.what, Conduct):
            seen.append(one)
            continue
        writes = isinstance(one.what, _WITH_ANSWERS)
        outcome, state = step(state, one if writes else dataclasses.replace(one, request_id=""))
        is_known = chance.random() >= unknown or isinstance(one.what, Conduct)
        if isinstance(one.what, Conduct) and isinstance(outcome, Refused):
            continue  # the service does nothing that is not due
        seen.append(dataclasses.replace(one, outcome=outcome if is_known else None, request_id=one.request_id if writes else ""))
    return sorted(seen, key=lambda one: one.call)
