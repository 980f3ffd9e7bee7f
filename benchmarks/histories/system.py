"""The system under test: Postgres and two control-plane processes side by side, each as it is run in earnest."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from benchmarks.orphans import BASE
from veneer.controlplane.v1 import nodes_pb2, nodes_pb2_grpc
from veneer.local.plane import Plane
from veneer.local.postgres import Postgres
from veneer.operator_client import OperatorClient

NUM_PLANES = 2
_ROOT = Path(__file__).resolve().parents[2]
_CANARY_INTERVAL_S = "0.05"
"""Often enough that canaries take steps before a client moves their alias."""
_ROLES = ("owner", "publisher", "caller")


class ControlPlaneProcess(Plane):
    """A control plane that may be started by another module than its own: tests do so to plant faults in it.

    Attributes:
        start_by: The module and its arguments.
    """

    def __init__(self, folder: Path, *, start_by: Sequence[str] = ("controlplane",)) -> None:
        super().__init__("controlplane", folder)
        self.start_by = tuple(start_by)

    def _command(self, command: str) -> list[str]:
        module = self.start_by if command == "serve" else ("controlplane",)
        return [sys.executable, "-m", *module, *command.split()]

    def _environment(self) -> dict[str, str]:
        known = super()._environment()
        return {**known, "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), known.get("PYTHONPATH", "")]))}


@dataclass(frozen=True, slots=True)
class Key:
    """A tenant's key."""

    id: str
    tenant: str
    secret: str


class System:
    """All processes, in one folder. Owned by one thread; as a context manager it starts, and stops at the end.

    Attributes:
        postgres: The database server.
        planes: The control planes.
        callers: Where they listen for tenants and nodes.
        node_key: Key of an enrolled data plane.
    """

    def __init__(self, folder: Path, *, start_by: Sequence[str] = ("controlplane",)) -> None:
        """Prepares it; nothing is started.

        Args:
            folder: Made when absent.
            start_by: Module that serves, and its arguments.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.postgres = Postgres(folder / "postgres", durable=False)
        self.planes = [ControlPlaneProcess(_made(folder / f"plane-{number}"), start_by=start_by) for number in range(NUM_PLANES)]
        self.callers: list[str] = []
        self.node_key = ""
        self._operators = ""
        self._operator_key = ""

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    def serve_by(self, *start_by: str) -> None:
        """Starts the control planes again, by another module."""

        def serve(plane: ControlPlaneProcess) -> None:
            plane.stop()
            plane.start_by = start_by
            plane.start()

        with ThreadPoolExecutor(len(self.planes)) as threads:
            list(threads.map(serve, self.planes))

    async def tenant(self, name: str) -> Key:
        """Creates a tenant with a key of all roles."""
        async with OperatorClient(control=self._operators, key=self._operator_key) as operator:
            await operator.create_tenant(name)
        return await self.key(name)

    async def key(self, tenant: str) -> Key:
        """Creates one more key of a tenant."""
        async with OperatorClient(control=self._operators, key=self._operator_key) as operator:
            made = await operator.create_key(tenant=tenant, roles=_ROLES, label="history")
        return Key(made.key.id, tenant, made.secret)

    def _start(self) -> None:
        self.postgres.start()
        for plane in self.planes:
            plane.configure(
                {
                    "database_url": self.postgres.url(user="nobody", scheme="postgresql"),
                    "owner_url": self.postgres.url(scheme="postgresql"),
                    "store_url": (self._folder / "store").as_uri(),
                    "spool_folder": str(_made(self._folder / "spool")),
                    "canary_interval_s": _CANARY_INTERVAL_S,
                    "pepper_file": str(self._folder / "pepper"),
                    **{f"listen_{name}": "127.0.0.1:0" for name in ("callers", "operators", "metrics")},
                }
            )
        self.planes[0].run("migrate")
        key_file = self._folder / "operator.key"
        self.planes[0].run(f"bootstrap --key-file {key_file}")
        self._operator_key = key_file.read_text().strip()
        for plane in self.planes:
            plane.start()
        self.callers = [plane.addresses.callers for plane in self.planes]
        self._operators = self.planes[0].addresses.operators
        self.node_key = asyncio.run(self._enroll())

    async def _enroll(self) -> str:
        async with OperatorClient(control=self._operators, key=self._operator_key) as operator:
            await operator.register_base(BASE)
            token = (await operator.create_enrollment_token("history")).token
        async with grpc.aio.insecure_channel(self.callers[0]) as channel:
            request = nodes_pb2.EnrollNodeRequest(base_digest=BASE.digest)
            stub = nodes_pb2_grpc.NodeServiceStub(channel)
            return str((await stub.EnrollNode(request, metadata=(("authorization", f"Bearer {token}"),))).secret)

    def _stop(self) -> None:
        for plane in self.planes:
            plane.stop()
        self.postgres.stop()


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
