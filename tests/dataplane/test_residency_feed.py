"""Readers of what the node holds know the same as the node, wherever they stood."""

from __future__ import annotations

import asyncio
import random

from dataplane.engine.messages import Holding, Moved
from dataplane.residency_feed import Held, Position, ResidencyFeed, Update


class Files:
    def __init__(self, **sizes: int) -> None:
        self.known = sizes

    def sizes(self) -> dict[str, int]:
        return dict(self.known)

    def size_of(self, version: str) -> int | None:
        return self.known.get(version)


class Reader:
    """Knows what it was told."""

    def __init__(self) -> None:
        self.position: Position | None = None
        self.known: dict[str, Held] = {}

    def take(self, update: Update) -> Update:
        if update.is_snapshot:
            self.known.clear()
        self.known.update({held.version: held for held in update.held})
        for version in update.gone:
            self.known.pop(version, None)  # it may have come and gone between
        self.position = update.position
        return update


def feed(files: Files | None = None, **changes: int) -> ResidencyFeed:
    return ResidencyFeed(files or Files(), clock_ms=lambda: 1000, **changes)


def holding(version: str, place: str = "device", *, leases: int = 0) -> Holding:
    return Holding(version, place, 8, 100, leases, 1, uses=3)  # type: ignore[arg-type]


async def test_the_highest_tier_counts_and_files_alone_lie_on_disk() -> None:
    made = feed(Files(a=50, b=60, c=70))
    made.show([holding("a", "device", leases=2), holding("b", "host")])
    update = made.read(None)
    assert update.is_snapshot
    held = {one.version: (one.tier, one.size_bytes, one.leases) for one in update.held}
    assert held == {"a": ("device", 100, 2), "b": ("host", 100, 0), "c": ("disk", 70, 0)}
    assert made.tiers() == {"disk": 1, "host": 1, "loading": 0, "device": 1}
    assert made.holds("c")
    assert not made.holds("d")


async def test_a_reader_hears_only_what_changed_each_version_once_as_it_is_now() -> None:
    made, reader = feed(), Reader()
    made.show([holding("a"), holding("b")])
    reader.take(made.read(None))
    made.moved(Moved("a", "host", reason="room"))
    made.moved(Moved("a", "device", 0.1, rank=8, size_bytes=100, epoch=7))
    made.unloaded("b")
    update = reader.take(made.read(reader.position))
    assert not update.is_snapshot
    assert (update.held, update.gone) == ((Held("a", "device", 8, 100, 0, 7, 3),), ("b",))
    again = made.read(reader.position)
    assert (again.held, again.gone, again.is_snapshot) == ((), (), False)


async def test_an_image_that_was_opened_lies_in_host_memory_unless_the_device_has_it() -> None:
    made = feed(Files(a=120))
    made.touch(["a"])
    for event, tier in ((Moved("a", "opened", rank=8, size_bytes=100), "host"), (Moved("a", "device", size_bytes=100), "device")):
        made.moved(event)
        assert [(one.tier, one.size_bytes) for one in made.read(None).held] == [(tier, 100)]
    made.moved(Moved("a", "opened", rank=8, size_bytes=100))
    assert [one.tier for one in made.read(None).held] == ["device"]


async def test_what_a_version_loses_in_fp8_stays_known_when_it_moves() -> None:
    made = feed()
    made.show([Holding("a", "loading", 8, 100, 0, 0, loss=0.04, loss_at="layers.0.mlp.down_proj")])
    for place in ("device", "host"):
        made.moved(Moved("a", place, rank=8, size_bytes=100, epoch=1))  # type: ignore[arg-type]
        (held,) = made.read(None).held
        assert (held.tier, held.loss, held.loss_at) == (place, 0.04, "layers.0.mlp.down_proj")


async def test_a_look_that_shows_nothing_new_is_no_change() -> None:
    made = feed()
    made.show([holding("a")])
    before = made.position
    made.show([holding("a")])
    assert made.position == before
    made.show([holding("a", leases=1)])
    assert made.position.sequence == before.sequence + 1


async def test_who_is_further_behind_than_the_changes_that_are_kept_starts_again() -> None:
    made, slow, quick = feed(max_changes=3), Reader(), Reader()
    made.show([holding("a")])
    for reader in (slow, quick):
        reader.take(made.read(None))
    for version in "bcd":
        made.moved(Moved(version, "device", epoch=1))
    assert not quick.take(made.read(quick.position)).is_snapshot
    made.moved(Moved("e", "device", epoch=1))
    assert not quick.take(made.read(quick.position)).is_snapshot
    assert slow.take(made.read(slow.position)).is_snapshot
    assert slow.known == quick.known
    assert set(slow.known) == set("abcde")


async def test_a_new_engine_is_a_new_epoch_though_the_clock_stands_still() -> None:
    made, reader = feed(Files(a=50)), Reader()
    made.show([holding("a"), holding("b")])
    reader.take(made.read(None))
    made.engine_lost()
    update = reader.take(made.read(reader.position))
    assert (update.is_snapshot, update.position.epoch) == (True, 1001)
    assert reader.known == {"a": Held("a", "disk", size_bytes=50)}


async def test_a_position_of_another_epoch_or_of_the_future_is_nowhere() -> None:
    made = feed()
    made.show([holding("a")])
    for position in (Position(999, 1), Position(1000, 99)):
        assert made.read(position).is_snapshot


async def test_who_waits_is_woken_by_a_change() -> None:
    made = feed()
    waiting = asyncio.create_task(made.wait(made.position))
    await asyncio.sleep(0)
    made.show([])
    await asyncio.sleep(0)
    assert not waiting.done(), "nothing changed"
    made.show([holding("a")])
    async with asyncio.timeout(60):
        await waiting


async def test_readers_that_stop_and_go_at_random_always_know_what_the_node_holds() -> None:
    for seed in range(20):
        choose = random.Random(seed)
        files = Files()
        made, readers = feed(files, max_changes=8), [Reader() for _ in range(4)]
        held: dict[str, Holding] = {}
        for _ in range(300):
            version = choose.choice("abcdef")
            match choose.randrange(6):
                case 0:
                    files.known[version] = 50
                case 1:
                    files.known.pop(version, None)
                    made.touch((version,))
                case 2:
                    held[version] = holding(version, choose.choice(["host", "loading", "device"]), leases=choose.randrange(3))
                case 3:
                    held.pop(version, None)
                    made.unloaded(version)
                case 4 if choose.random() < 0.1:
                    held.clear()
                    made.engine_lost()
                case _:
                    made.show(held.values())
            reader = choose.choice(readers)
            reader.take(made.read(reader.position))
            assert reader.known == {one.version: one for one in made.read(None).held}
        made.show(held.values())
        assert {one.version for one in made.read(None).held} == {*held, *files.known}
