"""How much each version is asked for, counted from what nodes report; what is long past fades."""

from __future__ import annotations

from collections.abc import Mapping

from controlplane.fleet_reports import NodeState

_FORGOTTEN = 0.01


class Popularity:
    """Uses of versions that halve with time. Owned by one task.

    Args:
        half_life_s: Time in which a use comes to count half.
        max_per_s: Uses a second that are believed of one node.
    """

    def __init__(self, *, half_life_s: float = 300.0, max_per_s: float = 1000.0) -> None:
        self._half_life_s = half_life_s
        self._max_per_s = max_per_s
        self._counts: dict[str, float] = {}
        self._last: dict[str, tuple[int, dict[str, int]]] = {}
        self._noted_s: float | None = None

    @property
    def counts(self) -> Mapping[str, float]:
        """Uses by version, the recent ones whole."""
        return self._counts

    def note(self, states: Mapping[str, NodeState], now_s: float) -> None:
        """Counts what nodes gave leases for since the last call.

        A node that is new, or began again, brings all that it counted: of a version that it came to hold since, that is right; of
        a control plane that starts, it is the best guess of what was.
        """
        passed_s = self._half_life_s if self._noted_s is None else max(0.0, now_s - self._noted_s)
        self._noted_s = now_s
        fade = 0.5 ** (passed_s / self._half_life_s)
        self._counts = {version: faded for version, count in self._counts.items() if (faded := count * fade) > _FORGOTTEN}
        last, self._last = self._last, {}
        for node, state in states.items():
            uses = {version: holding.uses for version, holding in state.holdings.items()}
            epoch, before = last.get(node, (state.epoch, {}))
            since = before if epoch == state.epoch else {}
            self._last[node] = (state.epoch, uses)
            gained = {
                version: count - had if count >= (had := since.get(version, 0)) else count for version, count in uses.items()
            }
            believed_s = passed_s if node in last else self._half_life_s
            part = min(1.0, self._max_per_s * believed_s / max(1, sum(gained.values())))
            for version, count in gained.items():
                if count:
                    self._counts[version] = self._counts.get(version, 0.0) + count * part
