"""Files straight from an object store that speaks S3, at addresses that the control plane's store signed."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from controlplane.blobs import Blobs
from dataplane.blob_grants import Blob, Grant
from dataplane.lora.host_cache import HostCache
from dataplane.lora.image_file import open_image
from dataplane.signed_urls import SignedReads
from dataplane.store import AdapterStore, StoreLimits
from tests.dataplane.doubles import FolderSource, until
from tests.fixtures.adapters import make_adapter_folder
from veneer.artifact import BaseDescription, BaseWeights, Limits
from veneer.errors import DataLossError, UnavailableError

VERSION = "ab" * 32

Put = Callable[..., Awaitable[str]]


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """Address of an empty server with the bucket `adapters`."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    address = f"http://127.0.0.1:{port}"
    client = boto3.client(
        "s3", endpoint_url=address, aws_access_key_id="id", aws_secret_access_key="secret", region_name="us-east-1"
    )
    client.create_bucket(Bucket="adapters")
    client.close()
    yield address
    server.stop()


@pytest.fixture
def blobs(s3: str, monkeypatch: pytest.MonkeyPatch) -> Blobs:
    """The control plane's store over that bucket."""
    settings = {
        "AWS_ENDPOINT": s3,
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return Blobs("s3://adapters/some/prefix")


@pytest.fixture
def put(blobs: Blobs, tmp_path: Path) -> Put:
    """`await put(data)` stores a file and returns its signed address."""

    async def put(data: bytes, *, version: str = VERSION) -> str:
        (tmp_path / "file").write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        await blobs.put(version, digest, tmp_path / "file")
        return await blobs.sign(version, digest, lifetime_s=60)

    return put


async def read(url: str, *, offset: int = 0, size_bytes: int) -> bytes:
    reads = SignedReads(1)
    try:
        return b"".join([part async for part in reads.read(url, offset=offset, size_bytes=size_bytes, idle_s=10)])
    finally:
        reads.close()


async def test_the_control_planes_store_writes_reads_and_replaces_over_s3(blobs: Blobs, tmp_path: Path) -> None:
    data = os.urandom(3_000_000)
    digest = hashlib.sha256(data).hexdigest()
    file = tmp_path / "file"
    file.write_bytes(data)
    for _ in range(2):
        await blobs.put(VERSION, digest, file)
    for offset in (0, 1, len(data) - 1, len(data), len(data) + 5):
        assert b"".join([part async for part in blobs.read(VERSION, digest, offset=offset)]) == data[offset:]
    with pytest.raises(DataLossError):
        [part async for part in blobs.read(VERSION, "cd" * 32, offset=0)]


async def test_a_signed_address_gives_the_file_from_any_offset(put: Put) -> None:
    data = os.urandom(9_000_000)
    url = await put(data)
    for offset in (0, 1, 4 << 20, len(data) - 1, len(data)):
        assert await read(url, offset=offset, size_bytes=len(data)) == data[offset:]


async def test_a_file_that_is_not_there_is_unavailable_and_the_address_is_not_quoted(put: Put) -> None:
    url = await put(b"data")
    address, _, query = url.partition("?")
    for wrong in (f"{address[:-4]}0000?{query}", "http://127.0.0.1:1/a/b?X-Amz-Signature=canary", "nonsense", "http://"):
        with pytest.raises(UnavailableError) as caught:
            await read(wrong, size_bytes=4)
        assert "X-Amz" not in str(caught.value)
        assert caught.value.__cause__ is None


async def test_a_file_shorter_than_it_must_be_is_unavailable(put: Put) -> None:
    url = await put(b"data")
    with pytest.raises(UnavailableError):
        await read(url, offset=4, size_bytes=9)


@pytest.fixture
def silent() -> Iterator[str]:
    """A signed address at which a store takes connections and never says anything, until the end of the test."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/bucket/file?X-Amz-Signature=canary"


async def test_reads_that_hang_take_no_thread_of_others_and_one_too_many_is_refused(silent: str) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    reads = SignedReads(2)

    async def hang() -> None:
        async for _ in reads.read(silent, offset=0, size_bytes=9, idle_s=60):
            raise AssertionError

    tasks = [asyncio.create_task(hang()) for _ in range(2)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(asyncio.to_thread(lambda: "others go on"), 60)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    with pytest.raises(UnavailableError, match="taken"):  # who hung has left, their threads have not
        await hang()
    reads.close()


class Sources:
    """Several folders' versions, some of them signed at an address.

    Attributes:
        by_version: The source of each version.
    """

    def __init__(self, sources: Sequence[FolderSource], *, url: str) -> None:
        self.by_version = {source.version: source for source in sources}
        self._url = url

    async def grant_blobs(self, version: str, *, operator_key_digest: bytes = b"") -> Grant:
        grant = await self.by_version[version].grant_blobs(version)
        return dataclasses.replace(grant, blobs=tuple(dataclasses.replace(blob, url=self._url) for blob in grant.blobs))

    def read_blob(self, grant: Grant, blob: Blob, *, offset: int, idle_s: float) -> AsyncIterator[bytes]:
        source = next(one for one in self.by_version.values() if blob.digest in {mine.digest for mine in one.grant.blobs})
        return source.read_blob(grant, blob, offset=offset, idle_s=idle_s)

    async def report_corrupt(self, version: str) -> None:
        raise AssertionError


async def test_versions_whose_addresses_hang_hold_no_other_version_up(
    silent: str, tmp_path: Path, tiny_base: BaseDescription
) -> None:
    """The good one's address hangs too: as all threads for addresses are taken, it comes through the control plane at once."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    folders = [make_adapter_folder(tmp_path / f"adapter-{rank}", tiny_base, ranks=rank) for rank in (1, 2, 3, 4)]
    sources = Sources([FolderSource(folder, base_digest=tiny_base.digest) for folder in folders], url=silent)
    store = AdapterStore(
        sources, cache=HostCache(tmp_path / "images", dtype="float32", max_bytes=1 << 20), on_evicted=lambda _: None,
        base=tiny_base, base_weights=BaseWeights(tmp_path), folder=tmp_path / "work", dtype="float32", max_loss=0.1,
        artifact_limits=Limits(), limits=StoreLimits(max_fetches=4, backoff_s=0.001, idle_s=60.0),
        observe=lambda part, seconds: None,
    )  # fmt: skip
    *hanging, last = sources.by_version
    tasks = [asyncio.create_task(store.fetch(version)) for version in hanging]
    extra = [asyncio.create_task(_first(store._signed.read(silent, offset=0, size_bytes=9, idle_s=60))) for _ in range(2)]
    await until(lambda: store._signed._free._value == 0)
    path = await asyncio.wait_for(store.fetch(last), 60)
    assert open_image(path, version=last, dtype="float32").rank == 4
    for task in (*tasks, *extra):
        assert not task.done()
        task.cancel()
    await asyncio.wait((*tasks, *extra))
    store.close()


async def _first(parts: AsyncGenerator[bytes]) -> None:
    await anext(parts)


@pytest.mark.parametrize("fault", ["none", "gone", "changed"])
async def test_a_version_is_fetched_by_its_addresses_and_through_the_control_plane_where_they_fail(
    put: Put, tmp_path: Path, tiny_base: BaseDescription, fault: str
) -> None:
    folder = make_adapter_folder(tmp_path / "adapter", tiny_base, ranks=4)
    source = FolderSource(folder, base_digest=tiny_base.digest)
    urls = []
    for blob in source.grant.blobs:
        data = (folder / blob.name).read_bytes()
        url = await put(bytes(len(data)) if fault == "changed" else data, version=hashlib.sha256(fault.encode()).hexdigest())
        urls.append(url.replace("adapters", "elsewhere") if fault == "gone" else url)
    signed = tuple(dataclasses.replace(blob, url=url) for blob, url in zip(source.grant.blobs, urls, strict=True))
    source.grant = dataclasses.replace(source.grant, blobs=signed)
    store = AdapterStore(
        source, cache=HostCache(tmp_path / "images", dtype="float32", max_bytes=1 << 20), on_evicted=lambda _: None,
        base=tiny_base, base_weights=BaseWeights(tmp_path), folder=tmp_path / "work", dtype="float32", max_loss=0.1,
        artifact_limits=Limits(), limits=StoreLimits(backoff_s=0.001), observe=lambda part, seconds: None,
    )  # fmt: skip
    path = await store.fetch(source.version)
    assert open_image(path, version=source.version, dtype="float32").rank == 4
    assert source.num_transfers == (0 if fault == "none" else 2)
    assert store.num_corrupt == (1 if fault == "changed" else 0)
    assert source.reported == []
