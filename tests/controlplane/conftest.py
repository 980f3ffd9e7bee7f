"""Fixtures of the control plane's tests."""

from __future__ import annotations

from tests.fixtures.controlplane import settings, world

__all__ = ["settings", "world"]
