"""The audit log: what it says of moves of aliases, and that against what the found orders say was done."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence

from benchmarks.histories.feed import moved_between, walked
from benchmarks.histories.history import Entry, Violation
from benchmarks.histories.records import SERVICE, Moved, Operation
from benchmarks.histories.state import State
from veneer.controlplane.v1 import tenants_pb2

_SERVICE_ACTOR = "service"


def moves_in(audit: Iterable[tenants_pb2.AuditEntry]) -> tuple[Entry, ...]:
    """The moves of aliases in a tenant's log, in any order of its entries."""
    moves: dict[tuple[str, str, int], tuple[bool, int]] = {}
    arms: dict[tuple[str, str, int], list[tuple[int, str, int]]] = {}
    for one in audit:
        before, after = (json.loads(text) if text else {} for text in (one.before, one.after))
        if one.object == "aliases" and after and after["generation"] != before.get("generation"):
            moves[after["adapter"], after["name"], after["generation"]] = (
                one.actor == _SERVICE_ACTOR,
                one.create_time.ToNanoseconds(),
            )
        elif one.object == "arms" and not before:
            arm = after["position"], after["version"], after["weight"]
            arms.setdefault((after["adapter"], after["alias"], after["generation"]), []).append(arm)
    found = []
    for (adapter, alias, generation), (is_service, time_ns) in sorted(moves.items()):
        moved = Moved(alias, generation, _in_order(arms.get((adapter, alias, generation), ())))
        found.append(Entry(adapter, moved, is_service, time_ns))
    return tuple(found)


def _in_order(arms: Iterable[tuple[int, str, int]]) -> tuple[tuple[str, int], ...]:
    return tuple((version, weight) for _, version, weight in sorted(arms))


def check_journal(subject: str, journal: Sequence[Entry], order: Sequence[Operation], start: State) -> list[Violation]:
    """Returns moves of an adapter that its part of the log lacks, or has and should not: as of a client, or of the service."""
    made: Counter[Entry] = Counter()
    for one, state, after in walked(order, start):
        made.update(Entry(subject, moved, one.client == SERVICE) for moved in moved_between(state, after))
    told = Counter(journal)
    missing = [Violation("the log lists every write", subject, f"{one} is not in it") for one in (made - told).elements()]
    return missing + [
        Violation("the log lists what was done", subject, f"{one} was not made") for one in (told - made).elements()
    ]
