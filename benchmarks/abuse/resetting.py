"""A connection without a key that opens streams and resets them at once: `python -m benchmarks.abuse.resetting ADDRESS METHOD …`.

HTTP/2 by hand, as no client of gRPC would do it: HEADERS, then RST_STREAM, so many times a second, for so many seconds at most.
It only ever connects to the loopback interface, and prints how many streams it opened.
"""

from __future__ import annotations

import argparse
import ipaddress
import select
import socket
import struct
import time

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADERS, _RST_STREAM, _SETTINGS, _PING = 0x1, 0x3, 0x4, 0x6
_ACK = 0x1
_END_HEADERS = 0x4
_CANCEL = struct.pack(">I", 0x8)
_TICK_S = 0.005


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """An HTTP/2 frame (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header_block(method: str, authority: str, *, key: str = "") -> bytes:
    """The header block of a gRPC request, in literals and entries of HPACK's static table (RFC 7541)."""

    def text(value: str) -> bytes:
        assert len(value) < 127
        return bytes([len(value)]) + value.encode()

    post_http = b"\x83\x86"
    path, of = b"\x04" + text(method), b"\x01" + text(authority)
    kind, trailers = b"\x0f\x10" + text("application/grpc"), b"\x00" + text("te") + text("trailers")
    return post_http + path + of + kind + trailers + (b"\x0f\x08" + text(f"Bearer {key}") if key else b"")


def reset_streams(address: str, method: str, *, per_s: float, seconds: float, max_streams: int) -> int:
    """Opens and resets streams; returns how many it opened.

    Args:
        address: `host:port` on the loopback interface.
        method: Full name of the method that each stream asks for.
        per_s: Streams a second.
        seconds: How long at most.
        max_streams: How many at most.
    """
    host, _, port = address.rpartition(":")
    if not ipaddress.ip_address(host).is_loopback:
        raise SystemExit("only addresses of the loopback interface")
    block = header_block(method, address)
    opened = 0
    with socket.create_connection((host, int(port)), timeout=5.0) as connection:
        connection.sendall(_PREFACE + frame(_SETTINGS, 0, 0))
        reader = _Answers(connection)
        start_s = time.monotonic()
        while (gone_s := time.monotonic() - start_s) < seconds and opened < max_streams:
            due = min(int(gone_s * per_s), max_streams) - opened
            data = b"".join(
                frame(_HEADERS, _END_HEADERS, stream, block) + frame(_RST_STREAM, 0, stream, _CANCEL)
                for stream in range(2 * opened + 1, 2 * (opened + due) + 1, 2)
            )
            opened += due
            try:
                connection.sendall(reader.answers() + data)
            except OSError:
                break  # the server ended the connection: that is its right
            time.sleep(_TICK_S)
    return opened


class _Answers:
    """Reads what the server sends, and says what it has to be answered: settings and pings, or it would end the connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._held = b""

    def answers(self) -> bytes:
        out = b""
        while select.select([self._connection], [], [], 0)[0]:
            data = self._connection.recv(1 << 16)
            if not data:
                raise OSError("closed")
            self._held += data
        while len(self._held) >= 9:
            size = int.from_bytes(self._held[:3])
            if len(self._held) < 9 + size:
                break
            kind, flags, payload = self._held[3], self._held[4], self._held[9 : 9 + size]
            self._held = self._held[9 + size :]
            if not flags & _ACK and kind in (_SETTINGS, _PING):
                out += frame(kind, _ACK, 0, payload if kind == _PING else b"")
        return out


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(description="Opens and resets streams of a server on the loopback interface.")
    parser.add_argument("address")
    parser.add_argument("method")
    parser.add_argument("--per-s", type=float, default=4000.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--max-streams", type=int, default=100_000)
    chosen = parser.parse_args()
    opened = reset_streams(
        chosen.address, chosen.method, per_s=chosen.per_s, seconds=chosen.seconds, max_streams=chosen.max_streams
    )
    print(opened, flush=True)


if __name__ == "__main__":
    main()
