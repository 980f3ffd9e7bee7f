"""Fields of a JSON object, read with their types checked; faults are collected, so that all of them can be told at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from veneer.errors import Violation


class Fields:
    """The fields of `config.json`, or of an object in it. Owned by the one call that reads the file.

    A field that is faulty reads as a harmless value, so that reading can go on; the caller raises when `faults` is not empty.

    Args:
        values: The object.
        faults: Receives every fault.
        where: Stands before a field's name in a fault.

    Attributes:
        faults: All faults so far, in the order in which fields were read.
    """

    def __init__(self, values: Mapping[str, Any], faults: list[Violation], *, where: str = "config.json: ") -> None:
        self.faults = faults
        self._values = values
        self._where = where

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def get(self, name: str) -> Any:
        """Returns a field as it stands; None when it is absent or null."""
        return self._values.get(name)

    def refuse(self, name: str, why: str) -> None:
        """Notes a fault of a field."""
        self.faults.append(Violation(f"{self._where}{name}", why))

    def whole(self, name: str, default: int | None = None) -> int:
        """Returns a positive integer; `default` stands for a field that is absent or null, None makes it required."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(name, f"must be a positive integer, is {value!r}")
            return 1
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a positive, finite number; `default` as in `whole`."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            self.refuse(name, f"must be a positive number, is {value!r}")
            return 1.0
        return float(value)

    def choice(self, name: str, choices: Mapping[str, str]) -> str:
        """Returns what stands in `choices` for the text of a field."""
        value = self.get(name)
        if not isinstance(value, str) or value not in choices:
            self.refuse(name, f"must be {' or '.join(repr(choice) for choice in choices)}, is {value!r}")
            return next(iter(choices.values()))
        return choices[value]

    def sequence(self, name: str, length: int) -> list[Any] | None:
        """Returns a list of `length` entries; None when it is absent or null."""
        value = self.get(name)
        if value is not None and (not isinstance(value, list) or len(value) != length):
            self.refuse(name, f"must be a list of {length} entries, is {value!r}")
            return None
        return value

    def part(self, name: str) -> Fields:
        """Returns the fields of an object inside; of an empty one when it is absent or null."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            self.refuse(name, f"must be an object, is {value!r}")
            value = None
        return Fields(value or {}, self.faults, where=f"{self._where}{name}.")
