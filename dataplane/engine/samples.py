"""Samples of what a form computes of an adapter's pairs, to be compared with the stored artifact; see `dataplane.prober`.

Both sides make the same input: numbers that every dtype holds exactly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SAMPLE_ROWS = 4
"""Rows of the input."""

MAX_COLUMNS = 64
"""Columns of a pair's output that are compared, spread over all."""

MAX_PENDING = 64
"""Orders that wait for a step."""

MAX_WAIT_S = 60.0
"""How long one waits at most: longer than who asked."""


@dataclass(frozen=True, slots=True)
class TakeSamples:
    """Asks for samples of a version; they are taken at the end of a step that serves it.

    Attributes:
        token: Comes back with the answer.
        version: Digest of the version; a request for it must be running, or come.
        places: (layer, slice) of the pairs.
    """

    token: int
    version: str
    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Samples:
    """The answer.

    Attributes:
        token: That of the order.
        values: What each pair gives for `sample_input`, [SAMPLE_ROWS, columns] row by row, in the order of the places; none where
            this form takes no samples.
        refused: The order was not taken: too many wait.
    """

    token: int
    values: tuple[tuple[float, ...], ...] = ()
    refused: bool = False


def sample_input(in_features: int) -> npt.NDArray[np.float32]:
    """Returns the input, [SAMPLE_ROWS, in_features]: multiples of 1/64 between -1 and 1 that look like noise."""
    rows, columns = np.ogrid[1 : SAMPLE_ROWS + 1, 1 : in_features + 1]
    mixed = (columns * columns * 40_503 + rows * 30_011 * columns + rows * rows * 9_973) >> 5
    return np.asarray((mixed % 129 - 64) / 64, dtype=np.float32)


def sample_columns(out_features: int) -> npt.NDArray[np.int64]:
    """Returns the columns that are compared."""
    return np.linspace(0, out_features - 1, min(MAX_COLUMNS, out_features)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class SlotSamples:
    """An order whose version is on the device: `slot` is the one that the step at hand serves it from."""

    order: TakeSamples
    slot: int


class Orders:
    """Orders that wait for a step. Owned by the step loop.

    One whose version never comes to a step is dropped in the end: nobody waits for it any more, and others need its place.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: list[tuple[float, TakeSamples]] = []

    def add(self, order: TakeSamples) -> bool:
        """Keeps an order; False when too many wait."""
        now = self._clock()
        self._waiting = [(came, known) for came, known in self._waiting if now - came <= MAX_WAIT_S]
        if len(self._waiting) >= MAX_PENDING:
            return False
        self._waiting.append((now, order))
        return True

    @property
    def versions(self) -> Sequence[str]:
        """The versions that are asked for."""
        return [order.version for _, order in self._waiting]

    def due(self, slots: dict[str, int]) -> list[SlotSamples]:
        """Takes out the orders of versions that a step serves, by their slots."""
        due = [SlotSamples(order, slots[order.version]) for _, order in self._waiting if order.version in slots]
        self._waiting = [(came, order) for came, order in self._waiting if order.version not in slots]
        return due
