"""Leave to read the files of one version, with what its signature is judged by."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

from veneer.controlplane.v1 import nodes_pb2, signatures_pb2
from veneer.errors import FailedPreconditionError
from veneer.signature import Policy, TrustedKey, judge
from veneer.signature.messages import policy_of


class LostFileError(FailedPreconditionError):
    """The object store has no file where a version's grant names it."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A file that a grant covers."""

    name: str
    digest: str
    size_bytes: int
    url: str


@dataclass(frozen=True, slots=True)
class Trust:
    """What a version's signature is judged by; see `veneer.controlplane.v1.SignatureTrust`."""

    policy: Policy = Policy.OFF
    signature: bytes = b""
    keys: tuple[TrustedKey, ...] = ()
    time: datetime = field(default_factory=partial(datetime.fromtimestamp, 0, UTC))


@dataclass(frozen=True, slots=True)
class Grant:
    """Leave to read one version's files for a short time, what its digest is made of, and what its signature is judged by."""

    token: str
    blobs: tuple[Blob, ...]
    base_digest: str
    owner: str
    trust: Trust = field(default_factory=Trust)
    adapter: str = ""
    version_number: int = 0

    @property
    def is_judged(self) -> bool:
        """Whether the owner asks anything of signatures; what one is worth beyond that was told at publish."""
        return self.trust.policy is not Policy.OFF

    def check_signature(self) -> None:
        """Judges the signature against the files that the grant names.

        Raises:
            SignatureError: The owner's policy does not allow the version.
        """
        trust = self.trust
        if self.is_judged:
            files = {blob.name: blob.digest for blob in self.blobs}
            judge(trust.policy, trust.signature, trust.keys, files, at=trust.time)


def read_grant(response: nodes_pb2.GrantBlobsResponse) -> Grant:
    """Returns the grant in an answer."""
    blobs = tuple(Blob(blob.name, blob.digest, blob.size_bytes, blob.url) for blob in response.blobs)
    told = response.trust
    time = told.publish_time.ToDatetime(UTC)
    trust = Trust(policy_of(told.policy), told.signature, tuple(map(_key, told.keys)), time)
    return Grant(response.grant, blobs, response.base_digest, response.owner, trust, response.adapter, response.version_number)


def _key(key: signatures_pb2.TrustedKey) -> TrustedKey:
    return TrustedKey(
        id=key.id,
        kind="CERTIFICATE" if key.kind == signatures_pb2.TRUSTED_KEY_KIND_CERTIFICATE else "KEY",
        algorithm=key.algorithm,
        pem=key.pem,
        subject=key.subject,
        name=key.name,
    )
