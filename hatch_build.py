"""Build hook: generates the API code before any wheel, editable install or source archive is put together."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class GenerateStubs(BuildHookInterface[Any]):
    """Runs `proto/generate.py`."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Called by hatchling before it collects files."""
        runpy.run_path(str(Path(self.root) / "proto" / "generate.py"))["generate"]()
