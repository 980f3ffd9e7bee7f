"""Reuse of KV pages: which pages a sequence may begin with, and which of its own others may. Integers only."""

from __future__ import annotations

from dataplane.engine.kv_cache import PagePool
from dataplane.engine.sequence import Sequence

_MAX_BARRED = 10_000


class PrefixCache:
    """Names pages of sequences and finds them again; the pool keeps them. Owned by the scheduler.

    Attributes:
        queries: Prompt tokens looked up since start, once for each request.
        hits: Prompt tokens found since start, likewise.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._barred: dict[str, bool] = {}
        self.queries = 0
        self.hits = 0

    def find(self, sequence: Sequence) -> list[int]:
        """Returns the pages that hold its beginning; never its last token, which is computed so that there is a result."""
        if not sequence.keys:
            return []
        return self._pool.find(sequence.keys[: (len(sequence.tokens) - 1) // self._pool.page_size])

    def share(self, sequence: Sequence) -> int:
        """Gives a sequence that starts the pages that hold its beginning; returns how many."""
        pages = self.find(sequence)
        self._pool.share(pages, sequence.submit.tenant)
        sequence.pages += pages
        sequence.num_named = len(pages)
        sequence.num_scheduled = len(pages) * self._pool.page_size
        if sequence.chain is not None and not sequence.num_charged:  # else it finds what it computed before
            self.queries += len(sequence.tokens)
            self.hits += sequence.num_scheduled
            sequence.num_cached = sequence.num_scheduled
        return len(pages)

    def keep(self, sequence: Sequence, num_computed: int) -> None:
        """Names the pages that are full of committed positions, after their values led to a finite result."""
        chain, size = sequence.chain, self._pool.page_size
        num_full, first = num_computed // size, sequence.num_named
        version = sequence.submit.version
        if chain is None or num_full <= first or version in self._barred:
            return
        if len(sequence.keys) < num_full:
            chain.extend(sequence.keys, sequence.tokens, end=num_full * size)
        start = sequence.active_from // size
        for begin, end, computed_by in ((first, min(start, num_full), None), (max(first, start), num_full, version)):
            if begin < end:
                pages, keys = sequence.pages[begin:end], sequence.keys[begin:end]
                self._pool.name(pages, keys, version=computed_by, tenant=sequence.submit.tenant)
        sequence.num_named = num_full

    def bar(self, version: str) -> int:
        """Drops what is kept of a version that was taken away, and keeps nothing of it until `unbar`; returns its pages."""
        num_pages = self._pool.forget(version)
        self._barred.setdefault(version, False)
        self._bound()
        return num_pages

    def unbar(self, version: str) -> None:
        """Lets a version's pages be kept again, unless it ever gave values that are not finite."""
        if self._barred.get(version) is False:
            del self._barred[version]

    def distrust(self, sequence: Sequence) -> None:
        """Drops what is kept of the version (of the tenant's own base pages) whose values were not finite."""
        version = sequence.submit.version
        if version is None or sequence.active_from:
            self._pool.forget(None, sequence.submit.tenant)
        if version is None:
            return
        self._pool.forget(version)
        self._barred[version] = True
        self._bound()

    def _bound(self) -> None:
        if len(self._barred) > _MAX_BARRED:
            del self._barred[next(iter(self._barred))]
