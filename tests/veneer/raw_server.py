"""A server that ends calls as gRPC's transports do, without a status: by HTTP/2 frames, or by closing the connection."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from typing import Self

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY = 0x0, 0x1, 0x3, 0x4, 0x6, 0x7
_ACK = 0x1
_END_HEADERS = 0x4

Ending = Callable[[int], bytes | None]
"""What a call on this stream is answered with; None: its connection is closed."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """An HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def reset(code: int) -> Callable[[int], bytes]:
    """RST_STREAM with an error code of RFC 9113, section 7."""
    return lambda stream: frame(_RST_STREAM, 0, stream, struct.pack(">I", code))


def go_away(code: int) -> Ending:
    """GOAWAY that leaves the call out."""
    return lambda stream: frame(_GOAWAY, 0, 0, struct.pack(">II", 0, code))


def close(stream: int) -> None:
    """Closes the connection."""


def answer(*messages: bytes, ending: Callable[[int], bytes] = lambda stream: b"") -> Ending:
    """The answer's headers and messages, and then an ending; gRPC does not repeat such a call by itself."""

    def answered(stream: int) -> bytes:
        block = b"\x88\x0f\x10\x10application/grpc"  # :status 200, content-type
        parts = [struct.pack(">BI", 0, len(message)) + message for message in messages]
        data = b"".join(frame(_DATA, 0, stream, part) for part in parts)
        return frame(_HEADERS, _END_HEADERS, stream, block) + data + ending(stream)

    return answered


ENDINGS: dict[str, Ending] = {f"reset {code}": reset(code) for code in range(14)}
"""Ways to end a call without a status, by name; the numbers are those of HTTP/2's errors."""
ENDINGS |= {f"headers, reset {code}": answer(ending=reset(code)) for code in (0, 2, 7, 8, 11)}
ENDINGS |= {"go away": go_away(0), "go away with an error": go_away(2), "close": close}


class RawServer:
    """Ends each call in turn; those after the last one as the last one. Owned by one event loop.

    Attributes:
        address: Where it listens.
        num_calls: Calls so far.
    """

    def __init__(self, endings: Sequence[Ending]) -> None:
        self._endings = list(endings)
        self._connections: set[asyncio.StreamWriter] = set()
        self.num_calls = 0
        self.address = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for connection in self._connections:
            connection.close()
        await self._server.wait_closed()

    def send(self, data: bytes) -> None:
        """Sends frames on every connection."""
        for connection in self._connections:
            connection.write(data)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            await reader.readexactly(len(_PREFACE))
            writer.write(frame(_SETTINGS, 0, 0))
            while True:
                head = await reader.readexactly(9)
                kind, flags, stream = struct.unpack(">BBI", head[3:])
                payload = await reader.readexactly(int.from_bytes(head[:3]))
                if kind in (_SETTINGS, _PING) and not flags & _ACK:
                    writer.write(frame(kind, _ACK, 0, payload if kind == _PING else b""))
                if kind == _HEADERS:
                    ending = self._endings[min(self.num_calls, len(self._endings) - 1)]
                    self.num_calls += 1
                    data = ending(stream)
                    if data is None:
                        return
                    writer.write(data)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()
