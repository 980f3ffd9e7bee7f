"""Opaque page tokens: where the page before ended."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from veneer.errors import InvalidArgumentError, Violation

DEFAULT_PAGE = 100
MAX_PAGE = 1000
_MAX_INT = (1 << 63) - 1

Part = str | int | datetime | UUID
"""A part of a sort key."""


def page_limit(page_size: int) -> int:
    """Rows of a page: 0 means 100, more than 1000 means 1000."""
    return min(page_size or DEFAULT_PAGE, MAX_PAGE)


def page_token(listing: str, last: Sequence[Part]) -> str:
    """Makes the token of the page after the row whose sort key is `last`; it works for that listing only."""
    key = [part if isinstance(part, int) else str(part) for part in last]
    return base64.urlsafe_b64encode(json.dumps([listing, *key], separators=(",", ":")).encode()).decode()


def page_start(listing: str, token: str, *, kinds: Sequence[type[Part]]) -> list[Any] | None:
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
        if name == listing:
            return [_read(part, kind) for part, kind in zip(last, kinds, strict=True)]
    except (binascii.Error, ValueError, TypeError):
        pass
    raise InvalidArgumentError.of([Violation("page_token", "is not a token of this listing")])


def _read(part: Any, kind: type[Part]) -> Part:
    """A part of a sort key as it was given to `page_token`.

    Raises:
        ValueError: It is not of this kind, or nothing that a row could hold.
    """
    if kind is int:
        if type(part) is not int or not -_MAX_INT <= part <= _MAX_INT:
            raise ValueError
        return part
    if not isinstance(part, str) or "\0" in part:
        raise ValueError
    part.encode()  # JSON can spell characters that no text holds
    if kind is datetime:
        return datetime.fromisoformat(part)
    return UUID(part) if kind is UUID else part
