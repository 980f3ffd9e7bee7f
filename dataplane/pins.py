"""Versions that operators keep on the device for a time, each on its owner's account."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Protocol

from dataplane.blob_grants import Grant
from dataplane.claims import Claim
from dataplane.lora.host_cache import HostCache
from veneer.errors import ResourceExhaustedError, UnavailableError


class PinSink(Protocol):
    """Who keeps versions on the device; the supervisor."""

    def pin(self, version: str, owner: str, /) -> None:
        """Has a version brought there and kept."""

    def unpin(self, version: str, /) -> None:
        """Lets it make room again."""


class Grants(Protocol):
    """Says whose a version is; the control plane."""

    async def grant_blobs(self, version: str, *, operator_key_digest: bytes = b"") -> Grant:
        """Asks for leave to read a version's files, on behalf of an operator."""


class Loader(Protocol):
    """Who brings versions to host memory; the prefetcher."""

    def ensure(self, version: str, tenant: str = "", *, max_bytes: int = 0) -> Claim:
        """Has a version's image brought there, and kept while the claim is held."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A version that is kept on the device.

    Attributes:
        version: Its digest.
        owner: Tenant that owns it, and whose budget the pin takes.
        size_bytes: What it takes of the arena.
        end_unix_s: When it ends.
    """

    version: str
    owner: str
    size_bytes: int
    end_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PinLimits:
    """What may be pinned.

    Attributes:
        max_bytes: Bytes of all pins.
        max_bytes_per_tenant: Bytes of the pins of one owner.
        max_pins: Pins.
        load_timeout_s: How long a pin waits for its version's image.
    """

    max_bytes: int
    max_bytes_per_tenant: int
    max_pins: int
    load_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class _Kept:
    pin: Pin
    claim: Claim
    end: asyncio.TimerHandle


class Pins:
    """The pins of one node. Owned by the event loop; a new process has none.

    Args:
        engine: Keeps the copies.
        loader: Brings the images, which stay as long as the pins.
        source: Says whose a version is, and refuses one that may not be served.
        cache: Knows the sizes of images.
        limits: What may be pinned.
    """

    def __init__(
        self,
        engine: PinSink,
        *,
        loader: Loader,
        source: Grants,
        cache: HostCache,
        limits: PinLimits,
    ) -> None:
        self._engine = engine
        self._loader = loader
        self._source = source
        self._cache = cache
        self._kept: dict[str, _Kept] = {}
        self.limits = limits

    def all(self) -> list[Pin]:
        """Returns the pins, the first to end first."""
        return sorted((kept.pin for kept in self._kept.values()), key=lambda pin: (pin.end_unix_s, pin.version))

    async def pin(self, version: str, *, lifetime_s: float, operator_key_digest: bytes) -> Pin:
        """Has a version brought to the device and kept there for a time from now on.

        Args:
            version: The version.
            lifetime_s: For how long.
            operator_key_digest: SHA-256 of the credential of the operator who asks, which the control plane verifies.

        Raises:
            ResourceExhaustedError: Its owner, or all, may not pin as much; says what is used and what is allowed.
            VeneerError: The version may not be served, or cannot be had.
        """
        grant = await self._source.grant_blobs(version, operator_key_digest=operator_key_digest)
        claim = self._loader.ensure(version, grant.owner)
        try:
            async with asyncio.timeout(self.limits.load_timeout_s):
                await asyncio.shield(claim.loaded)
            size_bytes = self._cache.size_of(version) or sum(blob.size_bytes for blob in grant.blobs)
            self._check(version, grant.owner, size_bytes)
        except TimeoutError as error:
            claim.release()
            raise UnavailableError("the version is not loaded yet", retry_after_s=1.0) from error
        except BaseException:
            claim.release()
            raise
        self._let_go(version)
        pin = Pin(version, grant.owner, size_bytes, time.time() + lifetime_s)
        end = asyncio.get_running_loop().call_later(lifetime_s, self.unpin, version)
        self._kept[version] = _Kept(pin, claim, end)
        self._engine.pin(version, grant.owner)
        return pin

    def unpin(self, version: str) -> Pin | None:
        """Ends a pin; returns it, or None when there was none."""
        pin = self._let_go(version)
        if pin is not None:
            self._engine.unpin(version)
        return pin

    def close(self) -> None:
        """Ends all pins."""
        for version in list(self._kept):
            self.unpin(version)

    def _let_go(self, version: str) -> Pin | None:
        kept = self._kept.pop(version, None)
        if kept is None:
            return None
        kept.end.cancel()
        kept.claim.release()
        return kept.pin

    def _check(self, version: str, owner: str, size_bytes: int) -> None:
        others = [kept.pin for kept in self._kept.values() if kept.pin.version != version]
        limits, used = self.limits, sum(pin.size_bytes for pin in others)
        mine = sum(pin.size_bytes for pin in others if pin.owner == owner)
        if len(others) >= limits.max_pins:
            raise ResourceExhaustedError(f"{len(others)} versions are pinned, at most {limits.max_pins} may be")
        for whose, taken, allowed in (("its owner's", mine, limits.max_bytes_per_tenant), ("all", used, limits.max_bytes)):
            if taken + size_bytes > allowed:
                raise ResourceExhaustedError(f"the version takes {size_bytes} bytes; {whose} pins take {taken} of {allowed}")
