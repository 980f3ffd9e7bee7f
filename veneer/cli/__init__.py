"""The `veneer` command."""

from __future__ import annotations

from veneer.cli.app import main

__all__ = ["main"]
