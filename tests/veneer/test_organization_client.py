"""The client of an organisation's key."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from controlplane.rules import RULES
from veneer.organization_client import OrganizationClient

_GIVEN = {"roles": ["owner"], "key_id": "k", "name": "group--a", "request_id": "once"}
_CALLS = [
    name
    for name, one in inspect.getmembers(OrganizationClient, inspect.iscoroutinefunction)
    if not name.startswith("_") and name != "close"
]


class _Asked(Exception):
    """Carries the full name of the method that a client was about to call."""


class _Asking(OrganizationClient):
    async def _ask(self, method: Any, request: Any, *, timeout_s: float | None = None) -> Any:
        raise _Asked(method._method.decode())


@pytest.mark.parametrize("name", _CALLS)
async def test_it_offers_what_a_key_of_an_organisation_may_call_and_nothing_else(name: str) -> None:
    async with _Asking(control="127.0.0.1:1", key="vnr_" + "k" * 43) as client:
        call = getattr(client, name)
        needed = [one.name for one in inspect.signature(call).parameters.values() if one.default is inspect.Parameter.empty]
        with pytest.raises(_Asked) as asked:
            await call(**{one: _GIVEN[one] for one in needed})
    assert "organization" in RULES[str(asked.value)].kinds
