"""What is to be published: the order as it came, and the draft that it makes with its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

from controlplane.aliases import check_alias_name
from controlplane.answers import Request
from controlplane.spool import Received
from veneer.artifact import BaseDescription, version_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOrder:
    """What is published.

    Attributes:
        adapter: Name of the adapter; it is made by its first version.
        base: Digest or name of the base.
        request_id: The caller's own identifier of this publish.
        label: Free text.
        labels: Names and values of the owner's choice.
        training_run: Where it comes from: the run that trained it.
        data_digest: Where it comes from: the digest of what it was trained on.
        alias: Alias to point at the new version; empty: none, but an adapter's first version becomes `stable`.
        probe: Whether a data plane must do well with it before an alias moves.
        signature: Its signature file; empty: none.
    """

    adapter: str
    base: str
    request_id: str
    label: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    training_run: str = ""
    data_digest: str = ""
    alias: str = ""
    probe: bool = False
    signature: bytes = b""

    def check(self) -> None:
        """Refuses, before the upload, what the last transaction would refuse when the files are stored already.

        Raises:
            InvalidArgumentError: No alias can have that name.
        """
        if self.alias:
            check_alias_name(self.alias, field="header.alias")


@dataclass(frozen=True, slots=True)
class Draft:
    """A publish whose files came whole.

    Attributes:
        owner: Tenant that publishes.
        order: What it asked for.
        base: The base that the order names.
        files: The files by name, in the spool.
        digest: Digest of the version that they make.
        upload: Names the folder that they are stored in.
        request: Under which the answer is kept.
    """

    owner: str
    order: PublishOrder
    base: BaseDescription
    files: Mapping[str, Received]
    digest: str
    upload: UUID
    request: Request

    @classmethod
    def of(cls, owner: str, order: PublishOrder, *, base: BaseDescription, files: Mapping[str, Received]) -> Draft:
        """A draft with an upload of its own."""
        digest = version_digest(owner, base.digest, {name: file.digest for name, file in files.items()})
        more: list[Any] = [dict(sorted(order.labels.items())), order.training_run, order.data_digest]
        more += [True] if order.probe else []
        more += [hashlib.sha256(order.signature).hexdigest()] if order.signature else []
        content = json.dumps([digest, order.adapter, order.label, order.alias, *(more if any(more) else [])])
        fingerprint = hashlib.sha256(content.encode()).digest()
        request = Request(owner, order.request_id, "Publish", fingerprint, field="header.request_id")
        return cls(owner, order, base, files, digest, uuid4(), request)
