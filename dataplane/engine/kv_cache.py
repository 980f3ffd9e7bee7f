"""Which KV pages are free. Integers only; the tensor that they index lives with the runner."""

from __future__ import annotations


class PagePool:
    """Hands out page numbers 1 … num_pages; page 0 is nobody's (padding of page tables points at it). Owned by the scheduler.

    Attributes:
        num_pages: Pages that can be handed out.
        page_size: Tokens in a page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages, 0, -1))

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Returns the pages that so many tokens of one sequence take."""
        return -(-num_tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        """Hands out pages; their old contents must be cleared before use. `count` must not exceed `num_free`."""
        assert count <= len(self._free), f"{count} pages of {len(self._free)} free"
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        """Takes pages back and empties the caller's list."""
        self._free.extend(reversed(pages))
        pages.clear()
        assert len(self._free) <= self.num_pages, "a page came back twice"
