"""Writes docs/settings.md from the settings classes: `python docs/settings.py` (part of `make format`)."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path

from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

ROOT = Path(__file__).resolve().parent.parent
PLANES = ("controlplane", "dataplane")
HEAD = """# Settings

Read once at the start from the environment. A bad value stops the start and names the variable. Written by `docs/settings.py`.
"""
_ENTRY = re.compile(r"^(\w+): (.+)$")


def render() -> str:
    """Returns the text of docs/settings.md."""
    return HEAD + "".join(_section(plane) for plane in PLANES)


def descriptions(settings: type[BaseSettings]) -> dict[str, str]:
    """Returns what the `Attributes:` section of the class says of each setting."""
    _, _, section = inspect.cleandoc(settings.__doc__ or "").partition("Attributes:\n")
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        entry = _ENTRY.match(line.removeprefix("    "))
        if entry and not line.startswith("     "):
            name = entry.group(1)
            found[name] = entry.group(2)
        elif name and line.strip():
            found[name] += f" {line.strip()}"
    return found


def _section(plane: str) -> str:
    settings: type[BaseSettings] = importlib.import_module(f"{plane}.settings").Settings
    prefix = settings.model_config.get("env_prefix", "")
    meanings = descriptions(settings)
    rows = [
        f"| `{prefix}{name.upper()}` | {_default(field)} | {_range(field)} | {meanings[name]} |\n"
        for name, field in settings.model_fields.items()
    ]
    return f"\n## {plane}\n\n| variable | default | range | meaning |\n|---|---|---|---|\n{''.join(rows)}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or isinstance(value, SecretStr) or value == "":
        return "absent"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _range(field: FieldInfo) -> str:
    signs = (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
    found = [
        f"{sign} {getattr(rule, name):,}"
        for rule in field.metadata
        for name, sign in signs
        if getattr(rule, name, None) is not None
    ]
    return ", ".join(found)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    (ROOT / "docs" / "settings.md").write_text(render(), encoding="utf-8")
