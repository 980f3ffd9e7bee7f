"""The running system as its users see it: two tenants, an operator, marker adapters."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.driving import aside, generate, until
from tests.e2e.markers import write_marker
from veneer.artifact import BaseDescription
from veneer.client import Client
from veneer.controlplane.v1 import tenants_pb2
from veneer.local.stack import ALL_ROLES, LocalStack
from veneer.operator_client import OperatorClient

_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class Secrets:
    """Keys of the tenants `acme`, `rival`, and `strict`, whose policy forbids fallback."""

    acme: str
    rival: str
    strict: str


@pytest.fixture(scope="session")
def secrets(stack: LocalStack) -> Secrets:
    """The tenants' keys with all roles."""

    async def make() -> Secrets:
        async with stack.operator() as operator:
            await operator.create_tenant("rival")
            await operator.create_tenant("strict", fallback=tenants_pb2.FALLBACK_POLICY_FORBIDDEN)
            keys = [await operator.create_key(tenant=name, roles=ALL_ROLES) for name in ("rival", "strict")]
        return Secrets(stack.state.tenant_key, *(key.secret for key in keys))

    return asyncio.run(make())


Connect = Callable[[str], Client]


@pytest.fixture
async def connect(stack: LocalStack) -> AsyncIterator[Connect]:
    """`connect(secret)`: a client, closed at the end of the test."""
    async with AsyncExitStack() as clients:
        made: list[Client] = []

        def connect(secret: str) -> Client:
            made.append(Client(control=stack.state.control, data=stack.state.data, key=secret, timeout_s=60.0))
            clients.push_async_callback(made[-1].close)
            return made[-1]

        yield connect


@pytest.fixture
async def acme(connect: Connect, secrets: Secrets) -> Client:
    """The tenant `acme`."""
    return connect(secrets.acme)


@pytest.fixture
async def rival(connect: Connect, secrets: Secrets) -> Client:
    """The tenant `rival`."""
    return connect(secrets.rival)


@pytest.fixture
async def operator(stack: LocalStack) -> AsyncIterator[OperatorClient]:
    """The operator."""
    async with stack.operator() as operator:
        yield operator


@dataclass(frozen=True, slots=True)
class Publish:
    """Publishes marker adapters: `await publish(client, "A")` gives the response; the adapter's name is new unless given.

    `invocation` are the tokens that activate it; without some it is always active.
    """

    folder: Path
    base: BaseDescription

    async def __call__(
        self, client: Client, marker: str, *, adapter: str = "", invocation: Sequence[int] | None = None, **more: Any
    ) -> Any:
        number = next(_NUMBERS)
        folder = self.folder / f"{marker}-{number}"
        files = write_marker(folder, self.base, marker, seed=number, alora_invocation_tokens=invocation)
        return await client.publish(files, adapter=adapter or f"adapter-{number}", base=self.base.digest, **more)


@pytest.fixture
def publish(tmp_path: Path, model_base: BaseDescription) -> Publish:
    """See `Publish`."""
    return Publish(tmp_path, model_base)


@pytest.fixture(scope="module")
def without_hints(stack: LocalStack) -> Iterator[None]:
    """No hints for a module: what is published is loaded when it is asked for, and not before."""
    stack.valkey.kill()
    yield
    stack.valkey.start()


@pytest.fixture
async def healthy(stack: LocalStack, acme: Client) -> AsyncIterator[None]:
    """Brings back, after the test, whatever it ended and did not start again, so that no other test pays for it."""
    yield
    for part in (stack.postgres, stack.valkey, stack.control_plane, stack.data_plane):
        if part.process.pid is None:
            await aside(part.start)
    await until(acme.adapters)
    await until(lambda: generate(acme))
