"""What a tenant's policy makes of a signature, or of none: at publish and at load the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from veneer.signature.faults import Reason, SignatureError, UntrustedSignatureError
from veneer.signature.keys import TrustedKey
from veneer.signature.verify import verify


class Policy(StrEnum):
    """What a tenant asks of signatures."""

    OFF = "OFF"
    """Nothing: what a signature is worth is told."""
    IF_PRESENT = "IF_PRESENT"
    """One that is there must hold."""
    REQUIRE = "REQUIRE"
    """There must be one that holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignatureReport:
    """What was found of a version's signature; mirrors the message of this name.

    Attributes:
        state: Whether it holds.
        key_id: Identifier of the trusted key or authority; empty unless it holds.
        key_name: What its owner calls it.
        signer: Subject of the signing certificate; empty where a bare key signed.
        num_other_files: Files that were signed too and are not part of the version.
        reason: Why it does not hold; empty if it does.
        fault: The same in words.
    """

    state: Literal["VERIFIED", "UNVERIFIED"]
    key_id: str = ""
    key_name: str = ""
    signer: str = ""
    num_other_files: int = 0
    reason: str = ""
    fault: str = ""

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any] | None) -> SignatureReport | None:
        """Reads what `dataclasses.asdict` gave after a way through JSON; None where there is no signature."""
        return None if fields is None else cls(**fields)


def judge(
    policy: Policy, data: bytes, keys: Sequence[TrustedKey], files: Mapping[str, str], *, at: datetime
) -> SignatureReport | None:
    """Judges a signature file.

    Args:
        policy: What is asked of it.
        data: Its bytes; empty: there is none.
        keys: Who is trusted.
        files: SHA-256 by name of the version's files.
        at: When certificates must have been valid: when the version was published.

    Returns:
        What was found; None when there is no signature.

    Raises:
        SignatureError: The policy does not allow it.
    """
    if not data:
        if policy is Policy.REQUIRE:
            raise UntrustedSignatureError(Reason.MISSING, "is missing, and the adapter's owner requires one")
        return None
    try:
        found = verify(data, keys, files, at=at)
    except SignatureError as error:
        if policy is not Policy.OFF:
            raise
        return SignatureReport(state="UNVERIFIED", reason=error.reason.value, fault=error.message)
    return SignatureReport(
        state="VERIFIED",
        key_id=found.key.id,
        key_name=found.key.name,
        signer=found.signer,
        num_other_files=found.num_other_files,
    )
