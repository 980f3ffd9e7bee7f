"""Whether a signature holds: by whom it is, and whether it is over the files at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.x509.oid import ExtendedKeyUsageOID

from veneer.artifact.faults import quote
from veneer.signature.algorithms import PublicKey, made, usable
from veneer.signature.bundle import Bundle, read_bundle
from veneer.signature.chain import ChainError, chain_to
from veneer.signature.faults import BadSignatureError, Reason, UntrustedSignatureError
from veneer.signature.keys import TrustedKey, public_key

_TRUST_IT = "`veneer trust add` registers one"


@dataclass(frozen=True, slots=True)
class Verified:
    """A signature that holds.

    Attributes:
        key: The trusted key, or the authority that the certificate leads to.
        signer: Subject of the signing certificate; empty where a bare key signed.
        num_other_files: Files that were signed too and are not among those at hand.
    """

    key: TrustedKey
    signer: str
    num_other_files: int


def verify(data: bytes, keys: Sequence[TrustedKey], files: Mapping[str, str], *, at: datetime) -> Verified:
    """Verifies a signature file.

    Args:
        data: Its bytes.
        keys: Who is trusted.
        files: SHA-256 by name, 64 lower-case hex digits, of the files that it must be over.
        at: When certificates must have been valid.

    Raises:
        BadSignatureError: It is malformed, unsupported, or not over these files.
        UntrustedSignatureError: It is by nobody who is trusted.
    """
    bundle = read_bundle(data)
    key, signer = _by_certificate(bundle, keys, at) if bundle.chain else (_by_key(bundle, keys), "")
    signed = bundle.files()
    for name, digest in files.items():
        if name not in signed:
            raise BadSignatureError(Reason.FILE_MISSING, "is not among the files that were signed", file=name)
        if signed[name] != digest:
            raise BadSignatureError(
                Reason.DIGEST_MISMATCH, f"has the digest {digest}, and the one that was signed is {signed[name]}", file=name
            )
    return Verified(key, signer, len(signed.keys() - files.keys()))


def _by_key(bundle: Bundle, keys: Sequence[TrustedKey]) -> TrustedKey:
    known = [one for one in keys if one.kind == "KEY"]
    if bundle.hint:
        known = [one for one in known if one.id == bundle.hint]
        if not known:
            raise UntrustedSignatureError(Reason.UNKNOWN_KEY, f"is by the key {bundle.hint}, which is not trusted; {_TRUST_IT}")
    for one in known:
        key = public_key(one.pem)
        if key is not None and made(key, bundle.value, bundle.signed_bytes):
            return one
    if bundle.hint:
        raise BadSignatureError(Reason.NOT_BY_KEY, "was not made by the key that it names, or what it says was changed")
    raise UntrustedSignatureError(Reason.UNKNOWN_KEY, f"names no key and is by none that is trusted; {_TRUST_IT}")


def _by_certificate(bundle: Bundle, keys: Sequence[TrustedKey], at: datetime) -> tuple[TrustedKey, str]:
    """The authority that the signing certificate leads to, and the certificate's subject."""
    try:
        leaf, *others = map(x509.load_der_x509_certificate, bundle.chain)
        signing = usable(leaf.public_key())
        signer = leaf.subject.rfc4514_string()
        can_sign = _can_sign(leaf)
    except (ValueError, UnsupportedAlgorithm, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        raise BadSignatureError(Reason.MALFORMED, "has a certificate that cannot be read") from error
    if signing is None:
        raise BadSignatureError(
            Reason.UNSUPPORTED, "is by a certificate whose key is neither ECDSA on a curve of NIST nor Ed25519"
        )
    try:
        authority = _authority_of(leaf, others, [one for one in keys if one.kind == "CERTIFICATE"], at)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise BadSignatureError(Reason.MALFORMED, "has a certificate that cannot be read") from error
    if not can_sign:
        raise BadSignatureError(Reason.CERTIFICATE, f"is by the certificate {quote(signer)}, which is not for signing")
    _check_value(bundle, signing)
    return authority, signer


def _check_value(bundle: Bundle, key: PublicKey) -> None:
    if not made(key, bundle.value, bundle.signed_bytes):
        raise BadSignatureError(Reason.NOT_BY_KEY, "was not made by the certificate's key, or what it says was changed")


def _authority_of(
    leaf: x509.Certificate, others: Sequence[x509.Certificate], authorities: Sequence[TrustedKey], at: datetime
) -> TrustedKey:
    subject = quote(leaf.subject.rfc4514_string())
    if not authorities:
        raise UntrustedSignatureError(
            Reason.CERTIFICATE, f"is by the certificate {subject}, and no authority is trusted; {_TRUST_IT}"
        )
    roots = {x509.load_pem_x509_certificate(one.pem.encode()): one for one in authorities}
    try:
        chain = chain_to(leaf, others, list(roots), at=at)
    except ChainError as error:
        fault = f"which led to no authority that is trusted at {at.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z: {quote(str(error))}"
        raise UntrustedSignatureError(Reason.CERTIFICATE, f"is by the certificate {subject}, {fault}; {_TRUST_IT}") from error
    return roots[chain[-1]]


def _can_sign(leaf: x509.Certificate) -> bool:
    """Whether the certificate says that it may sign: by its use of the key, or as one for code."""
    try:
        if leaf.extensions.get_extension_for_class(x509.KeyUsage).value.digital_signature:
            return True
    except x509.ExtensionNotFound:
        pass
    try:
        return ExtendedKeyUsageOID.CODE_SIGNING in leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return False
