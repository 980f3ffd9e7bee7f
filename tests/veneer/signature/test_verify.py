"""Whether a signature holds: by whom it is, over which files, and what is said of one that does not."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from tests.fixtures.signing import NOW, Authority, Signer, raw, sign, statement
from veneer.errors import FailedPreconditionError, InvalidArgumentError
from veneer.signature import (
    BadSignatureError,
    Reason,
    SignatureError,
    TrustedKey,
    UntrustedSignatureError,
    read_trusted_key,
    verify,
)
from veneer.signature_file import MAX_SIGNATURE_BYTES

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}
DIGESTS = {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()}


@pytest.fixture(scope="module")
def signer() -> Signer:
    return Signer()


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def refusal(data: bytes, *keys: TrustedKey, at: datetime.datetime = NOW) -> SignatureError:
    with pytest.raises(SignatureError) as refused:
        verify(data, keys, DIGESTS, at=at)
    return refused.value


@pytest.mark.parametrize(
    "key",
    [
        *(ec.generate_private_key(curve) for curve in (ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1())),
        ed25519.Ed25519PrivateKey.generate(),
    ],
    ids=["p256", "p384", "p521", "ed25519"],
)
def test_a_signature_by_a_trusted_key_holds(key: Any) -> None:
    signer = Signer(key)

    found = verify(signer.sign({**FILES, "README.md": b"more"}), [Signer().trusted, signer.trusted], DIGESTS, at=NOW)

    assert (found.key.name, found.key.id, found.signer) == ("trainer", hashlib.sha256(signer.pem).hexdigest(), "")
    assert found.num_other_files == 1


def test_a_signature_that_names_no_key_is_tried_with_every_trusted_one(signer: Signer) -> None:
    bundle = json.dumps(sign(signer.key, statement(FILES), {"publicKey": {}})).encode()

    assert verify(bundle, [Signer().trusted, signer.trusted], DIGESTS, at=NOW).key == signer.trusted
    assert refusal(bundle, Signer().trusted).reason is Reason.UNKNOWN_KEY


def test_a_key_that_is_not_trusted_is_named(signer: Signer) -> None:
    error = refusal(signer.sign(FILES), Signer().trusted)

    assert isinstance(error, UntrustedSignatureError)
    assert isinstance(error, FailedPreconditionError)
    assert error.reason is Reason.UNKNOWN_KEY
    assert signer.trusted.id in error.message


def test_a_value_that_the_named_key_did_not_make_is_refused(signer: Signer) -> None:
    bundle = signer.bundle(FILES)
    bundle["dsseEnvelope"]["signatures"] = Signer().bundle(FILES)["dsseEnvelope"]["signatures"]

    assert refusal(json.dumps(bundle).encode(), signer.trusted).reason is Reason.NOT_BY_KEY


def test_a_statement_that_was_changed_is_refused(signer: Signer) -> None:
    bundle = signer.bundle({**FILES, "adapter_config.json": b"other"})
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement(FILES)).encode()).decode()

    assert refusal(json.dumps(bundle).encode(), signer.trusted).reason is Reason.NOT_BY_KEY


def test_a_file_with_another_digest_is_named(signer: Signer) -> None:
    error = refusal(signer.sign({**FILES, "adapter_config.json": b"other"}), signer.trusted)

    assert isinstance(error, BadSignatureError)
    assert isinstance(error, InvalidArgumentError)
    assert error.reason is Reason.DIGEST_MISMATCH
    assert error.violations[0].field == "signature: adapter_config.json"


def test_a_file_that_was_not_signed_is_named(signer: Signer) -> None:
    error = refusal(signer.sign({"adapter_config.json": b"{}"}), signer.trusted)

    assert (error.reason, error.violations[0].field) == (Reason.FILE_MISSING, "signature: adapter_model.safetensors")


@pytest.mark.parametrize("depth", [0, 1])
def test_a_signature_by_a_certificate_of_a_trusted_authority_holds(authority: Authority, depth: int) -> None:
    issuer = Authority("Department", issuer=authority) if depth else authority

    found = verify(issuer.sign(FILES), [Authority("Other").trusted, authority.trusted], DIGESTS, at=NOW)

    assert (found.key, found.signer) == (authority.trusted, "CN=Trainer")


def test_a_certificate_of_another_authority_does_not_hold(authority: Authority) -> None:
    error = refusal(Authority().sign(FILES), authority.trusted)  # of the same name, even

    assert isinstance(error, UntrustedSignatureError)
    assert error.reason is Reason.CERTIFICATE
    assert refusal(authority.sign(FILES)).reason is Reason.CERTIFICATE


@pytest.mark.parametrize("days", [-31, 31])
def test_a_certificate_counts_as_of_the_time_of_publish(authority: Authority, days: int) -> None:
    at = NOW + datetime.timedelta(days=days)

    assert refusal(authority.sign(FILES), authority.trusted, at=at).reason is Reason.CERTIFICATE


def test_a_value_that_the_certificates_key_did_not_make_is_refused(authority: Authority) -> None:
    bundle = authority.bundle(FILES)
    bundle["dsseEnvelope"]["signatures"] = Signer().bundle(FILES)["dsseEnvelope"]["signatures"]

    assert refusal(json.dumps(bundle).encode(), authority.trusted).reason is Reason.NOT_BY_KEY


def test_a_certificate_that_is_not_for_signing_is_refused(authority: Authority) -> None:
    for_servers = [x509.ExtendedKeyUsageOID.SERVER_AUTH]  # type: ignore[attr-defined]
    data = authority.sign(FILES, change=lambda one: one.add_extension(x509.ExtendedKeyUsage(for_servers), critical=False))

    error = refusal(data, authority.trusted)

    assert error.reason is Reason.CERTIFICATE
    assert "not for signing" in error.message


def test_a_certificate_for_code_may_sign(authority: Authority) -> None:
    for_code = [x509.ExtendedKeyUsageOID.CODE_SIGNING]  # type: ignore[attr-defined]
    data = authority.sign(FILES, change=lambda one: one.add_extension(x509.ExtendedKeyUsage(for_code), critical=False))

    assert verify(data, [authority.trusted], DIGESTS, at=NOW).signer == "CN=Trainer"


def test_a_signing_certificate_is_no_authority(authority: Authority) -> None:
    """Whoever has a signing certificate could else sign certificates for others."""
    mallory = Authority("Mallory")
    trainer = ec.generate_private_key(ec.SECP384R1())
    mallory.key = trainer
    mallory.certificate = authority.leaf(trainer)
    bundle = mallory.bundle(FILES)
    certificates = bundle["verificationMaterial"]["x509CertificateChain"]["certificates"]
    bundle["verificationMaterial"]["x509CertificateChain"]["certificates"] = [*certificates, *raw([authority.certificate])]

    assert refusal(json.dumps(bundle).encode(), authority.trusted).reason is Reason.CERTIFICATE


def test_a_signature_of_sigstores_services_is_refused_by_name(authority: Authority, signer: Signer) -> None:
    bundle = authority.bundle(FILES)
    chain = bundle["verificationMaterial"].pop("x509CertificateChain")
    bundle["verificationMaterial"]["certificate"] = chain["certificates"][0]
    logged = authority.bundle(FILES)
    logged["verificationMaterial"]["tlogEntries"] = [{"logIndex": "1"}]

    for one in (bundle, logged):
        error = refusal(json.dumps(one).encode(), authority.trusted)
        assert error.reason is Reason.UNSUPPORTED
        assert "keyless" in error.message
        assert "model_signing sign key" in error.message


def _early(said: dict[str, Any]) -> None:
    said["predicateType"] = "https://model_signing/Digests/v0.1"


def _shards(said: dict[str, Any]) -> None:
    said["predicate"]["serialization"]["method"] = "shards"


def _blake(said: dict[str, Any]) -> None:
    said["predicate"]["resources"][0]["algorithm"] = "blake3"


def _other_statement(said: dict[str, Any]) -> None:
    said["_type"] = "https://in-toto.io/Statement/v0.1"


def _twice(said: dict[str, Any]) -> None:
    said["predicate"]["resources"] *= 2


def _other_root(said: dict[str, Any]) -> None:
    said["subject"][0]["digest"]["sha256"] = "0" * 64


def _no_digest(said: dict[str, Any]) -> None:
    said["predicate"]["resources"][0]["digest"] = "00"


def _no_files(said: dict[str, Any]) -> None:
    said["predicate"]["resources"] = "all of them"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_early, Reason.UNSUPPORTED),
        (_shards, Reason.UNSUPPORTED),
        (_blake, Reason.UNSUPPORTED),
        (_other_statement, Reason.UNSUPPORTED),
        (_twice, Reason.MALFORMED),
        (_other_root, Reason.MALFORMED),
        (_no_digest, Reason.MALFORMED),
        (_no_files, Reason.MALFORMED),
    ],
)
def test_a_statement_of_another_kind_is_refused(signer: Signer, change: Callable[[dict[str, Any]], None], reason: Reason) -> None:
    said = statement(FILES)
    change(said)
    hint = hashlib.sha256(signer.pem).hexdigest()

    assert refusal(json.dumps(sign(signer.key, said, {"publicKey": {"hint": hint}})).encode(), signer.trusted).reason is reason


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b"{" * 1000,
        b'{"mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json"}',
        b'{"mediaType": 1, "mediaType": 2}',
        b" " * (MAX_SIGNATURE_BYTES + 1),
    ],
)
def test_a_file_that_is_no_bundle_is_malformed(data: bytes) -> None:
    assert refusal(data).reason is Reason.MALFORMED


def test_a_bundle_changed_at_any_place_never_holds(signer: Signer, authority: Authority) -> None:
    """Whatever one value of the file is replaced by, the answer is a refusal of ours, or it says the same as before."""

    def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        return [path, *(place for key, one in inner for place in places(one, (*path, key)))]

    for bundle, key in ((signer.bundle(FILES), signer.trusted), (authority.bundle(FILES), authority.trusted)):
        for place in places(bundle)[1:]:
            for instead in (None, 1, "", "AAAA", [], {}, [None], "é"):
                changed = json.loads(json.dumps(bundle))
                at = changed
                for part in place[:-1]:
                    at = at[part]
                at[place[-1]] = instead
                try:
                    verify(json.dumps(changed).encode(), [key], DIGESTS, at=NOW)
                except SignatureError:
                    continue
                is_said_elsewhere = place[-1] in ("keyid", "tlogEntries", "hint", "publicKey")
                is_root_of_chain = "certificates" in place and place[place.index("certificates") + 1 :] != (0, "rawBytes")
                assert is_said_elsewhere or is_root_of_chain, place


def test_keys_that_cannot_be_used_are_refused_with_the_reason() -> None:
    weak = rsa.generate_private_key(65537, 1024).public_key()
    info = serialization.PublicFormat.SubjectPublicKeyInfo
    curve = ec.generate_private_key(ec.SECP256K1()).public_key()
    key = ec.generate_private_key(ec.SECP256R1())
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    authority = Authority()
    leaf = authority.leaf(key).public_bytes(serialization.Encoding.PEM)

    for pem, words in (
        (weak.public_bytes(serialization.Encoding.PEM, info), "kind"),
        (curve.public_bytes(serialization.Encoding.PEM, info), "kind"),
        (private, "private key"),
        (leaf, "authority"),
        (b"", "one public key"),
        (authority.pem * 2, "one public key"),
        (b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "read"),
        (b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "read"),
        (b" " * 10_000, "bytes"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            read_trusted_key(pem)


def test_a_key_is_known_by_what_signatures_call_it_however_its_file_is_laid_out(signer: Signer) -> None:
    assert read_trusted_key(b"# mine\r\n" + signer.pem.replace(b"\n", b"\r\n")).id == signer.trusted.id
    assert (signer.trusted.kind, signer.trusted.algorithm) == ("KEY", "ECDSA P-256")
