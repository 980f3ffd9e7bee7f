"""What Resolve answered before, as bytes: given again to the same node for the same question while nothing in it has changed."""

from __future__ import annotations

import math
from typing import Final

from controlplane.identities import Holder
from controlplane.remembered import SOON_S, Freshness, Memory, node_subject
from veneer.access import Identity
from veneer.controlplane.v1 import nodes_pb2

MAX_BYTES: Final = 2048
"""Of a question and its answer: longer ones are rare, and a memory full of them would take too much."""

_Question = tuple[bytes, bytes]
"""Digest of the node's credential, and the request: a plain tuple of bytes is nothing that the garbage collector visits."""


class ToldAnswers:
    """The `Shortcut` of Resolve. Owned by one event loop.

    An answer is made of the node, the caller and the adapter, and forgotten with each of them. It is not given within a minute of
    the end of either credential, by the database's clock. `find` is called when the node has been authenticated, which looks at
    all changes from before the call first.
    """

    def __init__(self, freshness: Freshness) -> None:
        self._freshness = freshness
        self._memory: Memory[_Question, tuple[bytes, float]] = freshness.answers

    def find(self, identity: Identity, request: bytes) -> bytes | None:
        """See `veneer.interceptors.Shortcut`."""
        known = self._memory.get((identity.key_digest, request))
        return None if known is None or known[1] <= self._freshness.now_s else known[0]

    def mark(self) -> int:
        """See `veneer.interceptors.Shortcut`."""
        return self._memory.epoch

    def keep(self, mark: int, identity: Identity, request: bytes, response: nodes_pb2.ResolveResponse, answer: bytes) -> None:
        """See `veneer.interceptors.Shortcut`. Refusals are not kept: see `Resolver.resolve`."""
        node: Holder | None = self._freshness.nodes.get(identity.key_digest)
        if node is None or not response.HasField("resolution") or len(request) + len(answer) > MAX_BYTES:
            return
        caller, found = response.caller, response.resolution
        about = [node_subject(identity.key_id), (caller.tenant, "")]
        if found.adapter:
            about.append((found.owner, found.adapter))
        ends_s = min(
            math.inf if node.expire_time is None else node.expire_time.timestamp(),
            caller.expire_time.ToNanoseconds() / 1e9 if caller.HasField("expire_time") else math.inf,
        )
        known = (answer, ends_s - SOON_S)
        self._memory.put((identity.key_digest, request), known, about=tuple(about), epoch=mark, tenant=caller.tenant)
