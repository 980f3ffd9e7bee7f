"""Which of several data planes a request goes to: one where its adapter is, that is well, and has least to do for us.

Any data plane can serve any adapter, so a wrong choice is a slow request and never a wrong one.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from veneer.errors import InvalidArgumentError, Violation

_FIRST_REST_S, _LONGEST_REST_S = 0.5, 10.0
_MAX_KEYS = 10_000


class Replicas:
    """Data planes that a client was given, and how they are doing. Owned by one event loop.

    Args:
        addresses: Where they are, each once.
        clock: Monotonic seconds.
    """

    def __init__(self, addresses: Sequence[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.addresses = tuple(dict.fromkeys(addresses))
        self._clock = clock
        self._in_flight = Counter[str]()
        self._rests: dict[str, tuple[float, float]] = {}
        """Of those that failed: until when they rest, and for how long that was."""
        self._liked: dict[str, tuple[str, ...]] = {}

    def order(self, key: str, hinted: Sequence[str] = ()) -> list[str]:
        """Returns all addresses, the best first: those that are well before those that rest, hinted ones before others.

        Hinted ones are as good as each other, so the one with the fewest of our requests goes first; the others come as the
        adapter likes them (rendezvous hashing), for the base by requests. Hinted addresses that the client was not given are left
        out: a forged hint cannot have a key sent elsewhere.

        Args:
            key: What identifies the adapter; empty for the base.
            hinted: Where the control plane says that the adapter is.
        """
        now_s, best = self._clock(), frozenset(hinted)
        place = {address: rank for rank, address in enumerate(self._by_liking(key))} if key else {}

        def rank(address: str) -> tuple[bool, bool, int, int]:
            rests = self._rests.get(address, (0.0, 0.0))[0] > now_s
            is_hinted = address in best
            load = self._in_flight[address] if is_hinted or not key else 0
            return rests, not is_hinted, load, place.get(address, 0)

        return sorted(self.addresses, key=rank)

    @contextmanager
    def request(self, address: str) -> Iterator[None]:
        """Counts a request to an address for as long as the block runs."""
        self._in_flight[address] += 1
        try:
            yield
        finally:
            self._in_flight[address] -= 1

    def failed(self, address: str) -> None:
        """Lets a data plane rest that could not be reached or turned a request away; longer each time."""
        rest_s = min(self._rests.get(address, (0.0, _FIRST_REST_S / 2))[1] * 2, _LONGEST_REST_S)
        self._rests[address] = (self._clock() + rest_s, rest_s)

    def answered(self, address: str) -> None:
        """Notes that a data plane is well."""
        self._rests.pop(address, None)

    def _by_liking(self, key: str) -> tuple[str, ...]:
        if key not in self._liked:
            if len(self._liked) >= _MAX_KEYS:
                self._liked.clear()
            self._liked[key] = tuple(sorted(self.addresses, key=lambda address: _score(key, address), reverse=True))
        return self._liked[key]


def read_addresses(text: str) -> list[str]:
    """Returns the addresses in a list with commas.

    Raises:
        InvalidArgumentError: A place in the list is empty.
    """
    addresses = [part.strip() for part in text.split(",")] if text else []
    if not all(addresses):
        raise InvalidArgumentError.of([Violation("data", "is no list of addresses `host:port,host:port`")])
    return addresses


def _score(key: str, address: str) -> bytes:
    return hashlib.blake2b(f"{key}\0{address}".encode(), digest_size=8).digest()
