from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from veneer.errors import FailedPreconditionError, UnavailableError
from veneer.local.valkey import Valkey


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    with Valkey(tmp_path / "valkey") as server:
        yield server


def ping(url: str) -> bool:
    with redis.Redis.from_url(url) as client:
        return bool(client.ping())


def test_a_client_reaches_it_by_port_and_by_socket(valkey: Valkey) -> None:
    assert ping(valkey.url())
    assert ping(valkey.socket_url())


def test_a_client_without_the_password_is_refused(valkey: Valkey) -> None:
    with redis.Redis(port=valkey.port, retry=Retry(NoBackoff(), 0)) as client, pytest.raises(redis.AuthenticationError):
        client.ping()


def test_a_killed_server_comes_back_empty_at_the_same_address(valkey: Valkey) -> None:
    url = valkey.url()
    with redis.Redis.from_url(url) as client:
        client.set("advice", "1")
    valkey.kill()
    with pytest.raises(redis.ConnectionError):
        ping(url)
    valkey.start()
    with redis.Redis.from_url(url) as client:
        assert client.get("advice") is None


def test_a_second_start_is_refused(valkey: Valkey) -> None:
    with pytest.raises(FailedPreconditionError, match="runs already"):
        valkey.start()


def test_a_second_object_over_the_folder_stops_the_server(valkey: Valkey) -> None:
    Valkey(valkey.folder).stop()
    assert valkey.process.pid is None


def test_a_bad_setting_stops_the_start_with_the_servers_own_words(tmp_path: Path) -> None:
    server = Valkey(tmp_path / "valkey", settings={"no-such-setting": "1"})
    with pytest.raises(UnavailableError, match="no-such-setting"):
        server.start()
