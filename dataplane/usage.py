"""What a request used, and what several used together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

_HOUR_S = 3600


class Use(NamedTuple):
    """What one request used: a record of the journal.

    Attributes:
        tenant: Whose request it was.
        owner: Tenant that owns the adapter; empty where the base answered, as the next two.
        adapter: Name of the adapter.
        version: Digest of the version.
        ticket: Shows the control plane that this node was told of it; hex.
        status: Name of the status with which it ended.
        unix_s: When it ended, in whole seconds since 1970.
        prompt_tokens: Tokens of its prompt, once the engine had taken it.
        cached_tokens: Of them, those that were found in the prefix cache.
        output_tokens: Tokens that were generated.
    """

    tenant: str
    owner: str
    adapter: str
    version: str
    ticket: str
    status: str
    unix_s: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class UseKey(NamedTuple):
    """What uses are summed up by; `hour` is its begin in seconds since 1970."""

    tenant: str
    owner: str
    adapter: str
    version: str
    ticket: str
    hour: int


class UseCounts(NamedTuple):
    """What uses come to."""

    requests: int = 0
    failed_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


def key_of(use: Use) -> UseKey:
    """Returns what a use is summed up by."""
    return UseKey(*use[:5], hour=use.unix_s // _HOUR_S * _HOUR_S)


def summed(uses: Iterable[Use]) -> dict[UseKey, UseCounts]:
    """Returns what uses come to by tenant, version and hour."""
    sums: dict[UseKey, UseCounts] = {}
    for use in uses:
        key = key_of(use)
        counts = (1, use.status != "OK", use.prompt_tokens, use.cached_tokens, use.output_tokens)
        sums[key] = UseCounts(*map(sum, zip(sums.get(key, UseCounts()), counts, strict=True)))
    return sums
