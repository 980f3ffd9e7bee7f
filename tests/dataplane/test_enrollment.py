"""A node's key is had once, waited for, and renewed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dataplane.enrollment import Enrollment
from tests.dataplane.doubles import until
from veneer.errors import UnauthenticatedError, UnavailableError, VeneerError

FILE = Path("node.key")


class Client:
    """Fails as often as there are errors."""

    def __init__(self, *errors: VeneerError) -> None:
        self.errors = list(errors)
        self.enrolled: list[str | None] = []
        self.num_rotated = self.num_tried = 0

    async def enroll(self, key_file: Path, *, token: str | None) -> None:
        assert key_file == FILE
        self._fail()
        self.enrolled.append(token)

    async def rotate_key(self, key_file: Path) -> None:
        assert key_file == FILE
        self.num_tried += 1
        self._fail()
        self.num_rotated += 1

    def _fail(self) -> None:
        if self.errors:
            raise self.errors.pop(0)


def make(client: Client) -> Enrollment:
    return Enrollment(client, key_file=FILE, token="token", rotate_s=0.001, pause_s=0.001)


async def test_a_control_plane_that_is_away_is_waited_for() -> None:
    client = Client(UnavailableError("away"), UnavailableError("away"))
    await make(client).enroll()
    assert client.enrolled == ["token"]


async def test_a_token_that_is_refused_ends_the_start() -> None:
    with pytest.raises(UnauthenticatedError):
        await make(Client(UnauthenticatedError("used"))).enroll()


async def test_a_control_plane_that_stays_away_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataplane.enrollment._PATIENCE_S", -1.0)
    with pytest.raises(UnavailableError):
        await make(Client(UnavailableError("away"))).enroll()


async def test_the_key_is_renewed_again_and_again_also_after_a_failure() -> None:
    client = Client(UnavailableError("away"))
    task = asyncio.create_task(make(client).run())
    await until(lambda: client.num_rotated >= 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.num_tried == client.num_rotated + 1
