"""Whom a tenant trusts: public keys, and certificates of authorities."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final, Literal

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa

from veneer.errors import InvalidArgumentError, Violation
from veneer.signature.algorithms import CURVES, PublicKey, usable
from veneer.signature.chain import fault_of_authority

MAX_PEM_BYTES: Final = 8 << 10

_SUPPORTED = "ECDSA on P-256, P-384 or P-521, or Ed25519"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustedKey:
    """A key, or an authority, whose signatures hold.

    Attributes:
        id: SHA-256 in 64 lower-case hex digits: of a key's PEM form, as signatures name it, or of a certificate's DER form.
        kind: A bare public key, or the certificate of an authority.
        algorithm: What it signs with, e.g. `ECDSA P-256`.
        pem: It itself, in canonical form.
        subject: Of a certificate; empty for a key.
        name: What its owner calls it.
    """

    id: str
    kind: Literal["KEY", "CERTIFICATE"]
    algorithm: str
    pem: str
    subject: str = ""
    name: str = ""


def read_trusted_key(pem: bytes, *, name: str = "", field: str = "pem") -> TrustedKey:
    """Reads a public key, or the certificate of an authority.

    Args:
        pem: One of them as PEM.
        name: What its owner calls it.
        field: Where it stood, for refusals.

    Raises:
        InvalidArgumentError: It is neither, or of a kind that cannot be used.
    """
    if len(pem) > MAX_PEM_BYTES:
        raise _refused(field, f"has {len(pem)} bytes; at most {MAX_PEM_BYTES} are allowed")
    if b"PRIVATE KEY" in pem:
        raise _refused(field, "holds a private key, which is nobody else's to have; give the public one")
    if pem.count(b"-----BEGIN ") != 1:
        raise _refused(field, "must be one public key or one certificate in PEM form")
    try:
        if b"BEGIN CERTIFICATE" in pem:
            return _authority(x509.load_pem_x509_certificate(pem), name, field)
        key = serialization.load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        raise _refused(field, "is not a public key or certificate that can be read") from error
    canonical = _pem_of(_supported(key, field))
    return TrustedKey(
        id=hashlib.sha256(canonical).hexdigest(),
        kind="KEY",
        algorithm=_algorithm(_supported(key, field)),
        pem=canonical.decode(),
        name=name,
    )


def public_key(pem: str) -> PublicKey | None:
    """The key of a trusted key of kind `KEY`; None for one of a kind that only a newer release knows."""
    try:
        return usable(serialization.load_pem_public_key(pem.encode()))
    except (ValueError, UnsupportedAlgorithm):
        return None


def _authority(certificate: x509.Certificate, name: str, field: str) -> TrustedKey:
    fault = fault_of_authority(certificate)
    if fault:
        raise _refused(field, fault)
    key = certificate.public_key()
    pem = certificate.public_bytes(serialization.Encoding.PEM).decode()
    return TrustedKey(
        id=certificate.fingerprint(hashes.SHA256()).hex(),
        kind="CERTIFICATE",
        algorithm=f"RSA {key.key_size}" if isinstance(key, rsa.RSAPublicKey) else _algorithm(_supported(key, field)),
        pem=pem,
        subject=certificate.subject.rfc4514_string(),
        name=name,
    )


def _supported(key: object, field: str) -> PublicKey:
    found = usable(key)
    if found is None:
        raise _refused(field, f"is of a kind that is not used here; {_SUPPORTED} are")
    return found


def _algorithm(key: PublicKey) -> str:
    return "Ed25519" if isinstance(key, ed25519.Ed25519PublicKey) else CURVES[key.curve.name][0]


def _pem_of(key: PublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _refused(field: str, description: str) -> InvalidArgumentError:
    return InvalidArgumentError.of([Violation(field, description)])
