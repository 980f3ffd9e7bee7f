"""Whether a signing certificate leads to an authority that is trusted: by OpenSSL, with which `model_signing` verifies too.

OpenSSL takes what private authorities issue: it asks neither for extensions of a key's use nor for names of hosts, as a profile
of the public web does. On top of it stands here what that tool leaves out: digests that are broken, and the time of the publish.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from OpenSSL import crypto

from veneer.signature.algorithms import usable

_MIN_RSA_BITS: Final = 2048
_MAX_RSA_BITS: Final = 8192  # a larger one takes long to verify with
_DIGESTS: Final = (hashes.SHA256, hashes.SHA384, hashes.SHA512)


class ChainError(Exception):
    """A certificate leads to no authority that is trusted; the text says why, for people."""


def chain_to(
    leaf: x509.Certificate, others: Sequence[x509.Certificate], roots: Sequence[x509.Certificate], *, at: datetime
) -> list[x509.Certificate]:
    """The certificates from a signing one to an authority that is trusted, both among them.

    They must be valid at the time given, and, as `model_signing` asks, when the signing certificate became valid.

    Args:
        leaf: The certificate of whoever signed.
        others: Certificates that came with it, in any order; they are trusted no more than it.
        roots: Authorities that are trusted, each issued by itself.
        at: When the certificates must be valid.

    Raises:
        ChainError: There is no such chain.
        ValueError: A certificate cannot be read.
    """
    _found(leaf, others, roots, at=leaf.not_valid_before_utc)
    chain = _found(leaf, others, roots, at=at)
    for one in chain[:-1]:
        if one.signature_hash_algorithm is not None and not isinstance(one.signature_hash_algorithm, _DIGESTS):
            raise ChainError(
                f"{_name(one)} is signed over a digest by {one.signature_hash_algorithm.name}, which is not relied on"
            )
    for one in chain[1:]:
        fault = fault_of_key(one)
        if fault:
            raise ChainError(f"the key of {_name(one)} {fault}")
    return chain


def fault_of_key(authority: x509.Certificate) -> str:
    """Why an authority's key is not relied on; empty if it is."""
    key = authority.public_key()
    if isinstance(key, rsa.RSAPublicKey):
        is_sound = _MIN_RSA_BITS <= key.key_size <= _MAX_RSA_BITS
        return "" if is_sound else f"is RSA with {key.key_size} bits; {_MIN_RSA_BITS} to {_MAX_RSA_BITS} are allowed"
    if usable(key) is None:
        return "is of a kind that is not used here; RSA, ECDSA on P-256, P-384 or P-521, and Ed25519 are"
    return ""


def fault_of_authority(certificate: x509.Certificate) -> str:
    """Why nothing that this authority signs could hold; empty if something could.

    Raises:
        ValueError: The certificate cannot be read.
    """
    extensions = certificate.extensions
    try:
        is_authority = extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        is_authority = False
    if not is_authority:
        return (
            "is not the certificate of an authority: its extension basicConstraints must say CA:TRUE; "
            "give the root that the signing certificate leads to"
        )
    try:
        if not extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign:
            return "may not issue certificates: its extension keyUsage leaves keyCertSign out"
    except x509.ExtensionNotFound:
        pass  # it is then for every use
    if certificate.issuer != certificate.subject:
        return (
            f"is issued by another authority, {certificate.issuer.rfc4514_string()}: chains must end in one that is issued by "
            "itself, as `model_signing` asks; give that root, and have intermediate certificates come with the signature"
        )
    fault = fault_of_key(certificate)
    if fault:
        return f"has a key that {fault}"
    try:
        _found(certificate, [], [certificate], at=certificate.not_valid_before_utc)
    except ChainError as error:
        critical = [one.oid for one in extensions if one.critical]
        names = ", ".join(f"{oid._name} ({oid.dotted_string})" for oid in critical)  # noqa: SLF001  there is no public name
        return f"cannot be the end of a chain: {error}" + (f"; its critical extensions are {names}" if critical else "")
    return ""


def _found(
    leaf: x509.Certificate, others: Sequence[x509.Certificate], roots: Sequence[x509.Certificate], *, at: datetime
) -> list[x509.Certificate]:
    store = crypto.X509Store()
    for one in roots:
        store.add_cert(crypto.X509.from_cryptography(one))
    at = at.astimezone(UTC)  # pyOpenSSL takes the fields of a time for those of UTC
    store.set_time(at)
    known = [crypto.X509.from_cryptography(one) for one in others]
    try:
        chain = crypto.X509StoreContext(store, crypto.X509.from_cryptography(leaf), known).get_verified_chain()
    except crypto.X509StoreContextError as error:
        where = error.certificate.to_cryptography()
        raise ChainError(f"{_name(where)}: {error} (at {at:%Y-%m-%d %H:%M:%S}Z)") from error
    except crypto.Error as error:
        raise ValueError("OpenSSL cannot read a certificate") from error
    return [one.to_cryptography() for one in chain]


def _name(certificate: x509.Certificate) -> str:
    return f"the certificate {certificate.subject.rfc4514_string()!r}"
