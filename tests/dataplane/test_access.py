"""Whose credential it is, as the control plane says; what it does not vouch for is nobody's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.access import RULES, NodeAuthenticator
from veneer.dataplane.v1 import admin_pb2, generation_pb2
from veneer.errors import UnauthenticatedError

KEY = b"k" * 32


class Says:
    """A control plane that says one thing of every key."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def introspect(self, key_digest: bytes) -> Any:
        assert key_digest == KEY
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def found(kind: str) -> SimpleNamespace:
    return SimpleNamespace(kind=kind, key_id="id", tenant="acme", roles=("caller",))


@pytest.mark.parametrize("kind", ["tenant", "operator", "node"])
async def test_a_known_key_is_who_the_control_plane_says(kind: str) -> None:
    identity = await NodeAuthenticator(Says(found(kind))).authenticate(KEY)  # type: ignore[arg-type]
    assert identity is not None
    assert (identity.kind, identity.tenant, identity.key_id, identity.roles) == (kind, "acme", "id", frozenset({"caller"}))


@pytest.mark.parametrize("answer", [UnauthenticatedError("no valid credential"), found("somebody else")])
async def test_an_unknown_key_or_kind_is_nobodys(answer: Any) -> None:
    assert await NodeAuthenticator(Says(answer)).authenticate(KEY) is None  # type: ignore[arg-type]


def test_every_call_has_a_rule_and_every_rule_a_call() -> None:
    services = [*generation_pb2.DESCRIPTOR.services_by_name.values(), *admin_pb2.DESCRIPTOR.services_by_name.values()]
    assert set(RULES) == {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
