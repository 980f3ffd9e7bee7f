"""Fixtures of the control plane's tests."""

from __future__ import annotations

import pytest

from tests.fixtures.controlplane import settings, world
from tests.fixtures.fork_server import serve

__all__ = ["serve", "settings", "world"]


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that use a database, which are those to run on its other versions."""
    for item in items:
        if isinstance(item, pytest.Function) and "postgres" in item.fixturenames:
            item.add_marker(pytest.mark.postgres)
