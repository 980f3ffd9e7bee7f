from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from veneer.errors import FailedPreconditionError, UnavailableError
from veneer.local import unprivileged
from veneer.local.postgres import Postgres


@pytest.fixture
def postgres(tmp_path: Path) -> Iterator[Postgres]:
    with Postgres(tmp_path / "postgres", durable=False) as server:
        yield server


def query(url: str, statement: str) -> object:
    with psycopg.connect(url) as connection:
        row = connection.execute(statement.encode()).fetchone()  # bytes: the statements here are not literals to the type checker
        return None if row is None else row[0]


def test_a_client_connects_by_socket_without_and_by_port_with_a_password(postgres: Postgres) -> None:
    assert query(postgres.url(scheme="postgresql"), "SELECT 1") == 1
    assert query(postgres.tcp_url(scheme="postgresql"), "SELECT current_user") == "postgres"
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(postgres.tcp_url(scheme="postgresql", password="wrong"))


def test_the_server_does_not_think_that_it_is_root(postgres: Postgres) -> None:
    assert int(str(query(postgres.url(scheme="postgresql"), "SELECT current_setting('server_version_num')"))) >= 160000
    assert postgres.process.pid is not None


def test_nobody_else_may_enter_the_folder(postgres: Postgres) -> None:
    assert stat.S_IMODE(postgres.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((postgres.folder / "password").stat().st_mode) == 0o600


def test_committed_rows_survive_a_kill_and_a_restart_on_the_same_port(postgres: Postgres) -> None:
    with psycopg.connect(postgres.url(scheme="postgresql"), autocommit=True) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 7 AS value")
        connection.execute("CHECKPOINT")
    port = postgres.port
    postgres.kill()
    assert postgres.process.pid is None
    postgres.start()
    assert postgres.port == port
    assert query(postgres.url(scheme="postgresql"), "SELECT value FROM kept") == 7


def test_a_second_start_is_refused(postgres: Postgres) -> None:
    with pytest.raises(FailedPreconditionError, match="runs already"):
        postgres.start()


def test_a_second_object_over_the_folder_stops_the_server(postgres: Postgres) -> None:
    Postgres(postgres.folder).stop()
    assert postgres.process.pid is None


def test_a_long_folder_name_still_has_a_socket(tmp_path: Path) -> None:
    with Postgres(tmp_path / ("deep" * 25) / "postgres", durable=False) as server:
        assert query(server.url(scheme="postgresql"), "SELECT 1") == 1


def test_a_bad_setting_stops_the_start_with_the_servers_own_words(tmp_path: Path) -> None:
    server = Postgres(tmp_path / "postgres", durable=False, settings={"shared_buffers": "nonsense"})
    with pytest.raises(UnavailableError, match="shared_buffers"):
        server.start()


def test_our_own_database_variables_do_not_reach_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "PGDATA", "/nowhere")
    monkeypatch.setitem(os.environ, "LC_ALL", "no_SUCH.locale")
    with Postgres(tmp_path / "postgres", durable=False) as server:
        assert server.process.pid is not None


def test_it_runs_as_nobody_where_a_root_user_gets_no_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unprivileged, "__file__", "/bin/false")
    with tempfile.TemporaryDirectory() as name:  # not tmp_path: nobody may not enter a root user's folder of tests
        Path(name).chmod(0o755)
        with Postgres(Path(name) / "postgres", durable=False) as server:
            assert query(server.url(scheme="postgresql"), "SELECT 1") == 1
            owner = Path(f"/proc/{server.process.pid}").stat().st_uid
    assert owner == (unprivileged.NOBODY if os.geteuid() == 0 else os.geteuid())
