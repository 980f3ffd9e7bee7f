"""What signatures are made with: ECDSA on curves of NIST, each with its digest, and Ed25519."""

from __future__ import annotations

from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

PublicKey = ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey
"""What signatures are verified with."""

CURVES: Final[dict[str, tuple[str, hashes.HashAlgorithm]]] = {
    "secp256r1": ("ECDSA P-256", hashes.SHA256()),
    "secp384r1": ("ECDSA P-384", hashes.SHA384()),
    "secp521r1": ("ECDSA P-521", hashes.SHA512()),
}
"""By curve: what it is called, and the digest that goes with it in the Sigstore specification."""


def usable(key: object) -> PublicKey | None:
    """The key, if it is of a kind that signatures are verified with."""
    if isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in CURVES:
        return key
    return key if isinstance(key, ed25519.Ed25519PublicKey) else None


def made(key: PublicKey, value: bytes, data: bytes) -> bool:
    """Whether a key made a signature over data."""
    try:
        if isinstance(key, ed25519.Ed25519PublicKey):
            key.verify(value, data)
        else:
            key.verify(value, data, ec.ECDSA(CURVES[key.curve.name][1]))
    except InvalidSignature:
        return False
    return True
