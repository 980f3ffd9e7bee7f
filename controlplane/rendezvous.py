"""Rendezvous hashing: which replicas an adapter likes best.

Every pair of adapter and replica has a score that depends on these two alone, so a replica that leaves takes nobody's favourite
away but its own, and one that joins draws only from those who like it better.

Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998; the weights: Schindelhauer and
Schomaker, "Weighted distributed hash tables", 2005.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint32]
_CHUNK_PAIRS = 1 << 18  # scores of so many pairs stay in a core's cache


def hashes(names: Iterable[str]) -> Hashes:
    """Returns a hash of each name, [names], the same in every process."""
    digests = b"".join(hashlib.blake2b(name.encode(), digest_size=4).digest() for name in names)
    return np.frombuffer(digests, dtype="<u4").astype(np.uint32)


def scores(adapters: Hashes, replicas: Hashes, weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the scores of pairs; the greatest is liked best.

    `ln(u) / weight`, u in (0, 1) from the pair's hash: a replica is the best of all with a chance that is its weight's share.

    Args:
        adapters: Hashes of adapters; replicas and weights broadcast against it.
        replicas: Hashes of replicas.
        weights: Share of traffic that a replica takes, positive.
    """
    mixed = np.bitwise_xor(adapters, replicas)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed ^= mixed >> np.uint32(shift)
        mixed *= np.uint32(factor)
    mixed ^= mixed >> np.uint32(16)
    uniform = mixed.astype(np.float32)
    uniform += np.float32(0.5)
    uniform *= np.float32(2.0**-32 * (1 - 2.0**-23))  # never 1, whose logarithm says nothing of the weight
    logarithm: NDArray[np.float32] = np.log(uniform, out=uniform)
    logarithm /= weights
    return logarithm


def favourites(adapters: Hashes, replicas: Hashes, weights: NDArray[np.float32], *, count: int) -> NDArray[np.int32]:
    """Returns the replicas that each adapter likes best, [adapters, count or all], the best first."""
    num_replicas = len(replicas)
    count = min(count, num_replicas)
    found = np.empty((len(adapters), count), np.int32)
    step = max(1, _CHUNK_PAIRS // max(1, num_replicas))
    for start in range(0, len(adapters), step):
        part = slice(start, start + step)
        row_scores = scores(adapters[part, None], replicas[None], weights[None])
        best: NDArray[Any] = np.argpartition(row_scores, num_replicas - count, axis=1)[:, num_replicas - count :]
        order = np.argsort(-np.take_along_axis(row_scores, best, axis=1), axis=1, kind="stable")
        found[part] = np.take_along_axis(best, order, axis=1)
    return found
