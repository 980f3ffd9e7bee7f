"""Content digests: SHA-256 over tagged, length-prefixed parts, so that no two different inputs share an encoding."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

_DIGEST = re.compile(r"[0-9a-f]{64}")


class Manifest:
    """A hash that is fed part by part; each part states its tag and length before its bytes.

    Args:
        kind: What is hashed; keeps digests of different kinds apart.
    """

    def __init__(self, kind: str) -> None:
        self._hash = hashlib.sha256()
        self.add("kind", kind.encode())

    def add(self, tag: str, data: bytes) -> None:
        """Adds one part that is in memory."""
        self.begin(tag, len(data))
        self.feed(data)

    def begin(self, tag: str, size_bytes: int) -> None:
        """Announces a part whose bytes follow through `feed`."""
        name = tag.encode()
        self._hash.update(len(name).to_bytes(8, "big") + name + size_bytes.to_bytes(8, "big"))

    def feed(self, data: bytes) -> None:
        """Adds the next bytes of the part that was announced."""
        self._hash.update(data)

    def hexdigest(self) -> str:
        """Gives the digest: 64 lower-case hex digits."""
        return self._hash.hexdigest()


def version_digest(owner: str, base_digest: str, files: Mapping[str, str]) -> str:
    """Computes the identity of a version.

    The owner is part of it, so that equal files of two tenants stay two versions in every store and cache.

    Args:
        owner: Tenant that owns the version.
        base_digest: Digest of the base; 64 lower-case hex digits.
        files: SHA-256 of each file's bytes by file name; 64 lower-case hex digits each.

    Returns:
        64 lower-case hex digits.

    Raises:
        ValueError: A digest is not one.
    """
    for digest in (base_digest, *files.values()):
        if _DIGEST.fullmatch(digest) is None:
            raise ValueError(f"{digest!r} is not a SHA-256 in lower-case hex")
    manifest = Manifest("veneer.version.v1")
    manifest.add("owner", owner.encode())
    manifest.add("base", bytes.fromhex(base_digest))
    manifest.add("files", str(len(files)).encode())
    for name in sorted(files):
        manifest.add("name", name.encode())
        manifest.add("sha256", bytes.fromhex(files[name]))
    return manifest.hexdigest()
