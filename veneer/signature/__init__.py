"""Signatures of models in the format of OpenSSF Model Signing: what one says, whom a tenant trusts, and whether it holds.

A `model.sig` is a Sigstore bundle: a DSSE envelope around an in-toto statement that lists the files of a folder with their
digests. Signatures by a key or by a certificate are verified here; what needs Sigstore's services is refused. Needs
`cryptography` and pyOpenSSL beside what `veneer.artifact` needs, and no network.
"""

from __future__ import annotations

from veneer.signature.bundle import Bundle, read_bundle
from veneer.signature.faults import BadSignatureError, Reason, SignatureError, UntrustedSignatureError
from veneer.signature.keys import TrustedKey, read_trusted_key
from veneer.signature.policy import Policy, SignatureReport, judge
from veneer.signature.verify import Verified, verify

__all__ = [
    "BadSignatureError",
    "Bundle",
    "Policy",
    "Reason",
    "SignatureError",
    "SignatureReport",
    "TrustedKey",
    "UntrustedSignatureError",
    "Verified",
    "judge",
    "read_bundle",
    "read_trusted_key",
    "verify",
]
