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
        self._rests: dict[tuple[str, str | None], tuple[float, float]] = {}
        """Of those that failed, for an adapter or (None) for all: until when they rest, and for how long that was."""
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
            rests = any(self._rests.get((address, one), (0.0, 0.0))[0] > now_s for one in (None, key))
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

    def failed(self, address: str, key: str | None = None) -> None:
        """Lets a data plane rest that could not be reached or turned a request away; longer each time.

        A failure while it rests is one of the same time, such as those of all streams of a process that ended.

        Args:
            address: Where it is.
            key: It answered, and that of this adapter alone it can serve nothing now; None: nothing is known to work there.
        """
        until_s, last_s = self._rests.get((address, key), (0.0, _FIRST_REST_S / 2))
        now_s = self._clock()
        if now_s >= until_s:
            if len(self._rests) >= _MAX_KEYS:
                self._rests.clear()
            rest_s = min(last_s * 2, _LONGEST_REST_S)
            self._rests[address, key] = (now_s + rest_s, rest_s)

    def answered(self, address: str, key: str) -> None:
        """Notes that a data plane is well, for an adapter too."""
        self._rests.pop((address, None), None)
        self._rests.pop((address, key), None)

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
