from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from veneer.health import ask_health, main


@dataclass(frozen=True, slots=True)
class Served:
    """A server with nothing but health."""

    address: str
    servicer: health.aio.HealthServicer


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    server = grpc.aio.server()
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield Served(f"127.0.0.1:{port}", servicer)
    await server.stop(None)


async def ask_as_a_command(address: str) -> tuple[int | None, str]:
    command = [sys.executable, "-m", "veneer.health", address]
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await child.communicate()
    return child.returncode, out.decode().strip()


async def test_the_exit_status_tells_whether_a_plane_serves(served: Served) -> None:
    assert await ask_as_a_command(served.address) == (0, "SERVING")
    await served.servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert await ask_as_a_command(served.address) == (1, "NOT_SERVING")


async def test_a_plane_that_is_not_there_is_not_serving(served: Served) -> None:
    assert await ask_health("127.0.0.1:1", timeout_s=1.0) == "UNAVAILABLE"
    assert await ask_health(served.address) == "SERVING"


def test_an_authority_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["127.0.0.1:1", "--ca", str(tmp_path / "absent.pem")]) == 1
    assert "absent.pem" in capsys.readouterr().out
