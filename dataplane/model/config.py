"""Reads what a model's `config.json` says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dataplane.model.architecture import Architecture
from dataplane.model.families import FAMILIES
from dataplane.model.fields import Fields
from veneer.errors import InvalidArgumentError, Violation


def read_config(model_dir: Path) -> Architecture:
    """Reads `config.json` of a Hugging Face folder.

    Raises:
        InvalidArgumentError: The file is missing or no JSON, or says something that this model code does not compute; every
            fault is listed.
    """
    try:
        values = json.loads((model_dir / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidArgumentError.of([Violation("config.json", f"cannot be read: {error}")]) from error
    if not isinstance(values, dict):
        raise InvalidArgumentError.of([Violation("config.json", "must be a JSON object")])
    return parse_config(values)


def parse_config(values: dict[str, Any]) -> Architecture:
    """Checks the fields of a `config.json`; see `read_config`."""
    names = values.get("architectures")
    family = FAMILIES.get(names[0]) if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) else None
    if family is None:
        known = ", ".join(FAMILIES)
        raise InvalidArgumentError.of([Violation("config.json: architectures", f"must be one of {known}, is {names!r}")])
    faults: list[Violation] = []
    architecture = family.read(Fields({**family.defaults, **values}, faults))
    if faults:
        raise InvalidArgumentError.of(faults)
    return architecture
