"""A data plane that is revoked while it serves: it stops at once, and says why to its callers, its operators and its log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Connect, Publish, Secrets
from tests.e2e.driving import Stream, aside, generate, until
from tests.fixtures.stack import DATA_SETTINGS
from veneer.client import Client
from veneer.errors import UnavailableError
from veneer.health import ask_health
from veneer.local.plane import Plane
from veneer.local.stack import LocalStack
from veneer.operator_client import OperatorClient

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

_NAME = "to-be-revoked"


@pytest.fixture
def doomed(stack: LocalStack, model_dir: Path, tmp_path: Path) -> Iterator[Plane]:
    """Another data plane of the stack, without Redis: it learns everything from the control plane."""
    plane = Plane("dataplane", tmp_path)
    settings = {
        "model_dir": str(model_dir),
        "control_plane": stack.state.control,
        "node_key_file": str(tmp_path / "node.key"),
        "cache_folder": str(tmp_path / "cache"),
        "listen_callers": "127.0.0.1:0",
        "listen_operators": "127.0.0.1:0",
        "listen_metrics": "127.0.0.1:0",
        **DATA_SETTINGS,
    }

    async def let_in() -> str:
        async with stack.operator() as operator:
            return (await operator.create_enrollment_token(_NAME)).token

    plane.configure({**settings, "enrollment_token": asyncio.run(let_in())})
    plane.start()
    plane.configure(settings)
    yield plane
    plane.stop()


def log_of(plane: Plane) -> list[dict[str, Any]]:
    """Lines of the plane's log."""
    return [json.loads(line) for line in plane.process.log.read_text().splitlines() if line.startswith("{")]


async def test_a_revoked_node_stops_serving_and_tells_its_callers_and_its_log_why(
    stack: LocalStack, doomed: Plane, operator: OperatorClient, secrets: Secrets, connect: Connect, publish: Publish
) -> None:
    adapter = (await publish(connect(secrets.acme), "A")).version.adapter
    addresses = doomed.addresses
    async with (
        Client(control=stack.state.control, data=addresses.callers, key=secrets.acme) as caller,
        OperatorClient(control=stack.state.control_operators, data=addresses.operators, key=stack.state.operator_key) as on_node,
    ):
        assert "A" in (await generate(caller, adapter)).text
        running = Stream(caller, adapter, max_tokens=100)
        await running.first()
        (node,) = [node for node in await operator.nodes() if node.name == _NAME]
        await operator.revoke_node(node.id)

        async def is_out() -> bool:
            return await ask_health(addresses.callers) != "SERVING"

        await until(is_out)
        for what in (adapter, ""):  # also what was answered from memory just now
            with pytest.raises(UnavailableError, match="not enrolled any more"):
                await generate(caller, what)
        with pytest.raises(UnavailableError, match="not enrolled any more"):
            await on_node.residency()
        answer = await running.read()
        assert answer.error is None, "what was admitted goes on to its end"
        assert answer.num_tokens == 100
    lines = log_of(doomed)
    assert [line["level"] for line in lines if line["message"].startswith("the control plane refuses this node's key")] == [
        "ERROR"
    ]
    (changed,) = [line for line in lines if line["message"] == "health changed" and not line["serving"]]
    assert changed["cause"] == "the control plane refuses the node's key"
    await aside(doomed.stop)
    with pytest.raises(UnavailableError, match="the node was revoked"):
        await aside(doomed.start)
