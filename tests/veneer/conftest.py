"""A client of planes that answer as they are told."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.veneer.scripted import KEY, Catalog, Generation, scripted_plane
from veneer.client import CONFIG_NAME, WEIGHTS_NAME, Client


@pytest.fixture
async def generation() -> Generation:
    return Generation()


@pytest.fixture
async def catalog() -> Catalog:
    return Catalog()


@pytest.fixture
async def client(generation: Generation, catalog: Catalog) -> AsyncIterator[Client]:
    server = scripted_plane(generation, catalog)
    address = (await server.start()).callers
    async with Client(control=address, data=address, key=KEY, timeout_s=60) as client:
        yield client
    await server.stop(grace_s=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / CONFIG_NAME).write_bytes(b'{"r": 8}')
    (tmp_path / WEIGHTS_NAME).write_bytes(bytes(range(256)) * 10_000)
    return tmp_path
