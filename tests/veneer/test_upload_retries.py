"""Uploads to a peer that leaves, in a child process: gRPC ends a process that has it repeat an upload."""

from __future__ import annotations

import asyncio
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from veneer.client import CONFIG_NAME, WEIGHTS_NAME

_DATA, _HEADERS, _SETTINGS, _GOAWAY, _WINDOW_UPDATE = 0, 1, 4, 7, 8
_ACK = 1
_PREFACE_BYTES = 24
_PUBLISH = """
import asyncio, sys
from pathlib import Path
from veneer import client
from veneer.errors import UnavailableError

client._PUBLISH_PAUSES_S = 0.0, 0.0, 0.0

async def main():
    async with client.Client(control=sys.argv[1]) as caller:
        for _ in range(3):
            try:
                await caller.publish(Path(sys.argv[2]), adapter="tone", base="smol", timeout_s=60.0)
            except UnavailableError:
                print("away")

asyncio.run(main())
"""


class Leaving:
    """An HTTP/2 peer that reads a part of each upload, says with GOAWAY that it saw no call, and closes."""

    def __init__(self) -> None:
        self.num_uploads = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received = 0
        try:
            await reader.readexactly(_PREFACE_BYTES)
            writer.write(_frame(_SETTINGS, 0, struct.pack(">HI", 4, 1 << 24)))
            writer.write(_frame(_WINDOW_UPDATE, 0, struct.pack(">I", 1 << 24)))
            while received < 200_000:
                head = await reader.readexactly(9)
                kind, flags = head[3], head[4]
                payload = await reader.readexactly(int.from_bytes(head[:3]))
                if kind == _SETTINGS and not flags & _ACK:
                    writer.write(_frame(_SETTINGS, _ACK))
                self.num_uploads += kind == _HEADERS
                received += len(payload) if kind == _DATA else 0
            writer.write(_frame(_GOAWAY, 0, struct.pack(">II", 0, 0)))
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def _frame(kind: int, flags: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + bytes(4) + payload


@pytest.fixture
async def leaving() -> AsyncIterator[tuple[Leaving, str]]:
    peer = Leaving()
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
    async with server:
        yield peer, "127.0.0.1:{1}".format(*server.sockets[0].getsockname())


async def test_an_upload_that_a_goaway_left_out_is_repeated_by_the_client_alone(
    leaving: tuple[Leaving, str], tmp_path: Path
) -> None:
    peer, address = leaving
    (tmp_path / CONFIG_NAME).write_bytes(b'{"r": 8}')
    (tmp_path / WEIGHTS_NAME).write_bytes(bytes(3 << 20))
    child = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", _PUBLISH, address, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == ["away"] * 3
    assert peer.num_uploads <= 3 * 4
