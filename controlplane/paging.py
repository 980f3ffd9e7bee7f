"""Opaque page tokens: where the page before ended."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence

from veneer.errors import InvalidArgumentError, Violation

DEFAULT_PAGE = 100
MAX_PAGE = 1000


def page_limit(page_size: int) -> int:
    """Rows of a page: 0 means 100, more than 1000 means 1000."""
    return min(page_size or DEFAULT_PAGE, MAX_PAGE)


def page_token(listing: str, last: Sequence[str | int]) -> str:
    """Makes the token of the page after the row whose sort key is `last`; it works for that listing only."""
    return base64.urlsafe_b64encode(json.dumps([listing, *last], separators=(",", ":")).encode()).decode()


def page_start(listing: str, token: str, *, kinds: Sequence[type]) -> list[str | int] | None:
    """Sort key of the last row before the page, or None for the first page.

    Args:
        listing: Name of the listing, as given to `page_token`.
        token: What the caller sent.
        kinds: Types of the parts of the sort key.

    Raises:
        InvalidArgumentError: The token is not one of this listing.
    """
    if not token:
        return None
    try:
        name, *last = json.loads(base64.urlsafe_b64decode(token.encode()))
    except (binascii.Error, ValueError, TypeError):
        name, last = None, []
    if name != listing or len(last) != len(kinds) or not all(type(part) is kind for part, kind in zip(last, kinds, strict=True)):
        raise InvalidArgumentError.of([Violation("page_token", "is not a token of this listing")])
    parts: list[str | int] = last
    return parts
