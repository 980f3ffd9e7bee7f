"""Only what its owner trusts: no version is loaded, or kept, whose signature does not hold where it must."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import AsyncIterator

from dataplane.blob_grants import Blob, Grant
from dataplane.transfer import Source, WithdrawnVersionError
from veneer.signature import SignatureError
from veneer.threads import in_thread

_log = logging.getLogger(__name__)
_MAX_OWNERS = 1 << 16


class UntrustedVersionError(WithdrawnVersionError):
    """A version's signature, or that it has none, is not what its owner asks for."""


class TrustedSource:
    """A source that grants no version whose signature does not hold. Owned by the event loop; signatures are judged in threads.

    Args:
        source: The control plane.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._owners: OrderedDict[str, str] = OrderedDict()

    async def grant_blobs(self, version: str, *, operator_key_digest: bytes = b"") -> Grant:
        """See `Source`.

        Raises:
            UntrustedVersionError: Its owner does not allow it with the signature that it has.
        """
        grant = await self._source.grant_blobs(version, operator_key_digest=operator_key_digest)
        self._owners[version] = grant.owner
        self._owners.move_to_end(version)
        if len(self._owners) > _MAX_OWNERS:
            self._owners.popitem(last=False)
        if not grant.is_judged:
            return grant
        try:
            await in_thread(grant.check_signature)
        except SignatureError as error:
            _log.warning("a version is not signed as its owner asks", extra={"version": version, "reason": error.reason.value})
            raise UntrustedVersionError(f"the version is not signed as its owner asks: {error.message}") from error
        return grant

    def read_blob(self, grant: Grant, blob: Blob, *, offset: int, idle_s: float) -> AsyncIterator[bytes]:
        """See `Source`."""
        return self._source.read_blob(grant, blob, offset=offset, idle_s=idle_s)

    async def report_corrupt(self, version: str) -> None:
        """See `Source`."""
        await self._source.report_corrupt(version)

    def may_be_of(self, owner: str, version: str) -> bool:
        """Whether a version may be a tenant's: it is, or nobody said so far whose it is."""
        return self._owners.get(version, owner) == owner
