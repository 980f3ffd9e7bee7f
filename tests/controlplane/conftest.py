"""Fixtures of the control plane's tests."""

from __future__ import annotations

from tests.fixtures.controlplane import settings, world
from tests.fixtures.fork_server import serve

__all__ = ["serve", "settings", "world"]
