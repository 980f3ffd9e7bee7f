"""What this node holds, as a sequence of changes that any number of readers follow from where they stand."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, Protocol

from dataplane.engine.messages import Holding, Moved

Tier = Literal["disk", "host", "loading", "device"]


@dataclass(frozen=True, slots=True)
class Held:
    """One version on this node.

    Attributes:
        version: The version.
        tier: Highest tier that holds it: an image file (`disk`), mapped in host memory (`host`), `loading`, or `device`.
        rank: Largest rank; 0 while it only lies on disk.
        size_bytes: Bytes of its image.
        leases: Leases held, as of the last look.
        epoch: Number of its load to the device; 0 before the first.
        uses: Leases given since the engine came to hold it.
        loss: Most that a projection loses in fp8, as the engine told at the last look; 0 in the model's dtype.
        loss_at: Which one.
    """

    version: str
    tier: Tier
    rank: int = 0
    size_bytes: int = 0
    leases: int = 0
    epoch: int = 0
    uses: int = 0
    loss: float = 0.0
    loss_at: str = ""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a reader stands: it knows all changes of the epoch up to this one."""

    epoch: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Update:
    """What a reader has to hear.

    Attributes:
        position: Where it stands then.
        is_snapshot: It forgets all that it knew: `held` is everything.
        held: Versions that are new or changed, as they are now.
        gone: Versions that the node holds no more.
    """

    position: Position
    is_snapshot: bool
    held: tuple[Held, ...]
    gone: tuple[str, ...]


class Files(Protocol):
    """Image files of the node; the host cache."""

    def sizes(self) -> Mapping[str, int]:
        """Returns the versions that have one, with its bytes."""

    def size_of(self, version: str) -> int | None:
        """Returns the bytes of a version's file, or None."""


class ResidencyFeed:
    """Merges what the engine holds with the image files, and keeps the last changes. Owned by the event loop.

    Moves are heard as they happen (`moved`, `unloaded`, `touch`); leases and uses, which change with every request, by looking
    (`show`). A change says which version, never what of it: a reader gets each changed version once, as it is when it reads.

    Args:
        files: Image files.
        max_changes: Changes that are kept for readers; who is further behind starts again.
        clock_ms: Milliseconds since 1970; epochs grow even when it goes back.
    """

    def __init__(
        self,
        files: Files,
        *,
        max_changes: int = 65_536,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._files = files
        self._clock_ms = clock_ms
        self._epoch = clock_ms()
        self._sequence = 0
        self._held: dict[str, Held] = {}
        self._engine: dict[str, Held] = {}
        self._changes: deque[str] = deque(maxlen=max_changes)
        self._changed = asyncio.Event()

    @property
    def position(self) -> Position:
        """Where a reader stands that knows everything."""
        return Position(self._epoch, self._sequence)

    def __len__(self) -> int:
        return len(self._held)

    def holds(self, version: str) -> bool:
        """Whether the node holds anything of a version."""
        return version in self._held

    def tiers(self) -> dict[str, int]:
        """Returns how many versions each tier holds, counted in their highest."""
        counts = {"disk": 0, "host": 0, "loading": 0, "device": 0}
        for held in self._held.values():
            counts[held.tier] += 1
        return counts

    def show(self, holdings: Iterable[Holding]) -> None:
        """Takes all that the engine holds."""
        self._engine = {
            one.version: Held(
                one.version, one.place, one.rank, one.size_bytes, one.leases, one.epoch, one.uses, one.loss, one.loss_at
            )
            for one in holdings
        }
        files = self._files.sizes()
        for version in {*self._held, *self._engine, *files}:
            self._set(version, self._now(version, files.get(version)))
        self._wake()

    def moved(self, event: Moved) -> None:
        """Hears that the engine moved a version."""
        version, known = event.version, self._engine.get(event.version)
        if event.place == "device":
            self._engine[version] = replace(
                known or Held(version, "device"),
                tier="device",
                rank=event.rank,
                size_bytes=event.size_bytes,
                leases=0,
                epoch=event.epoch,
            )
        elif event.place == "opened":
            held = known or Held(version, "host")
            self._engine[version] = replace(held, rank=event.rank, size_bytes=event.size_bytes)
        elif event.place == "host" and known is not None:
            self._engine[version] = replace(known, tier="host", leases=0)
        else:
            self._engine.pop(version, None)
        self.touch((version,))

    def unloaded(self, version: str) -> None:
        """Hears that the engine holds nothing of a version any more."""
        self._engine.pop(version, None)
        self.touch((version,))

    def touch(self, versions: Iterable[str]) -> None:
        """Looks again at versions whose image files came or went."""
        for version in versions:
            self._set(version, self._now(version, self._files.size_of(version)))
        self._wake()

    def engine_lost(self) -> None:
        """Hears that the engine ended, and with it all but files: a new epoch, in which every reader starts again."""
        self._engine.clear()
        self._held = {version: Held(version, "disk", size_bytes=size) for version, size in self._files.sizes().items()}
        self._epoch = max(self._epoch + 1, self._clock_ms())
        self._changes.clear()
        self._sequence += 1
        self._wake()

    def read(self, since: Position | None) -> Update:
        """Returns what a reader has to hear that stands somewhere; None stands nowhere."""
        num_missed = -1 if since is None or since.epoch != self._epoch else self._sequence - since.sequence
        if not 0 <= num_missed <= len(self._changes):
            return Update(self.position, is_snapshot=True, held=tuple(self._held.values()), gone=())
        changed = dict.fromkeys(islice(reversed(self._changes), num_missed))
        held = tuple(self._held[version] for version in changed if version in self._held)
        gone = tuple(version for version in changed if version not in self._held)
        return Update(self.position, is_snapshot=False, held=held, gone=gone)

    async def wait(self, since: Position) -> None:
        """Returns when there is something to hear for a reader that stands there."""
        while since == self.position:
            await self._changed.wait()

    def _now(self, version: str, file_bytes: int | None) -> Held | None:
        in_engine = self._engine.get(version)
        if in_engine is not None or file_bytes is None:
            return in_engine
        return Held(version, "disk", size_bytes=file_bytes)

    def _set(self, version: str, held: Held | None) -> None:
        if held == self._held.get(version):
            return
        if held is None:
            del self._held[version]
        else:
            self._held[version] = held
        self._sequence += 1
        self._changes.append(version)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
