"""A client that opens calls and does with them what no client of gRPC does, such as to send no request."""

from __future__ import annotations

import asyncio
from typing import Self

from benchmarks.abuse.resetting import frame, header_block

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, HEADERS, RST_STREAM, SETTINGS = 0x0, 0x1, 0x3, 0x4
_END_STREAM, _END_HEADERS = 0x1, 0x4


class RawClient:
    """One connection. Owned by one event loop."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def __aenter__(self) -> Self:
        host, _, port = self.address.rpartition(":")
        self._reader, self._writer = await asyncio.open_connection(host, int(port))
        self._writer.write(_PREFACE + frame(SETTINGS, 0, 0))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    def open(self, stream: int, method: str, *, key: str = "") -> None:
        """Opens a call and sends no request; streams are odd and grow."""
        self._writer.write(frame(HEADERS, _END_HEADERS, stream, header_block(method, self.address, key=key)))

    def finish(self, stream: int) -> None:
        """Ends the requests of a call."""
        self._writer.write(frame(_DATA, _END_STREAM, stream))

    async def read(self) -> tuple[int, int, bytes]:
        """The next frame: kind, stream, payload."""
        head = await self._reader.readexactly(9)
        return head[3], int.from_bytes(head[5:]), await self._reader.readexactly(int.from_bytes(head[:3]))

    async def status(self) -> int | None:
        """Status code of the first call of the connection that ends; None when the connection ends before that.

        Of later ones the encoding refers to earlier ones.
        """
        name = b"grpc-status"
        try:
            while True:
                kind, _, payload = await self.read()
                if kind == RST_STREAM:
                    raise AssertionError("the call was reset")
                if kind == HEADERS and name in payload:
                    start = payload.index(name) + len(name)
                    return int(payload[start + 1 : start + 1 + payload[start]])
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
