"""Names of versions for people: owner, adapter and number beside a digest."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

_MAX_NAMES = 65_536


@dataclass(frozen=True, slots=True)
class VersionName:
    """What people call a version.

    Attributes:
        owner: Tenant that owns it; empty when unknown, and so are the others.
        adapter: Name of its adapter.
        number: Number of the version in its adapter; 0 when unknown.
    """

    owner: str = ""
    adapter: str = ""
    number: int = 0


_UNKNOWN = VersionName()


class VersionNames:
    """The names that the control plane told of versions; those told least lately go first. Owned by the event loop.

    They are shown and never acted on: a version is its digest.

    Args:
        max_names: How many are kept.
    """

    def __init__(self, *, max_names: int = _MAX_NAMES) -> None:
        self._names: OrderedDict[str, VersionName] = OrderedDict()
        self._max_names = max_names

    def note(self, version: str, name: VersionName) -> None:
        """Keeps a name; an empty one, as an older control plane tells it, is none."""
        if not name.adapter:
            return
        self._names[version] = name
        self._names.move_to_end(version)
        while len(self._names) > self._max_names:
            self._names.popitem(last=False)

    def of(self, version: str) -> VersionName:
        """The name of a version, or an empty one."""
        return self._names.get(version, _UNKNOWN)
