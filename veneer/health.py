"""Whether a plane serves: `python -m veneer.health ADDRESS`, as a container's health check runs it."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from veneer.channel import ClientTls, open_channel
from veneer.errors import VeneerError

SERVING = "SERVING"


async def ask_health(address: str, *, tls: ClientTls | None = None, timeout_s: float = 5.0) -> str:
    """Asks a plane's listener: `SERVING`, `NOT_SERVING`, or the name of the gRPC status with which the question failed.

    Raises:
        InvalidArgumentError: A TLS file cannot be read.
    """
    async with open_channel(address, tls=tls) as channel:
        try:
            response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def main(arguments: list[str] | None = None) -> int:
    """Prints the answer; the exit status is 0 for SERVING, else 1."""
    parser = argparse.ArgumentParser(prog="python -m veneer.health", description="Asks whether a plane serves.")
    parser.add_argument("address", help="host:port of a listener")
    parser.add_argument("--ca", type=Path, help="PEM authorities; turns on TLS")
    parser.add_argument("--timeout-s", type=float, default=5.0, help="how long to wait for the answer (default: 5)")
    chosen = parser.parse_args(arguments)
    tls = None if chosen.ca is None else ClientTls(ca=chosen.ca)
    try:
        answer = asyncio.run(ask_health(chosen.address, tls=tls, timeout_s=chosen.timeout_s))
    except VeneerError as error:
        answer = error.message
    print(answer)
    return int(answer != SERVING)


if __name__ == "__main__":
    sys.exit(main())
