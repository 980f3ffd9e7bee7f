"""Clients that use a catalogue at the same time: what they ask for is drawn at random, what they know is what they saw."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.histories.calls import Connection, Content
from benchmarks.histories.recorder import Recorder
from benchmarks.histories.records import (
    Call,
    Condemn,
    Delete,
    DeleteAdapter,
    Done,
    Freeze,
    Frozen,
    Grant,
    Listed,
    Lost,
    Moved,
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
    Retire,
    Revoke,
    RevokeKey,
    Rollback,
    SetAlias,
    Shown,
    StartCanary,
    StopCanary,
    UseKey,
)
from benchmarks.histories.system import Key

ALIASES = ("stable", "canary")
_MAX_ATTEMPTS = 5
_RECENT = 6
"""Versions and writes that clients still think of."""


@dataclass(slots=True)
class Board:
    """What clients know of one adapter, right or not any more. Shared by the clients of one event loop.

    Attributes:
        adapter: Its name.
        first: Number of its first content; each adapter has its own.
        digests: Versions that were published, oldest first.
        generations: Last generation seen of each alias.
        canaries: Last canary seen to run of each alias.
        writes: Writes with a request id that may be repeated.
        num_contents: Contents made so far.
    """

    adapter: str
    first: int
    digests: list[str] = field(default_factory=list)
    generations: dict[str, int] = field(default_factory=dict)
    canaries: dict[str, Shown] = field(default_factory=dict)
    writes: list[tuple[Call, str]] = field(default_factory=list)
    num_contents: int = 0

    def new_digest(self, content: Content) -> str:
        """Digest of content that nobody published yet."""
        self.num_contents += 1
        return content.digest(self.first + self.num_contents)

    def learn(self, outcome: Outcome | None) -> None:
        """Takes note of what a call showed."""
        moved = outcome.moved if isinstance(outcome, Published) else outcome
        moved = moved.alias if isinstance(moved, Frozen) else moved
        if isinstance(outcome, Published) and outcome.digest not in self.digests:
            self.digests.append(outcome.digest)
        if isinstance(outcome, Shown) and outcome.state == "RUNNING":
            self.canaries[outcome.alias] = outcome
            moved = outcome.moved
        elif isinstance(outcome, Shown):
            self.canaries.pop(outcome.alias, None)
        if isinstance(moved, Moved):
            self.generations[moved.alias] = max(moved.generation, self.generations.get(moved.alias, 0))


class World:
    """What the clients of one history share: keys, contents, boards."""

    def __init__(self, *, owner: Key, guest: Key, spare: Sequence[Key], num_adapters: int, first_content: int) -> None:
        self.owner = owner
        self.guest = guest
        self.spare = list(spare)
        self.content = Content(owner.tenant)
        self.boards = [Board(f"adapter-{number}", first_content + 1000 * number) for number in range(num_adapters)]


class Client:
    """One client. Owned by its task.

    Attributes:
        connections: One to each control plane.
    """

    def __init__(self, number: int, connections: Sequence[Connection], world: World, recorder: Recorder, *, seed: int) -> None:
        self._number = number
        self.connections = connections
        self._world = world
        self._recorder = recorder
        self._chance = random.Random(seed)
        self._num_ids = 0
        self._epoch = str(uuid.UUID(int=self._chance.getrandbits(128), version=4))
        self._num_reports = 0

    async def run(self, *, until: Callable[[], bool], pause_s: float) -> None:
        """Makes calls until told to stop."""
        actions: list[tuple[int, Callable[[Board], Awaitable[None]]]] = [
            (30, self._resolve),
            (12, self._read),
            (40, self._write),
            (6, self._repeat),
            (5, self._watch),
            (3, self._condemn),
            (1, self._revoke_key),
        ]
        weights = [weight for weight, _ in actions]
        while not until():
            await self._chance.choices(actions, weights)[0][1](self._chance.choice(self._world.boards))
            await asyncio.sleep(self._chance.uniform(0, 2 * pause_s))

    async def begin(self) -> None:
        """Publishes the first versions, so that there is something to work on."""
        for board in self._world.boards:
            for _ in range(2):
                await self._do(board, Publish(board.new_digest(self._world.content)), request_id=self._new_id())

    async def settle(self, *, timeout_s: float) -> None:
        """Writes once more to each alias until that is known, which ends its canary, and reads everything: the truth at the end.

        Raises:
            TimeoutError: The system does not come back.
        """
        for board in self._world.boards:
            deadline = time.monotonic() + timeout_s
            for alias in ALIASES:
                await self._publish_surely(board, alias, deadline=deadline)
            for plane in range(len(self.connections)):
                await self._read_all(board, plane)
                for alias in ALIASES:
                    await self._read_canary(board, ReadCanary(alias), plane)
                for caller in ("", self._world.guest.tenant):
                    await self._resolve_as(board, Resolve(caller, ALIASES[0]), self._key_of(caller), plane)
        for key in self._world.spare:
            await self._resolve_as(self._world.boards[0], Resolve("", ALIASES[0]), key, 0)

    async def _publish_surely(self, board: Board, alias: str, *, deadline: float) -> None:
        last: Outcome | None = None
        while not isinstance(last, Published):
            if time.monotonic() > deadline:  # not in the middle of a write: every write is noted
                raise TimeoutError(f"no publish to {alias!r} succeeds: {last}")
            await asyncio.sleep(0.05)
            await self._do(board, Freeze(alias, frozen=False), request_id="")
            what = Publish(board.new_digest(self._world.content), alias)
            last = await self._do(board, what, request_id=self._new_id())

    def _key_of(self, caller: str) -> Key:
        return self._world.guest if caller else self._world.owner

    def _new_id(self) -> str:
        self._num_ids += 1
        return f"{self._number}-{self._num_ids}"

    def _plane(self) -> int:
        return self._chance.randrange(len(self.connections))

    async def _resolve(self, board: Board) -> None:
        roll = self._chance.random()
        what = Resolve(self._world.guest.tenant if roll < 0.45 else "", self._chance.choice(ALIASES))
        if roll > 0.85:
            what = Resolve("", "", self._digest(board))
        key = self._key_of(what.caller)
        if not what.caller and self._world.spare and self._chance.random() < 0.4:
            key = self._chance.choice(self._world.spare)
        await self._resolve_as(board, what, key, self._plane())

    async def _resolve_as(self, board: Board, what: Resolve, key: Key, plane: int) -> None:
        attempt = await self._recorder.attempt(self._number, plane, self.connections[plane].resolve(board.adapter, what, key=key))
        outcome = attempt.answer or attempt.refusal
        is_known = outcome is not None and not isinstance(outcome, Lost)
        let_in = outcome != Refused("UNAUTHENTICATED") if is_known else None
        if let_in is not False:
            self._recorder.note(attempt, board.adapter, what, outcome)
        if let_in is not None:
            self._recorder.note(attempt, f"key {key.id}", UseKey(), Done() if let_in else Refused("UNAUTHENTICATED"))

    async def _read(self, board: Board) -> None:
        await self._read_all(board, self._plane())

    async def _read_all(self, board: Board, plane: int) -> None:
        connection = self.connections[plane]
        both = await self._recorder.attempt(self._number, plane, connection.read(board.adapter))
        aliases, count = both.answer or (both.refusal, both.refusal)
        if aliases != Listed(()):  # of an adapter without aliases, or deleted between the two reads
            self._recorder.note(both, board.adapter, ReadAliases(), aliases)
        self._recorder.note(both, board.adapter, ReadCount(), count)
        for item in getattr(aliases, "items", ()):
            board.learn(item)
        versions = await self._recorder.attempt(self._number, plane, connection.versions(board.adapter))
        if versions.answer != Listed(()):  # as above
            self._recorder.note(versions, board.adapter, ReadVersions(), versions.answer or versions.refusal)

    async def _watch(self, board: Board) -> None:
        await self._read_canary(board, ReadCanary(self._chance.choice(ALIASES)), self._plane())

    async def _read_canary(self, board: Board, what: ReadCanary, plane: int) -> None:
        attempt = await self._recorder.attempt(self._number, plane, self.connections[plane].canary(board.adapter, what))
        outcome = attempt.answer or attempt.refusal
        self._recorder.note(attempt, board.adapter, what, outcome)
        board.learn(outcome)

    async def _condemn(self, board: Board) -> None:
        """Reports that a canary does badly, most times one that runs."""
        if not board.canaries:
            return
        seen = self._chance.choice(list(board.canaries.values()))
        what = Condemn(seen.alias, seen.generation, seen.version, seen.stable)
        self._num_reports += 1
        plane = self._plane()
        report = self.connections[plane].condemn(board.adapter, what, epoch=self._epoch, sequence=self._num_reports)
        attempt = await self._recorder.attempt(self._number, plane, report, is_write=True)
        self._recorder.note(attempt, board.adapter, what, attempt.answer or attempt.refusal)

    async def _write(self, board: Board) -> None:
        what = self._draw(board)
        has_id = isinstance(what, Publish) or self._chance.random() < 0.8
        await self._do(board, what, request_id=self._new_id() if has_id else "")

    async def _repeat(self, board: Board) -> None:
        """Sends a write of anybody's again, now and then with something else under its request id.

        A dry run takes no request id: what comes later under it is done.
        """
        if board.writes:
            what, request_id = self._chance.choice(board.writes[-_RECENT:])
            other = SetAlias(ALIASES[0], ((self._digest(board), 1),))
            if not isinstance(what, Publish) and self._chance.random() < 0.2:
                what = other
            elif isinstance(what, DeleteAdapter):
                what = replace(what, dry_run=self._chance.random() < 0.7)
            await self._do(board, what, request_id=request_id)

    async def _do(self, board: Board, what: Call, *, request_id: str) -> Outcome | None:
        """Makes a write, and mostly makes it again while its outcome is not known."""
        if request_id:
            board.writes.append((what, request_id))
        outcome: Outcome | None = None
        for number in range(_MAX_ATTEMPTS):
            plane = self._plane()
            call = self.connections[plane].write(board.adapter, what, request_id=request_id)
            attempt = await self._recorder.attempt(self._number, plane, call, is_write=True)
            outcome = attempt.answer or attempt.refusal
            self._recorder.note(attempt, board.adapter, what, outcome, request_id=request_id)
            board.learn(outcome)
            if outcome is not None or (number > 0 and self._chance.random() < 0.2):
                break
            await asyncio.sleep(self._chance.uniform(0.02, 0.3))
        return outcome

    async def _revoke_key(self, board: Board) -> None:
        del board
        if self._world.spare:
            key, plane = self._chance.choice(self._world.spare), self._plane()
            attempt = await self._recorder.attempt(self._number, plane, self.connections[plane].revoke_key(key), is_write=True)
            self._recorder.note(attempt, f"key {key.id}", RevokeKey(), attempt.answer or attempt.refusal)

    def _digest(self, board: Board) -> str:
        return self._chance.choice(board.digests[-_RECENT:]) if board.digests else board.new_digest(self._world.content)

    def _draw(self, board: Board) -> Call:
        chance, alias, digest = self._chance, self._chance.choice(ALIASES), self._digest(board)
        guest = self._world.guest.tenant
        expected = board.generations.get(alias, 0) if chance.random() < 0.7 else None
        other = self._digest(board)
        split = ((digest, chance.randrange(1, 100)), (other, chance.randrange(1, 100))) if other != digest else ((digest, 1),)
        kind = chance.choices(range(14), [7, 18, 7, 12, 4, 6, 12, 14, 2, 9, 8, 8, 26, 10])[0]
        if kind == 0:
            return Publish(board.new_digest(self._world.content), chance.choice(["", *ALIASES]))
        if kind == 8:
            return Publish(digest, chance.choice(["", *ALIASES]))
        calls: dict[int, Call] = {
            1: SetAlias(alias, ((digest, 1),), expected),
            2: SetAlias(alias, split, expected),
            3: Rollback(alias, digest if chance.random() < 0.3 else "", expected),
            4: Retire(digest),
            5: Delete(digest, force=chance.random() < 0.4),
            6: Grant(guest),
            7: Revoke(guest),
            9: self._promotion(alias, digest, expected),
            10: Freeze(alias, frozen=chance.random() < 0.25),
            11: DeleteAdapter(force=chance.random() < 0.9, dry_run=chance.random() < 0.75),
            12: self._canary(alias, digest, expected),
            13: StopCanary(chance.choice(list(board.canaries) or ALIASES)),
        }
        return calls[kind]

    def _promotion(self, alias: str, digest: str, expected: int | None) -> Promote:
        if self._chance.random() < 0.5:
            return Promote(alias, "", digest, expected)
        (source,) = set(ALIASES) - {alias}
        return Promote(alias, source, digest if self._chance.random() < 0.3 else "", expected)

    def _canary(self, alias: str, version: str, expected: int | None) -> StartCanary:
        weights = sorted(self._chance.sample(range(1, 100), self._chance.randrange(1, 4)))
        return StartCanary(alias, version, tuple(weights), self._chance.choice([0, 0, 0, 100]), expected)
