"""What a signature file says: a Sigstore bundle of version 0.3 with a DSSE envelope around an in-toto statement.

Nothing is verified here. Source: the Sigstore bundle format (docs.sigstore.dev/about/bundle), DSSE 1.0
(github.com/secure-systems-lab/dsse) and the format of OpenSSF Model Signing 1.0 (github.com/sigstore/model-transparency).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from veneer.artifact.faults import Faults, quote
from veneer.artifact.strict_json import parse_object
from veneer.signature.faults import BadSignatureError, Reason
from veneer.signature_file import MAX_SIGNATURE_BYTES

_MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_PAYLOAD_TYPE = "application/vnd.in-toto+json"
_STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
_PREDICATE_TYPE = "https://model_signing/signature/v1.0"
_EARLY_PREDICATE_TYPE = "https://model_signing/Digests/v0.1"
_KEYLESS = (
    "is vouched for by Sigstore's transparency log (keyless), which is not asked here; sign with a key "
    "(`model_signing sign key`) or with a certificate of an authority of yours (`model_signing sign certificate`)"
)
_SIGN_AGAIN = "sign again with model-signing 1.0 or later"
_MAX_DEPTH = 12
_MAX_CHAIN = 8
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Bundle:
    """A signature as it came.

    Attributes:
        hint: SHA-256 of the signing key's PEM form, 64 lower-case hex digits; empty when the bundle names none.
        chain: Certificates as DER, the signing one first; empty when a bare key signed.
        payload: What was signed, as bytes.
        value: The signature over it.
    """

    hint: str
    chain: tuple[bytes, ...]
    payload: bytes
    value: bytes

    @property
    def signed_bytes(self) -> bytes:
        """What the value is over: the pre-authentication encoding of DSSE."""
        return b"DSSEv1 %d %s %d %s" % (len(_PAYLOAD_TYPE), _PAYLOAD_TYPE.encode(), len(self.payload), self.payload)

    def files(self) -> Mapping[str, str]:
        """SHA-256 by name of the files that the statement lists. To be believed only once the value was verified.

        Raises:
            BadSignatureError: It is not a statement about files, or of a kind that is not read here.
        """
        statement = _object(self.payload, "the payload")
        if _text(statement, "_type") != _STATEMENT_TYPE:
            raise _unsupported(f"its statement is of type {quote(statement.get('_type'))}, not {_STATEMENT_TYPE}")
        kind = _text(statement, "predicateType")
        if kind != _PREDICATE_TYPE:
            hint = f"; {_SIGN_AGAIN}" if kind == _EARLY_PREDICATE_TYPE else ""
            raise _unsupported(f"its predicate is of type {quote(kind)}, not {_PREDICATE_TYPE}{hint}")
        predicate = _part(statement, "predicate", dict)
        how = _part(predicate, "serialization", dict)
        if (how.get("method"), how.get("hash_type")) != ("files", "sha256"):
            found = f"{quote(how.get('method'))} hashed by {quote(how.get('hash_type'))}"
            raise _unsupported(f"it lists {found}; whole files hashed by sha256 are read here, which is the tools' default")
        files: dict[str, str] = {}
        for one in _part(predicate, "resources", list):
            name, digest = _resource(one)
            if name in files:
                raise _malformed(f"lists {quote(name)} twice")
            files[name] = digest
        self._check_root(statement, files)
        return files

    @staticmethod
    def _check_root(statement: Mapping[str, Any], files: Mapping[str, str]) -> None:
        subjects = _part(statement, "subject", list)
        if len(subjects) != 1 or not isinstance(subjects[0], dict):
            raise _malformed("must have one subject")
        root = hashlib.sha256(b"".join(map(bytes.fromhex, files.values()))).hexdigest()
        if _part(subjects[0], "digest", dict).get("sha256") != root:
            raise _malformed("has another root digest than the files that it lists give")


def read_bundle(data: bytes) -> Bundle:
    """Reads a signature file.

    Raises:
        BadSignatureError: It is too large, not a bundle, or of a kind that is not verified here.
    """
    if len(data) > MAX_SIGNATURE_BYTES:
        raise _malformed(f"has {len(data)} bytes; at most {MAX_SIGNATURE_BYTES} are allowed")
    bundle = _object(data, "the file")
    media_type = _text(bundle, "mediaType")
    if media_type != _MEDIA_TYPE:
        raise _unsupported(f"it is of media type {quote(media_type)}, not {_MEDIA_TYPE}; {_SIGN_AGAIN}")
    hint, chain = _signer(_part(bundle, "verificationMaterial", dict))
    if "messageSignature" in bundle:
        raise _unsupported("it is over one blob, not over a statement about files")
    envelope = _part(bundle, "dsseEnvelope", dict)
    payload_type = _text(envelope, "payloadType")
    if payload_type != _PAYLOAD_TYPE:
        raise _unsupported(f"its payload is of type {quote(payload_type)}, not {_PAYLOAD_TYPE}")
    signatures = _part(envelope, "signatures", list)
    if len(signatures) != 1 or not isinstance(signatures[0], dict):
        raise _malformed("must have one signature in its envelope")
    return Bundle(hint, chain, _bytes(envelope, "payload"), _bytes(signatures[0], "sig"))


def _signer(material: Mapping[str, Any]) -> tuple[str, tuple[bytes, ...]]:
    """The hint of a bare key, or a chain of certificates."""
    if "certificate" in material:
        raise _unsupported(_KEYLESS)
    if "x509CertificateChain" in material:
        if material.get("tlogEntries"):
            raise _unsupported(_KEYLESS)
        certificates = _part(_part(material, "x509CertificateChain", dict), "certificates", list)
        if not 1 <= len(certificates) <= _MAX_CHAIN or not all(isinstance(one, dict) for one in certificates):
            raise _malformed(f"must have 1 to {_MAX_CHAIN} certificates in its chain")
        return "", tuple(_bytes(one, "rawBytes") for one in certificates)
    hint = _part(material, "publicKey", dict).get("hint") or ""
    if not isinstance(hint, str) or (hint and _DIGEST.fullmatch(hint) is None):
        raise _malformed("names its key by something else than 64 lower-case hex digits")
    return hint, ()


def _resource(one: object) -> tuple[str, str]:
    if not isinstance(one, dict):
        raise _malformed("lists something that is no file")
    name, digest = _text(one, "name"), _text(one, "digest")
    if one.get("algorithm") != "sha256":
        raise _unsupported(f"it lists {quote(name)} by {quote(one.get('algorithm'))}, not by sha256")
    if _DIGEST.fullmatch(digest) is None:
        raise _malformed(f"lists {quote(name)} with a digest that is none")
    return name, digest


def _object(data: bytes, what: str) -> dict[str, Any]:
    faults = Faults(4)
    found = parse_object(data, what, max_depth=_MAX_DEPTH, faults=faults)
    if found is None or faults.violations:
        raise _malformed("; ".join(map(str, faults.violations)))
    return found


def _part(found: Mapping[str, Any], name: str, kind: type) -> Any:
    part = found.get(name)
    if not isinstance(part, kind):
        raise _malformed(f"must have {'an object' if kind is dict else 'a list'} {name}")
    return part


def _text(found: Mapping[str, Any], name: str) -> str:
    text = found.get(name)
    if not isinstance(text, str):
        raise _malformed(f"must have a text {name}")
    return text


def _bytes(found: Mapping[str, Any], name: str) -> bytes:
    try:
        return base64.b64decode(_text(found, name), validate=True)
    except (binascii.Error, ValueError) as error:
        raise _malformed(f"must have {name} in base64") from error


def _malformed(description: str) -> BadSignatureError:
    return BadSignatureError(Reason.MALFORMED, description)


def _unsupported(description: str) -> BadSignatureError:
    return BadSignatureError(Reason.UNSUPPORTED, description)
