"""Which adapter each request of a trace names: popular ones and rare ones, a hot set that moves, a scan."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.workload import SEED

Trace = NDArray[np.int64]
"""[requests], numbers of adapters below the catalogue's size."""


def zipf(catalogue: int, count: int, *, exponent: float) -> Trace:
    """Draws requests of which the adapter ranked k gets a part in proportion to 1 / k^exponent; ranks are dealt out at random."""
    random = np.random.default_rng(SEED)
    return random.permutation(catalogue)[_ranks(random, catalogue, count, exponent=exponent)]


def uniform(catalogue: int, count: int) -> Trace:
    """Draws requests of which every adapter gets an equal part."""
    return np.random.default_rng(SEED).integers(0, catalogue, count)


def moving(catalogue: int, count: int, *, every: int, by: int) -> Trace:
    """Draws requests by Zipf's law with exponent 1; after `every` of them, `by` adapters that were rare come to the top."""
    random = np.random.default_rng(SEED)
    order = random.permutation(catalogue)
    ranks = _ranks(random, catalogue, count, exponent=1.0)
    moved: Trace = order[(ranks - by * (np.arange(count) // every)) % catalogue]
    return moved


def with_scan(trace: Trace, catalogue: int, *, every: int) -> Trace:
    """Puts a request between all `every` of a trace that takes every adapter of the catalogue in turn."""
    at = np.arange(every, len(trace), every)
    return np.insert(trace, at, np.arange(len(at)) % catalogue)


def _ranks(random: np.random.Generator, catalogue: int, count: int, *, exponent: float) -> Trace:
    weights = 1 / np.arange(1, catalogue + 1) ** exponent
    ranks: Trace = random.choice(catalogue, count, p=weights / weights.sum())
    return ranks
