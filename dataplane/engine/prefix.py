"""Keys of KV pages: what must be equal for one page's contents to serve another request. Standard library only."""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable, Sequence

_FORMAT = b"veneer.kv.1"
_NEVER = 1 << 62


class PageKeys:
    """Builds the chain of page keys of one request; every tier of the cache uses this builder.

    The key of a page is the SHA-256 of a tuple in which each field carries its tag and length, so that no value of one field
    can stand for a value of another: format, salt of the caller's tenant, base digest, namespace, `active_from`, key of the
    page before, tokens. The namespace is the base when the page lies wholly before the adapter starts (or there is none), else
    the digest of the version; `active_from` is the offset inside the page at which the adapter starts, the page size for pages
    of the base.

    Attributes:
        page_size: As given.

    Args:
        salt: Secret of the caller's tenant. Never empty: without one nothing is shared.
        base_digest: Digest of the base model.
        version: Digest of the adapter version that computes the request; None when the base does.
        page_size: Tokens in a page.
        active_from: Position in the sequence at which the adapter starts; tokens before it are computed by the base.
    """

    __slots__ = ("_active_from", "_base", "_head", "_pack", "_prefix", "_prefix_of", "_salt", "_version", "page_size")

    def __init__(self, *, salt: str, base_digest: str, version: str | None, page_size: int, active_from: int = 0) -> None:
        assert salt, "without a salt nothing is shared"
        self._salt = salt.encode()
        self._base = base_digest.encode()
        self._version = version
        self.page_size = page_size
        self._active_from = active_from if version is not None else _NEVER
        self._head, self._pack = _content(page_size)
        self._prefix: hashlib._Hash
        self._prefix_of = -1

    def extend(self, keys: list[bytes], tokens: Sequence[int], *, end: int | None = None) -> None:
        """Appends the keys of the full pages of `tokens[:end]` that `keys` lacks.

        Raises:
            ValueError: A token is not in [0, 2³²).
        """
        size = self.page_size
        stop = len(tokens) if end is None else end
        before = _BEFORE + keys[-1] if keys else _FIRST
        try:
            for start in range(len(keys) * size, stop - size + 1, size):
                active_from = min(self._active_from - start, size) if self._active_from > start else 0
                if active_from != self._prefix_of:
                    self._prefix, self._prefix_of = self._begin(active_from), active_from
                page = self._prefix.copy()
                page.update(before + self._head + self._pack(*tokens[start : start + size]))
                key = page.digest()
                keys.append(key)
                before = _BEFORE + key
        except struct.error as error:
            raise ValueError("token ids must be in [0, 2**32)") from error

    def _begin(self, active_from: int) -> hashlib._Hash:
        if active_from == self.page_size:
            namespace = _field(b"b", b"base")
        else:
            assert self._version is not None, "every page of the base is the base's whole"
            namespace = _field(b"v", self._version.encode())
        head = _field(b"f", _FORMAT) + _field(b"s", self._salt) + _field(b"m", self._base) + namespace
        return hashlib.sha256(head + _field(b"a", struct.pack("<I", active_from)))


@functools.cache
def _content(page_size: int) -> tuple[bytes, Callable[..., bytes]]:
    """Returns the tag and length of a page's tokens, and what packs them."""
    pack = struct.Struct(f"<{page_size}I")
    return b"t" + struct.pack("<Q", pack.size), pack.pack


def _field(tag: bytes, value: bytes) -> bytes:
    return tag + struct.pack("<Q", len(value)) + value


_FIRST = _field(b"p", b"")
_BEFORE = b"p" + struct.pack("<Q", hashlib.sha256().digest_size)
