"""Publishing by the client: what is sent, when it is sent again, and how it ends."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.veneer.scripted import Catalog
from veneer import client as client_module
from veneer.client import CONFIG_NAME, WEIGHTS_NAME, Client
from veneer.controlplane.v1 import catalog_pb2
from veneer.errors import (
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)


async def test_publish_sends_both_files_whole_and_reports_progress(client: Client, catalog: Catalog, folder: Path) -> None:
    progress: list[tuple[int, int]] = []
    response = await client.publish(
        folder, adapter="tone", base="smol", progress=lambda sent, total: progress.append((sent, total))
    )
    assert response.version.number == 3
    assert catalog.received == {
        catalog_pb2.ADAPTER_FILE_CONFIG: (folder / CONFIG_NAME).read_bytes(),
        catalog_pb2.ADAPTER_FILE_WEIGHTS: (folder / WEIGHTS_NAME).read_bytes(),
    }
    assert progress[-1] == (2_560_008, 2_560_008)
    assert catalog.headers[0].request_id


async def test_publish_sends_the_signature_that_is_in_the_folder_or_named(
    client: Client, catalog: Catalog, folder: Path, tmp_path: Path
) -> None:
    async def sent(signature: Path | None = None) -> bytes:
        await client.publish(folder, adapter="tone", base="smol", signature=signature)
        return catalog.headers[-1].signature

    assert await sent() == b""
    (folder / "model.sig").write_bytes(b"in the folder")
    (tmp_path / "elsewhere.sig").write_bytes(b"named")
    assert await sent() == b"in the folder"
    assert await sent(tmp_path / "elsewhere.sig") == b"named"
    for size_bytes in (0, (64 << 10) + 1):
        (folder / "model.sig").write_bytes(bytes(size_bytes))
        with pytest.raises(InvalidArgumentError, match=f"has {size_bytes} bytes"):
            await sent()
    with pytest.raises(InvalidArgumentError, match="is no file"):
        await sent(tmp_path / "absent.sig")


async def test_a_publish_that_is_refused_halfway_tells_every_fault(client: Client, catalog: Catalog, folder: Path) -> None:
    catalog.refuse_after = 1
    with pytest.raises(InvalidArgumentError) as caught:
        await client.publish(folder, adapter="tone", base="smol")
    assert [violation.field for violation in caught.value.violations] == ["adapter_config.json: r", "lora_A"]


async def test_a_publish_whose_answer_was_lost_is_sent_again_under_its_identifier(
    client: Client, catalog: Catalog, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = grpc.aio.Metadata()
    lost = [grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, metadata, metadata, details="Internal error from Core")]
    answer = client_module._answer

    async def lose_first(upload: Any) -> Any:
        async def first() -> Any:
            await upload
            raise lost.pop()

        return await answer(first() if lost else upload)

    monkeypatch.setattr(client_module, "_answer", lose_first)
    await client.publish(folder, adapter="tone", base="smol")
    first, second = catalog.headers
    assert first.request_id == second.request_id


@pytest.mark.parametrize(("retry_after_s", "times"), [(0.001, 2), (None, 1)])
async def test_an_upload_without_a_place_is_sent_again_and_one_beyond_a_quota_is_not(
    client: Client, catalog: Catalog, folder: Path, monkeypatch: pytest.MonkeyPatch, retry_after_s: float | None, times: int
) -> None:
    refusals = [ResourceExhaustedError("not now", retry_after_s=retry_after_s)]
    answer = client_module._answer

    async def refuse_first(upload: Any) -> Any:
        found = await answer(upload)
        if refusals:
            raise refusals.pop()
        return found

    monkeypatch.setattr(client_module, "_PUBLISH_PAUSES_S", (0.0,))
    monkeypatch.setattr(client_module, "_answer", refuse_first)
    if retry_after_s is None:
        with pytest.raises(ResourceExhaustedError):
            await client.publish(folder, adapter="tone", base="smol")
    else:
        await client.publish(folder, adapter="tone", base="smol")
    assert len(catalog.headers) == times
    assert len({header.request_id for header in catalog.headers}) == 1


async def test_a_large_upload_to_a_plane_that_goes_away_is_sent_again_under_its_identifier(
    client: Client, catalog: Catalog, folder: Path
) -> None:
    (folder / WEIGHTS_NAME).write_bytes(bytes(3 << 20))  # more than gRPC keeps to send again by itself
    catalog.away = [UnavailableError("restarts", retry_after_s=0.05), UnavailableError("goes away")]
    assert (await client.publish(folder, adapter="tone", base="smol")).version.number == 3
    assert len(catalog.headers) == 3
    assert len({header.request_id for header in catalog.headers}) == 1
    assert len(catalog.received[catalog_pb2.ADAPTER_FILE_WEIGHTS]) == 3 << 20


async def test_an_upload_to_a_plane_that_stays_away_ends_with_its_error(client: Client, catalog: Catalog, folder: Path) -> None:
    (folder / WEIGHTS_NAME).write_bytes(bytes(3 << 20))
    catalog.away = [UnavailableError("is away") for _ in range(9)]
    with pytest.raises(UnavailableError):  # what it said, or that its answer was lost
        await client.publish(folder, adapter="tone", base="smol")
    assert len(catalog.headers) == 4


async def test_missing_files_are_all_named_before_anything_is_sent(client: Client, catalog: Catalog, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await client.publish(tmp_path, adapter="tone", base="smol")
    assert [violation.field for violation in caught.value.violations] == [CONFIG_NAME, WEIGHTS_NAME]
    assert catalog.headers == []
