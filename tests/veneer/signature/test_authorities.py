"""Private authorities of every make: what holds here is what `model_signing` takes, and nothing holds here that it refuses."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import subprocess
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from model_signing._signing.sign_certificate import Verifier
from OpenSSL import crypto
from sigstore_models.bundle.v1 import Bundle as SigstoreBundle

from tests.fixtures.signing import sign, statement
from veneer.errors import InvalidArgumentError
from veneer.signature import Reason, SignatureError, TrustedKey, read_trusted_key, verify

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}
DIGESTS = {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()}
NOW = datetime.datetime(2030, 6, 1, tzinfo=datetime.UTC)
DAY = datetime.timedelta(days=1)
P256, P384, P521 = (ec.generate_private_key(curve) for curve in (ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()))
ED25519, RSA2048, RSA3072 = (
    ed25519.Ed25519PrivateKey.generate(),
    rsa.generate_private_key(65537, 2048),
    rsa.generate_private_key(65537, 3072),
)
RSA1024 = rsa.generate_private_key(65537, 1024)
BC = x509.BasicConstraints


def usage(*names: str) -> x509.KeyUsage:
    every = (
        "digital_signature content_commitment key_encipherment data_encipherment key_agreement key_cert_sign crl_sign "
        "encipher_only decipher_only"
    )
    return x509.KeyUsage(**{name: name in names for name in every.split()})


CERT_SIGN, SIGNS = (usage("key_cert_sign", "crl_sign"), True), (usage("digital_signature"), True)
UNKNOWN = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4.5"), b"\x05\x00")
CODE, SERVER = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])


@dataclass(frozen=True, slots=True)
class Made:
    """A certificate with its key, as `made` makes one."""

    key: Any
    certificate: x509.Certificate

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)


def made(
    name: str,
    *extensions: tuple[x509.ExtensionType, bool],
    issuer: Made | None = None,
    key: Any = P256,
    start: int = -30,
    end: int = 30,
    digest: hashes.HashAlgorithm | None = None,
    issuer_name: str = "",
) -> Made:
    signing = issuer.key if issuer else key
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer_name)])
            if issuer_name
            else issuer.certificate.subject
            if issuer
            else subject
        )
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW + start * DAY)
        .not_valid_after(NOW + end * DAY)
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical=critical)
    pure = isinstance(signing, ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey)
    return Made(key, builder.sign(signing, None if pure else digest or hashes.SHA256()))


CA = (BC(ca=True, path_length=None), True)


@dataclass(frozen=True, slots=True)
class Case:
    """A chain: the trusted root, what comes with the signature, and the certificate that signs."""

    root: Made
    leaf: Made
    between: tuple[Made, ...] = ()
    trusted: Made | None = None
    at: datetime.datetime = field(default=NOW)

    @property
    def bundle(self) -> bytes:
        chain = [one.certificate.public_bytes(serialization.Encoding.DER) for one in (self.leaf, *self.between)]
        raw = [{"rawBytes": base64.b64encode(der).decode()} for der in chain]
        return json.dumps(sign(self.leaf.key, statement(FILES), {"x509CertificateChain": {"certificates": raw}})).encode()

    @property
    def anchor(self) -> Made:
        return self.trusted or self.root


def tool_takes(case: Case, folder: Path) -> bool:
    """Whether `model_signing` verifies it."""
    path = folder / "root.pem"
    path.write_bytes(case.anchor.pem)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it logs by a method that is deprecated
            Verifier([path])._verify_bundle(SigstoreBundle.from_json(case.bundle))
    except (crypto.X509StoreContextError, ValueError, AttributeError):  # the last: of an Ed25519 key
        return False
    return True


def trusted(pem: bytes) -> TrustedKey | None:
    try:
        return read_trusted_key(pem, name="root")
    except InvalidArgumentError:
        return None


def holds(case: Case) -> bool:
    known = trusted(case.anchor.pem)
    if known is None:
        return False
    try:
        found = verify(case.bundle, [known], DIGESTS, at=case.at)
    except SignatureError as error:
        assert error.reason is Reason.CERTIFICATE
        return False
    assert found.key == known
    return True


def simple(root: Made, **leaf: Any) -> Case:
    return Case(root, made("Trainer", SIGNS, issuer=root, **leaf))


def below(*middle: tuple[x509.ExtensionType, bool], root: Made | None = None, key: Any = P384, **options: Any) -> Case:
    """An authority between root and leaf, which comes with the signature."""
    root = root or made("Root", CA)
    between = made("Department", *middle, issuer=root, key=key, **options)
    return Case(root, made("Trainer", SIGNS, issuer=between), (between,))


def deep(length: int | None, num_between: int) -> Case:
    root = above = made("Root", (BC(ca=True, path_length=length), True))
    between: list[Made] = []
    for number in range(num_between):
        above = made(f"Department {number}", CA, issuer=above, key=P384)
        between.insert(0, above)
    return Case(root, made("Trainer", SIGNS, issuer=above), tuple(between))


def as_openssl_makes_it() -> list[tuple[x509.ExtensionType, bool]]:
    identifier = x509.SubjectKeyIdentifier.from_public_key(P256.public_key())
    return [(identifier, False), (x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), False), CA]


ACCEPTED: dict[str, Callable[[], Case]] = {
    "as openssl req -x509 makes it": lambda: simple(made("Root", *as_openssl_makes_it())),
    "with keyUsage": lambda: simple(made("Root", CA, CERT_SIGN)),
    "keyUsage not critical": lambda: simple(made("Root", CA, (CERT_SIGN[0], False))),
    "basicConstraints not critical": lambda: simple(made("Root", (BC(ca=True, path_length=None), False))),
    "path length 0, no authority between": lambda: deep(0, 0),
    "path length 1, one between": lambda: deep(1, 1),
    "any path length, three between": lambda: deep(None, 3),
    "intermediate without keyUsage": lambda: below(CA),
    "intermediate with keyUsage": lambda: below(CA, CERT_SIGN),
    "intermediate's basicConstraints not critical": lambda: below((BC(ca=True, path_length=0), False)),
    "intermediate of Ed25519": lambda: below(CA, key=ED25519),
    "intermediate of RSA": lambda: below(CA, key=RSA2048),
    "P-384 root": lambda: simple(made("Root", CA, key=P384)),
    "P-521 root": lambda: simple(made("Root", CA, key=P521)),
    "Ed25519 root": lambda: simple(made("Root", CA, key=ED25519)),
    "RSA 2048 root": lambda: simple(made("Root", CA, key=RSA2048)),
    "RSA 3072 root": lambda: simple(made("Root", CA, key=RSA3072, digest=hashes.SHA512())),
    "P-384 leaf": lambda: simple(made("Root", CA), key=P384),
    "P-521 leaf": lambda: simple(made("Root", CA), key=P521),
    "leaf for code": lambda: Case(root := made("Root", CA), made("T", (CODE, False), issuer=root)),
    "leaf for code, critically": lambda: Case(root := made("Root", CA), made("T", (CODE, True), issuer=root)),
    "leaf with both uses": lambda: Case(root := made("Root", CA), made("T", SIGNS, (SERVER, False), issuer=root)),
    "leaf with basicConstraints": lambda: Case(root := made("Root", CA), made("T", SIGNS, (BC(False, None), True), issuer=root)),
    "an extension nobody knows, not critical": lambda: simple(made("Root", CA, (UNKNOWN, False))),
    "the root comes with the signature too": lambda: Case(root := made("Root", CA), made("T", SIGNS, issuer=root), (root,)),
    "certificates in another order": lambda: Case((one := deep(None, 2)).root, one.leaf, one.between[::-1]),
    "certificates that lead nowhere beside": lambda: Case((one := below(CA)).root, one.leaf, (made("X", CA), *one.between)),
    "a permitted name": lambda: Case(
        root := made("Root", CA, (x509.NameConstraints([x509.DNSName("acme.example")], None), True)),
        made("T", SIGNS, (x509.SubjectAlternativeName([x509.DNSName("a.acme.example")]), False), issuer=root),
    ),
}

REFUSED: dict[str, Callable[[], Case]] = {
    "another root": lambda: Case(made("Root", CA, key=P384), made("T", SIGNS, issuer=made("Root", CA))),
    "another root of the same name and key identifier": lambda: Case(
        made("Root", *as_openssl_makes_it(), key=P384), made("T", SIGNS, issuer=made("Root", *as_openssl_makes_it()))
    ),
    "no basicConstraints": lambda: simple(made("Root")),
    "basicConstraints says no authority": lambda: simple(made("Root", (BC(ca=False, path_length=None), True))),
    "keyUsage without keyCertSign": lambda: simple(made("Root", CA, SIGNS)),
    "a critical extension nobody knows": lambda: simple(made("Root", CA, (UNKNOWN, True))),
    "a critical extension nobody knows in the leaf": lambda: Case(
        root := made("Root", CA), made("T", SIGNS, (UNKNOWN, True), issuer=root)
    ),
    "a critical extension nobody knows between": lambda: below(CA, (UNKNOWN, True)),
    "intermediate that is no authority": lambda: below((BC(ca=False, path_length=None), True)),
    "intermediate without any extension": lambda: below(),
    "intermediate that may not sign certificates": lambda: below(CA, SIGNS),
    "a signing certificate signs another": lambda: below(SIGNS),
    "intermediate left out": lambda: Case((one := below(CA)).root, one.leaf),
    "path length 0, one between": lambda: deep(0, 1),
    "path length 1, two between": lambda: deep(1, 2),
    "intermediate with path length 0 above another": lambda: Case(
        root := made("Root", CA),
        made("T", SIGNS, issuer=(low := made("Low", CA, issuer=(high := made("High", (BC(True, 0), True), issuer=root))))),
        (low, high),
    ),
    "leaf not for signing": lambda: Case(root := made("Root", CA), made("T", (usage("key_agreement"), True), issuer=root)),
    "leaf without uses": lambda: Case(root := made("Root", CA), made("T", issuer=root)),
    "leaf for servers": lambda: Case(root := made("Root", CA), made("T", (SERVER, False), issuer=root)),
    "leaf expired": lambda: simple(made("Root", CA), start=-20, end=-10),
    "leaf not valid yet": lambda: simple(made("Root", CA), start=10, end=20),
    "root expired": lambda: simple(made("Root", CA, start=-60, end=-1)),
    "root not valid yet when the leaf began": lambda: simple(made("Root", CA, start=-5), start=-20),
    "intermediate expired": lambda: below(CA, start=-60, end=-1),
    "a name that is not permitted": lambda: Case(
        root := made("Root", CA, (x509.NameConstraints([x509.DNSName("acme.example")], None), True)),
        made("T", SIGNS, (x509.SubjectAlternativeName([x509.DNSName("evil.example")]), False), issuer=root),
    ),
    "RSA 1024 root": lambda: simple(made("Root", CA, key=RSA1024)),
    "RSA 1024 between": lambda: below(CA, key=RSA1024),
    "SHA-224 over the leaf": lambda: simple(made("Root", CA), digest=hashes.SHA224()),
    "an intermediate alone is trusted": lambda: Case((one := below(CA)).root, one.leaf, one.between, trusted=one.between[0]),
    "the leaf alone is trusted": lambda: Case((one := below(CA)).root, one.leaf, one.between, trusted=one.leaf),
}
STRICTER = {
    "leaf expired",
    "leaf not valid yet",
    "root expired",
    "intermediate expired",
    "RSA 1024 root",
    "RSA 1024 between",
    "SHA-224 over the leaf",
}
"""What the tool takes all the same: it asks only whether all were valid when the leaf began, and for no strength."""


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_the_tool_takes_holds(name: str, tmp_path: Path) -> None:
    case = ACCEPTED[name]()
    assert tool_takes(case, tmp_path)
    assert holds(case)


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_tool_refuses_never_holds(name: str, tmp_path: Path) -> None:
    case = REFUSED[name]()
    assert not holds(case)
    assert tool_takes(case, tmp_path) == (name in STRICTER)


def test_the_tool_takes_no_ed25519_leaf_and_here_it_holds(tmp_path: Path) -> None:
    """The one thing that holds here alone: the tool knows no signatures by Ed25519, neither by bare keys."""
    case = simple(made("Root", CA), key=ED25519)
    assert not tool_takes(case, tmp_path)
    assert holds(case)


@pytest.mark.parametrize(
    ("root", "extension"),
    [
        (lambda: made("Root"), "basicConstraints"),
        (lambda: made("Root", (BC(ca=False, path_length=None), True)), "basicConstraints"),
        (lambda: made("Root", CA, SIGNS), "keyUsage"),
        (lambda: made("Root", CA, (UNKNOWN, True)), "1.2.3.4.5"),
        (lambda: made("Low", CA, issuer=made("Root", CA, key=P384)), "CN=Root"),
        (lambda: made("Root", CA, key=RSA1024), "1024 bits"),
        (lambda: made("Root", CA, key=ed448.Ed448PrivateKey.generate()), "kind that is not used"),
        (lambda: made("Root", CA, key=ec.generate_private_key(ec.SECP256K1())), "kind that is not used"),
    ],
)
def test_an_authority_under_which_nothing_could_hold_is_refused_when_added(root: Callable[[], Made], extension: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        read_trusted_key(root().pem)
    assert refused.value.violations[0].field == "pem"
    assert extension in refused.value.message


def test_the_reason_of_a_chain_is_told() -> None:
    case = deep(0, 1)
    known = trusted(case.root.pem)
    assert known is not None
    with pytest.raises(SignatureError, match="path length"):
        verify(case.bundle, [known], DIGESTS, at=NOW)


def test_a_certificate_counts_as_of_the_time_of_publish_and_of_its_begin() -> None:
    case = simple(made("Root", CA, start=-10, end=10), start=-5, end=5)
    known = trusted(case.root.pem)
    assert known is not None
    for days, is_valid in ((-6, False), (-4, True), (4, True), (6, False)):
        assert holds(Case(case.root, case.leaf, at=NOW + days * DAY)) == is_valid


@pytest.mark.parametrize("hours", [-12, 14])
def test_the_zone_in_which_the_time_of_publish_is_told_changes_nothing(hours: int) -> None:
    """A database tells times in the zone of its server."""
    case = simple(made("Root", CA, start=-10, end=10), start=-5, end=5)
    zone = datetime.timezone(datetime.timedelta(hours=hours))
    last_s = datetime.timedelta(seconds=1)
    for at, is_valid in (
        (NOW - 5 * DAY - last_s, False),
        (NOW - 5 * DAY, True),
        (NOW + 5 * DAY - last_s, True),
        (NOW + 5 * DAY + last_s, False),
    ):
        assert holds(Case(case.root, case.leaf, at=at.astimezone(zone))) == is_valid


@pytest.mark.parametrize("key", ["rsa:2048", "ec:P-256", "ed25519"])
def test_an_authority_that_openssl_made_by_its_default_signs_what_holds(tmp_path: Path, key: str) -> None:
    kind, _, more = key.partition(":")
    new = {
        "rsa": ["-newkey", key],
        "ec": ["-newkey", "ec", "-pkeyopt", f"ec_paramgen_curve:{more}"],
        "ed25519": ["-newkey", kind],
    }
    command = ["openssl", "req", "-x509", *new[kind], "-nodes", "-subj", "/CN=Acme ML", "-days", "30"]
    try:
        subprocess.run([*command, "-keyout", tmp_path / "key", "-out", tmp_path / "pem"], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.fail("the program openssl is not there")
    private = serialization.load_pem_private_key((tmp_path / "key").read_bytes(), None)
    root = Made(private, x509.load_pem_x509_certificate((tmp_path / "pem").read_bytes()))
    start = (root.certificate.not_valid_before_utc - NOW).days + 1
    leaf = made("Trainer", SIGNS, issuer=root, start=start, end=start + 20)
    case = Case(root, leaf, at=NOW + (start + 1) * DAY)
    assert tool_takes(case, tmp_path)
    assert holds(case)
