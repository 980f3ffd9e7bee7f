"""Two tenants publish the same files: neither's load, nor what is freed of it, tells whether the node holds the other's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from dataplane.blob_grants import Blob, Grant
from dataplane.load_room import Amount
from dataplane.lora.host_cache import HostCache, Payer
from dataplane.store import AdapterStore, StoreLimits
from tests.dataplane.doubles import FolderSource
from tests.fixtures.adapters import make_adapter_folder
from veneer.artifact import BaseDescription, BaseWeights, Limits


class TwoOwners:
    """A store with the same files as the versions of two tenants."""

    def __init__(self, folder: Path, base: BaseDescription) -> None:
        owned = [FolderSource(folder, base_digest=base.digest, owner=owner) for owner in ("acme", "rival")]
        self.versions = [source.version for source in owned]
        self._by_version = dict(zip(self.versions, owned, strict=True))
        self._by_owner = {source.grant.owner: source for source in owned}

    async def grant_blobs(self, version: str, *, operator_key_digest: bytes = b"") -> Grant:
        return await self._by_version[version].grant_blobs(version)

    def read_blob(self, grant: Grant, blob: Blob, *, offset: int, idle_s: float) -> AsyncIterator[bytes]:
        return self._by_owner[grant.owner].read_blob(grant, blob, offset=offset, idle_s=idle_s)

    async def report_corrupt(self, version: str) -> None:
        raise AssertionError(version)

    def transfers(self, version: str) -> tuple[int, dict[str, list[int]]]:
        """Returns how often a version was asked for, and the offsets from which each of its files was read."""
        source = self._by_version[version]
        return source.num_grants, source.offsets


@dataclass
class Hops:
    """What one load did, in order: parts with their bytes, and what it left."""

    parts: list[str] = field(default_factory=list)
    amounts: list[Amount] = field(default_factory=list)
    num_bytes: int = 0
    transfers: tuple[int, dict[str, list[int]]] = (0, {})
    cached_bytes: int = 0
    evicted: list[str] = field(default_factory=list)
    freed_bytes: int = 0


async def load(folder: Path, base: BaseDescription, *, beside: bool) -> tuple[Hops, bool]:
    """Loads and removes the version of `rival`, beside that of `acme` or alone; also says whether the latter is still there."""
    source = TwoOwners(make_adapter_folder(folder / "files", base, ranks=4), base)
    cache = HostCache(folder / "images", dtype="float32", max_bytes=1 << 20)
    hops = Hops()
    store = AdapterStore(
        source,
        cache=cache,
        on_evicted=hops.evicted.extend,
        base=base,
        base_weights=BaseWeights(folder),
        folder=folder / "work",
        dtype="float32",
        max_loss=0.1,
        artifact_limits=Limits(),
        limits=StoreLimits(),
        observe=lambda part, seconds: hops.parts.append(part),
    )
    theirs, mine = source.versions
    if beside:
        cache.hold(theirs, Payer("acme"))
        await store.fetch(theirs)
        hops.parts.clear()

    async def pace(num_bytes: int) -> None:
        hops.num_bytes += num_bytes

    async def room(amount: Amount) -> None:
        hops.amounts.append(amount)

    before = cache.num_bytes
    cache.hold(mine, Payer("rival", max_bytes=1 << 19))
    assert cache.find(mine) is None, "it is where its own version is, and nowhere else"
    path = await store.fetch(mine, pace=pace, room=room)
    assert path.stat().st_nlink == 1, "and no other's bytes are its"
    hops.transfers, hops.cached_bytes = source.transfers(mine), cache.num_bytes - before
    cache.let_go(mine)
    hops.freed_bytes = cache.remove(mine)
    store.close()
    return hops, cache.find(theirs) is not None


async def test_a_load_makes_the_same_hops_whoever_else_holds_the_same_files(tmp_path: Path, tiny_base: BaseDescription) -> None:
    alone, _ = await load(tmp_path / "alone", tiny_base, beside=False)
    beside, is_left = await load(tmp_path / "beside", tiny_base, beside=True)
    assert beside == alone
    assert is_left
    assert alone.parts == ["grant", "read", "build"]
    assert alone.transfers == (1, {"adapter_config.json": [0], "adapter_model.safetensors": [0]})
    assert alone.freed_bytes == alone.cached_bytes > 0
    assert alone.num_bytes > 0
    assert len(alone.amounts) == 2
