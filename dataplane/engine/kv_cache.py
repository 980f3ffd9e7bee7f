"""Which KV pages are free, held or kept for reuse. Integers only; the tensor that they index lives with the runner."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_AT_ONCE = 16
"""Pages that a tenant loses before the next one does."""


@dataclass(slots=True)
class _Account:
    """One tenant's pages: how many sequences hold, and those that nobody holds but whose contents are kept, oldest first."""

    weight: int = 1
    held: int = 0
    kept: OrderedDict[int, int] = field(default_factory=OrderedDict)


class PagePool:
    """Hands out page numbers 1 … num_pages; page 0 is nobody's (padding of page tables points at it). Owned by the scheduler.

    A page is free, held (by one sequence, or by several that share it), or kept: held by nobody, but named by the key of its
    contents, so that it can be shared again until room is needed. Only pages whose every token is computed and committed are
    named, and a named page is never written again. A page is charged to the tenant that took it; since a tenant's salt is part
    of the key, all its holders are that tenant's.

    Attributes:
        num_pages: Pages that can be handed out.
        page_size: Tokens in a page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages, 0, -1))
        self._shared: dict[int, int] = {}
        self._keys: list[bytes | None] = [None] * (num_pages + 1)
        self._origin: list[tuple[str | None, str]] = [(None, "")] * (num_pages + 1)
        self._accounts: dict[str, _Account] = {}
        self._index: dict[bytes, int] = {}
        self._num_kept = 0
        self._clock = 0
        self._batch = max(1, num_pages // 256)

    @property
    def num_free(self) -> int:
        """Pages that can be handed out: nobody holds them."""
        return len(self._free) + self._num_kept

    @property
    def num_kept(self) -> int:
        """Pages among the free ones whose contents are kept for reuse."""
        return self._num_kept

    def held_by(self, tenant: str) -> int:
        """Returns the pages that a tenant's sequences hold."""
        account = self._accounts.get(tenant)
        return 0 if account is None else account.held

    def pages_for(self, num_tokens: int) -> int:
        """Returns the pages that so many tokens of one sequence take."""
        return -(-num_tokens // self.page_size)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Returns the pages that hold the longest known beginning of a chain of keys; nothing is taken yet."""
        return list(itertools.takewhile(bool, map(self._index.get, keys)))  # type: ignore[arg-type]  # none is 0

    def num_kept_of(self, pages: Iterable[int], tenant: str) -> int:
        """Returns how many of a tenant's pages nobody holds, so that sharing them leaves less for others."""
        account = self._accounts.get(tenant)
        return 0 if account is None else sum(page in account.kept for page in pages)

    def share(self, pages: Sequence[int], tenant: str) -> None:
        """Makes the caller one more holder of a tenant's pages that `find` returned just now."""
        for page in pages:
            account = self._accounts[tenant]
            if account.kept.pop(page, None) is None:
                self._shared[page] = self._shared.get(page, 0) + 1
            else:
                account.held += 1
                self._num_kept -= 1

    def take(self, count: int, tenant: str, *, weight: int = 1) -> list[int]:
        """Hands out pages; their old contents must be cleared before use. `count` must not exceed `num_free`.

        Args:
            count: Number of pages.
            tenant: To whom they are charged.
            weight: That tenant's share relative to others.
        """
        assert count <= self.num_free, f"{count} pages of {self.num_free} free"
        if not count:
            return []
        free = self._free
        if count > len(free):
            self._evict(max(count - len(free), min(self._batch, self._num_kept)))
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account()
        account.weight = weight
        account.held += count
        pages = free[-count:]
        del free[-count:]
        return pages

    def name(self, pages: Iterable[int], keys: Iterable[bytes], *, version: str | None, tenant: str) -> None:
        """Names held pages of a tenant by the keys of their contents, which are complete and will not change.

        Where another page has a key already, this one stays without a name.

        Args:
            pages: The pages.
            keys: Their keys.
            version: What computed them; None for the base.
            tenant: Whose they are.
        """
        index, names, origins, origin = self._index, self._keys, self._origin, (version, tenant)
        for page, key in zip(pages, keys, strict=True):
            if names[page] is None and index.setdefault(key, page) == page:
                names[page] = key
                origins[page] = origin

    def give_back(self, pages: list[int], tenant: str) -> None:
        """Ends a tenant's hold of pages and empties the list; what has a name is kept, the end of a chain least long."""
        if not pages:
            return
        account, shared, keys = self._accounts.get(tenant), self._shared, self._keys
        assert account is not None, "pages came back twice"
        for page in reversed(pages):
            if page in shared:
                shared[page] -= 1
                if not shared[page]:
                    del shared[page]
                continue
            account.held -= 1
            if keys[page] is None:
                self._free.append(page)
            else:
                self._clock += 1
                account.kept[page] = self._clock
                self._num_kept += 1
        assert account.held >= 0, "pages came back twice"
        self._forget_if_idle(tenant)
        pages.clear()

    def forget(self, version: str | None, tenant: str | None = None) -> int:
        """Drops the names of all pages that a version computed (None: the base), so that they are not shared any more.

        Args:
            version: The version.
            tenant: Only this tenant's pages; None for everybody's.

        Returns:
            The number of these pages. Those that a sequence holds come free with its end.
        """
        doomed = []
        for key, page in self._index.items():
            of_version, of_tenant = self._origin[page]
            if of_version == version and tenant in (None, of_tenant):
                doomed.append((key, page, of_tenant))
        for key, page, of_tenant in doomed:
            del self._index[key]
            self._keys[page] = None
            account = self._accounts[of_tenant]
            if account.kept.pop(page, None) is not None:
                self._num_kept -= 1
                self._free.append(page)
                self._forget_if_idle(of_tenant)
        return len(doomed)

    def _evict(self, count: int) -> None:
        """Frees kept pages: those of tenants above their shares first, the one most above it first, each tenant's oldest first.

        Once nobody is above its share, the oldest of all go.
        """
        weights = sum(account.weight for account in self._accounts.values())
        over: list[tuple[float, str]] = []
        for name, account in self._accounts.items():
            excess = account.held + len(account.kept) - self.num_pages * account.weight / weights
            if excess > 0 and account.kept:
                over.append((-excess / account.weight, name))
        heapq.heapify(over)
        while count > 0 and over:
            excess, name = over[0]
            account = self._accounts[name]
            number = min(count, len(account.kept), _AT_ONCE, math.ceil(-excess * account.weight))
            self._free_oldest(name, number)
            count -= number
            excess += number / account.weight
            if account.kept and excess < 0:
                heapq.heapreplace(over, (excess, name))
            else:
                heapq.heappop(over)
        if count <= 0:
            return
        ages = [(next(iter(account.kept.values())), name) for name, account in self._accounts.items() if account.kept]
        heapq.heapify(ages)
        for _ in range(count):
            _, name = ages[0]
            account = self._accounts[name]
            self._free_oldest(name, 1)
            if account.kept:
                heapq.heapreplace(ages, (next(iter(account.kept.values())), name))
            else:
                heapq.heappop(ages)

    def _free_oldest(self, tenant: str, count: int) -> None:
        """Forgets the contents of a tenant's oldest kept pages, and puts them among the free ones."""
        kept, keys, index = self._accounts[tenant].kept, self._keys, self._index
        for _ in range(count):
            page, _ = kept.popitem(last=False)
            del index[keys[page]]  # type: ignore[arg-type]  # a kept page has a name
            keys[page] = None
            self._free.append(page)
        self._num_kept -= count
        self._forget_if_idle(tenant)

    def _forget_if_idle(self, tenant: str) -> None:
        account = self._accounts[tenant]
        if not account.held and not account.kept:
            del self._accounts[tenant]
