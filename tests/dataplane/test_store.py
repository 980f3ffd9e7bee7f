"""Only the version's own bytes ever become an image, whatever the store does."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from dataplane import store as store_module
from dataplane.blob_grants import Blob, LostFileError
from dataplane.enrollment import NotEnrolledError
from dataplane.load_room import Amount
from dataplane.lora.host_cache import HostCache, HostCacheFullError
from dataplane.lora.image import Image
from dataplane.lora.image_file import open_image
from dataplane.store import AdapterStore, StoreLimits
from dataplane.transfer import CorruptVersionError, DeletedVersionError, UnloadableVersionError
from tests.dataplane.doubles import FolderSource, until
from tests.fixtures.adapters import make_adapter_folder
from veneer.artifact import BaseDescription, BaseWeights, Limits
from veneer.errors import NotFoundError, PermissionDeniedError, UnavailableError, VeneerError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
CUT = UnavailableError("cut")


class Shelf:
    """A store over a folder source, with its cache."""

    def __init__(self, tmp_path: Path, base: BaseDescription) -> None:
        self.base = base
        self.tmp_path = tmp_path
        self.source = FolderSource(make_adapter_folder(tmp_path / "adapter", base, ranks=4), base_digest=base.digest)
        self.cache = HostCache(tmp_path / "images", dtype="float32", max_bytes=1 << 20)
        self.evicted: list[str] = []
        self.parts: list[str] = []
        self.store = self.build()

    def build(
        self,
        limits: Limits | None = None,
        *,
        max_fetches: int = 8,
        dtype: str = "float32",
        max_loss: float = 0.1,
        patience_s: float = 30.0,
    ) -> AdapterStore:
        return AdapterStore(
            self.source,
            cache=self.cache,
            on_evicted=self.evicted.extend,
            base=self.base,
            base_weights=BaseWeights(self.tmp_path / "base"),
            folder=self.tmp_path / "work",
            dtype=dtype,
            max_loss=max_loss,
            artifact_limits=limits or Limits(),
            limits=StoreLimits(max_fetches=max_fetches, max_resumes=3, backoff_s=0.001, patience_s=patience_s),
            observe=lambda part, seconds: self.parts.append(part),
        )

    @property
    def version(self) -> str:
        return self.source.version

    def has_left_nothing(self) -> bool:
        return not list((self.tmp_path / "work").iterdir()) and not list((self.tmp_path / "images").iterdir())


@pytest.fixture
def shelf(tmp_path: Path, tiny_base: BaseDescription) -> Shelf:
    return Shelf(tmp_path, tiny_base)


async def test_a_version_becomes_an_image_in_the_cache(shelf: Shelf) -> None:
    path = await shelf.store.fetch(shelf.version)
    image = open_image(path, version=shelf.version, dtype="float32")
    assert (image.base_digest, image.rank) == (shelf.base.digest, 4)
    assert shelf.cache.find(shelf.version) == path
    assert shelf.cache.num_bytes == path.stat().st_size
    assert not list((shelf.tmp_path / "work").iterdir())
    assert shelf.parts == ["grant", "read", "build"]


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def short(data: bytes) -> bytes:
    return data[:-1]


def long(data: bytes) -> bytes:
    return data + b"x"


def error_page(data: bytes) -> bytes:
    return b"<html>not found</html>"


def empty(data: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("fault", [flipped, short, long, error_page, empty])
async def test_wrong_bytes_are_read_again_once_and_then_right(shelf: Shelf, fault: Callable[[bytes], bytes]) -> None:
    shelf.source.faults[WEIGHTS] = [fault]
    await shelf.store.fetch(shelf.version)
    assert shelf.store.num_corrupt == 1
    assert shelf.source.reported == []


@pytest.mark.parametrize("fault", [flipped, short, long, error_page, empty])
@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
async def test_bytes_that_are_wrong_twice_are_refused_and_reported(
    shelf: Shelf, fault: Callable[[bytes], bytes], name: str
) -> None:
    shelf.source.faults[name] = [fault, fault]
    with pytest.raises(CorruptVersionError):
        await shelf.store.fetch(shelf.version)
    assert shelf.source.reported == [shelf.version]
    assert shelf.has_left_nothing()


async def test_a_store_that_names_other_files_is_not_believed(shelf: Shelf) -> None:
    config, weights = shelf.source.grant.blobs
    grant = shelf.source.grant
    for blobs in (
        (config, dataclasses.replace(weights, digest="0" * 64)),
        (config, dataclasses.replace(weights, digest="nonsense")),
        (config, dataclasses.replace(weights, name="../../escape")),
        (config, weights, weights),
        (config,),
        (),
        (config, weights, Blob("extra.bin", "0" * 64, 1, "")),
    ):
        shelf.source.grant = dataclasses.replace(grant, blobs=blobs)
        with pytest.raises(CorruptVersionError):
            await shelf.store.fetch(shelf.version)
    shelf.source.grant = dataclasses.replace(grant, owner="mallory")
    with pytest.raises(CorruptVersionError):
        await shelf.store.fetch(shelf.version)
    assert shelf.source.num_transfers == 0
    assert shelf.has_left_nothing()


async def test_a_version_for_another_base_is_not_even_read(shelf: Shelf) -> None:
    shelf.source.grant = dataclasses.replace(shelf.source.grant, base_digest="1" * 64)
    with pytest.raises(UnloadableVersionError, match="another base"):
        await shelf.store.fetch(shelf.version)
    assert shelf.source.num_transfers == 0


async def test_a_transfer_that_is_cut_goes_on_where_it_stopped(shelf: Shelf) -> None:
    shelf.source.faults[WEIGHTS] = [CUT, CUT]
    await shelf.store.fetch(shelf.version)
    assert shelf.source.offsets[CONFIG] == [0]
    offsets = shelf.source.offsets[WEIGHTS]
    assert len(offsets) == 3
    assert offsets[0] == 0
    assert offsets == sorted(set(offsets))
    assert shelf.store.num_corrupt == 0


async def test_a_grant_that_ends_during_a_transfer_is_asked_for_again(shelf: Shelf) -> None:
    shelf.source.faults[WEIGHTS] = [PermissionDeniedError("the grant has ended")]
    await shelf.store.fetch(shelf.version)
    assert shelf.source.num_grants == 2


async def test_a_file_that_is_missing_for_a_moment_is_read_again_under_a_new_grant(shelf: Shelf) -> None:
    shelf.source.faults[WEIGHTS] = [LostFileError("files of the version are lost")] * 2
    await shelf.store.fetch(shelf.version)
    assert shelf.source.num_grants == 3
    assert shelf.store.num_corrupt == 0


async def test_a_file_that_stays_missing_is_lost_and_not_corrupt(shelf: Shelf) -> None:
    shelf.source.faults[WEIGHTS] = [LostFileError("files of the version are lost")] * 3
    with pytest.raises(LostFileError):
        await shelf.store.fetch(shelf.version)
    assert len(shelf.source.offsets[WEIGHTS]) == 3
    assert shelf.source.reported == []
    assert shelf.has_left_nothing()


async def test_a_version_that_is_deleted_during_its_transfer_is_refused_as_such(shelf: Shelf) -> None:
    def delete(_: bytes) -> bytes:
        shelf.source.version = "f" * 64
        raise LostFileError("files of the version are lost")

    deleted = shelf.version
    shelf.source.faults[WEIGHTS] = [delete]
    with pytest.raises(DeletedVersionError):
        await shelf.store.fetch(deleted)
    assert shelf.has_left_nothing()


async def test_a_store_that_stays_away_is_unavailable_and_not_corrupt(shelf: Shelf) -> None:
    shelf.source.faults[WEIGHTS] = [CUT] * 4
    with pytest.raises(UnavailableError, match="the store cannot be read"):
        await shelf.store.fetch(shelf.version)
    assert shelf.source.reported == []
    assert shelf.has_left_nothing()


async def test_a_store_that_brings_nothing_for_too_long_is_not_asked_again(shelf: Shelf) -> None:
    shelf.source.faults[WEIGHTS] = [CUT]
    with pytest.raises(UnavailableError, match="the store cannot be read"):
        await shelf.build(patience_s=0.0).fetch(shelf.version)
    assert len(shelf.source.offsets[WEIGHTS]) == 1
    assert shelf.has_left_nothing()


async def test_a_version_that_may_not_be_served_any_more_is_refused(shelf: Shelf) -> None:
    with pytest.raises(NotFoundError, match="no such adapter, alias or version"):
        await shelf.store.fetch("f" * 64)


@pytest.mark.parametrize("error", [NotEnrolledError(), PermissionDeniedError("not a node")])
async def test_a_node_that_may_not_load_any_more_does_not_blame_the_caller(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, error: VeneerError
) -> None:
    async def refuse(_: str) -> None:
        raise error

    monkeypatch.setattr(shelf.source, "grant_blobs", refuse)
    with pytest.raises(UnavailableError, match=r"not enrolled any more|this node may not"):
        await shelf.store.fetch(shelf.version)


async def test_a_version_beyond_the_nodes_own_limits_is_refused_but_not_reported(shelf: Shelf) -> None:
    shelf.store = shelf.build(Limits(max_rank=3))
    with pytest.raises(UnloadableVersionError):
        await shelf.store.fetch(shelf.version)
    shelf.store = shelf.build(Limits(max_weights_bytes=100))
    with pytest.raises(UnloadableVersionError, match="larger than this node loads"):
        await shelf.store.fetch(shelf.version)
    assert shelf.source.reported == []


async def test_in_fp8_an_image_fits_what_was_reserved_for_it_and_its_loss_is_logged(
    shelf: Shelf, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved: list[int] = []
    reserve = shelf.cache.reserve
    monkeypatch.setattr(
        shelf.cache,
        "reserve",
        lambda version, size_bytes, ahead: (reserved.append(size_bytes), reserve(version, size_bytes=size_bytes, ahead=ahead))[1],
    )
    with caplog.at_level("INFO", logger="dataplane.store"):
        path = await shelf.build(dtype="fp8").fetch(shelf.version)
    image = open_image(path, version=shelf.version, dtype="fp8")
    assert path.stat().st_size <= reserved[0]
    assert image.loss is not None
    (record,) = (record for record in caplog.records if record.message == "a version is kept in fp8")
    assert vars(record)["loss"] == round(image.loss.error, 4)
    assert vars(record)["at"].startswith(f"model.layers.{image.loss.layer}.")


async def test_a_version_that_loses_more_in_fp8_than_the_limit_is_refused_with_both(shelf: Shelf) -> None:
    with pytest.raises(UnloadableVersionError, match=r"layer \d, slice \d: loses 0.* max_adapter_loss is 0.01"):
        await shelf.build(dtype="fp8", max_loss=0.01).fetch(shelf.version)
    assert shelf.has_left_nothing()


async def test_an_image_makes_room_for_itself_and_says_for_whom_not(shelf: Shelf) -> None:
    shelf.cache.path("old").write_bytes(b"x" * (1 << 20))
    shelf.cache.add("old", size_bytes=1 << 20)
    shelf.cache.hold("old")
    with pytest.raises(HostCacheFullError):
        await shelf.store.fetch(shelf.version)
    assert shelf.cache.num_bytes == 1 << 20
    shelf.cache.let_go("old")
    await shelf.store.fetch(shelf.version)
    assert shelf.evicted == ["old"]


@pytest.mark.parametrize(("dtype", "stored"), [("float32", "F32"), ("float32", "BF16"), ("bfloat16", "F32"), ("fp8", "BF16")])
async def test_a_fetch_says_what_files_and_image_take_and_they_take_no_more(
    shelf: Shelf, tmp_path: Path, dtype: str, stored: str
) -> None:
    folder = make_adapter_folder(tmp_path / stored, shelf.base, ranks=16, dtype=stored)
    shelf.source = FolderSource(folder, base_digest=shelf.base.digest)
    shelf.store = shelf.build(dtype=dtype)
    told: list[Amount] = []

    async def room(amount: Amount) -> None:
        told.append(amount)

    path = await shelf.store.fetch(shelf.version, room=room)
    files, image = told
    assert files.memory >= 2 * sum(map(len, shelf.source.files.values()))
    assert files.image == image.memory == image.disk == 0
    assert image.image >= open_image(path, version=shelf.version).num_bytes > 0


async def test_fetches_at_the_same_time_are_bounded(shelf: Shelf) -> None:
    shelf.store = shelf.build(max_fetches=2)
    shelf.source.open.clear()
    fetches = asyncio.gather(*(shelf.store.fetch(shelf.version) for _ in range(6)))
    await until(lambda: shelf.source.num_running == 4)
    shelf.source.open.set()
    await fetches
    assert shelf.source.max_running == 4


async def test_a_fetch_that_is_cancelled_leaves_nothing_behind(shelf: Shelf) -> None:
    task = asyncio.create_task(shelf.store.fetch(shelf.version))
    await until(lambda: shelf.source.num_running)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert shelf.has_left_nothing()


async def test_what_an_earlier_process_left_is_removed(shelf: Shelf) -> None:
    (shelf.tmp_path / "work" / "half").write_bytes(b"x")
    shelf.build()
    assert shelf.has_left_nothing()


async def test_a_full_disk_makes_idle_images_give_way_for_the_next_attempt(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.cache.reserve("idle", size_bytes=10)
    shelf.cache.path("idle").write_bytes(b"x" * 10)
    shelf.cache.add("idle", size_bytes=10)
    real = store_module.write_image

    def full(path: Path, image: Image) -> int:
        if shelf.cache.path("idle").exists():
            raise OSError(errno.ENOSPC, "no space left on device")
        return real(path, image)

    monkeypatch.setattr(store_module, "write_image", full)
    with pytest.raises(UnavailableError):
        await shelf.store.fetch(shelf.version)
    assert shelf.evicted == ["idle"]
    await shelf.store.fetch(shelf.version)
    assert shelf.cache.versions() == (shelf.version,)


async def test_an_image_that_nobody_waits_for_takes_free_room_alone(shelf: Shelf) -> None:
    shelf.cache.path("old").write_bytes(b"x" * (1 << 20))
    shelf.cache.add("old", size_bytes=1 << 20)
    with pytest.raises(HostCacheFullError, match="nobody waits"):
        await shelf.store.fetch(shelf.version, is_ahead=lambda: True)
    assert shelf.cache.versions() == ("old",)
    await shelf.store.fetch(shelf.version, is_ahead=lambda: False)
    assert shelf.cache.versions() == (shelf.version,)
