"""The change feed against what the found orders say was done: nothing skipped, nothing made up, each alias in order."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.histories.history import Change, Feed, Violation
from benchmarks.histories.model import step
from benchmarks.histories.records import Delete, DeleteAdapter, Deleted, Done, Grant, Moved, Operation, Publish, Retire, Revoke
from benchmarks.histories.state import AdapterState, State


@dataclass(frozen=True, slots=True)
class Effects:
    """What one adapter's operations must have told the feed.

    Attributes:
        moves: Events of each alias, in order.
        versions: How often each version must have been told of.
        grants: Least and most events of grants.
    """

    moves: Mapping[str, Sequence[Change]]
    versions: Counter[str]
    grants: tuple[int, int] = (0, 0)


def effects_of(subject: str, operations: Sequence[Operation], order: Sequence[Operation], start: State) -> Effects:
    """Returns the events that operations make whose effects came in an order."""
    moves: dict[str, list[Change]] = {}
    versions: Counter[str] = Counter()
    for one, state, after in walked(order, start):
        if (state.versions, state.generations) != (after.versions, after.generations):
            if isinstance(one.what, Publish):
                versions[one.what.digest] += 1
            elif isinstance(one.what, Retire | Delete):
                versions[one.what.version] += 1
            elif isinstance(one.what, DeleteAdapter):
                versions.update(version.digest for version in state.versions)
            for moved in moved_between(state, after):
                version = moved.arms[0][0] if len(moved.arms) == 1 else ""
                moves.setdefault(moved.alias, []).append(Change("ALIAS", subject, version, moved.generation))
    return Effects(moves, versions, _changes_of_grants(operations))


def _changes_of_grants(operations: Sequence[Operation]) -> tuple[int, int]:
    """How often grants changed, at least and at most: each withdrawal ended one that was given, and one more may have been given.

    A deletion of the adapter ends all at once, and each may be given again.
    Whether a second grant in a row did anything depends on unknown outcomes in between, so no order says it.
    """
    least = most = num_open = 0
    grantees = {one.what.grantee for one in operations if isinstance(one.what, Grant)}
    deletions = [one for one in operations if isinstance(one.what, DeleteAdapter) and not one.what.dry_run]
    deleted = [one for one in deletions if isinstance(one.outcome, Deleted | None)]
    most += (1 + len(grantees)) * len({one.request_id or one.id for one in deleted})
    for grantee in grantees:
        withdrawn = [one for one in operations if isinstance(one.what, Revoke) and one.what.grantee == grantee]
        done = {one.request_id or one.id for one in withdrawn if isinstance(one.outcome, Done)}
        least += 2 * len(done)
        most += 2 * len(done | {one.request_id or one.id for one in withdrawn if one.outcome is None})
        num_open += 1
    return least, most + num_open


def walked(order: Sequence[Operation], start: State) -> Iterator[tuple[Operation, AdapterState, AdapterState]]:
    """An adapter's operations in an order, each with the states before and after it."""
    state = start
    for one in order:
        _, after = step(state, one)
        assert isinstance(state, AdapterState)
        assert isinstance(after, AdapterState)
        yield one, state, after
        state = after


def moved_between(before: AdapterState, after: AdapterState) -> Iterator[Moved]:
    """Aliases that one operation moved, as they are after it."""
    known = dict(before.generations)
    for name, generation in after.generations:
        if known.get(name) != generation:
            yield after.alias(name) or Moved(name, generation, ())


def check_feed(subject: str, feed: Feed, effects: Effects) -> list[Violation]:
    """Returns what the feed did wrong about one adapter.

    A feed that said to read everything again, as it does when the database was restarted, owes only what came after that.
    """
    mine = [one for one in feed.changes if one.subject == subject]
    kept = mine if not feed.resets else [one for one in feed.changes[feed.resets[-1] :] if one.subject == subject]
    expected = Counter(one for moves in effects.moves.values() for one in moves)
    seen = Counter(one for one in mine if one.kind == "ALIAS")
    told = Counter(one.version for one in mine if one.kind == "VERSION")
    extra = [*map(str, (seen - expected).elements()), *(f"version {one[:12]}" for one in (told - effects.versions).elements())]
    missing = [*map(str, (expected - seen).elements()), *(f"version {one[:12]}" for one in (effects.versions - told).elements())]
    found = [Violation("the feed tells what was done, once", subject, f"{one} was made up or told again") for one in extra]
    if not feed.resets:
        found += [Violation("the feed skips nothing", subject, f"{one} was not told") for one in missing]
    least, most = effects.grants
    if (num_grants := sum(one.kind == "GRANT" for one in mine)) > most:
        text = f"{num_grants} changes of grants, at most {most} were made"
        found.append(Violation("the feed tells what was done, once", subject, text))
    elif num_grants < least and not feed.resets:
        text = f"{num_grants} changes of grants, at least {least} were made"
        found.append(Violation("the feed skips nothing", subject, text))
    moved = [one for one in kept if one.kind == "ALIAS"]
    if not found and not _is_interleaving(moved, list(effects.moves.values()), from_anywhere=bool(feed.resets)):
        found.append(Violation("the feed is in the order of commits", subject, "no order of each alias's moves reads like this"))
    return found


def _is_interleaving(events: Sequence[Change], lanes: Sequence[Sequence[Change]], *, from_anywhere: bool) -> bool:
    """Whether events are lanes merged, whole ones or (after a reset) an end of each."""
    full = tuple(len(lane) for lane in lanes)
    places = set(itertools.product(*(range(length + 1) for length in full))) if from_anywhere else {(0,) * len(lanes)}
    for event in events:
        places = {
            tuple(place + (other == at) for other, place in enumerate(reached))
            for reached in places
            for at, lane in enumerate(lanes)
            if reached[at] < len(lane) and lane[reached[at]] == event
        }
    return full in places
