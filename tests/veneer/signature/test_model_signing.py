"""Against the tool that others sign with: what it signs is verified here, and what is signed here it verifies."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.fixtures.signing import Authority, Signer
from veneer.signature import BadSignatureError, Reason, verify
from veneer.signature_file import SIGNATURE_NAME

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights", "README.md": b"how it was made"}
DIGESTS = {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items() if name != "README.md"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    return folder


def tool(*arguments: object) -> None:
    command = [sys.executable, "-m", "model_signing", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout


def write_private(key: ec.EllipticCurvePrivateKey, path: Path) -> Path:
    plain = serialization.NoEncryption()
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    return path


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1()], ids=["p256", "p384"])
def test_what_the_tool_signs_with_a_key_holds_here(folder: Path, tmp_path: Path, curve: ec.EllipticCurve) -> None:
    signer = Signer(ec.generate_private_key(curve))
    signature = folder / SIGNATURE_NAME

    assert isinstance(signer.key, ec.EllipticCurvePrivateKey)
    tool("sign", "key", folder, "--private_key", write_private(signer.key, tmp_path / "key"), "--signature", signature)

    found = verify(signature.read_bytes(), [signer.trusted], DIGESTS, at=Authority.now())
    assert (found.key, found.num_other_files) == (signer.trusted, 1)
    with pytest.raises(BadSignatureError) as refused:
        verify(signature.read_bytes(), [signer.trusted], {**DIGESTS, "adapter_config.json": "0" * 64}, at=Authority.now())
    assert refused.value.reason is Reason.DIGEST_MISMATCH


def test_what_the_tool_signs_with_a_certificate_holds_here(folder: Path, tmp_path: Path) -> None:
    authority, key = Authority(at=Authority.now()), ec.generate_private_key(ec.SECP256R1())
    leaf = authority.leaf(key)
    signature, certificate, root = tmp_path / SIGNATURE_NAME, tmp_path / "leaf", tmp_path / "root"
    certificate.write_bytes(leaf.public_bytes(serialization.Encoding.PEM))
    root.write_bytes(authority.pem)

    options = ("--private_key", write_private(key, tmp_path / "key"), "--signing_certificate", certificate)
    tool("sign", "certificate", folder, *options, "--certificate_chain", root, "--signature", signature)

    found = verify(signature.read_bytes(), [authority.trusted], DIGESTS, at=Authority.now())
    assert (found.key, found.signer) == (authority.trusted, "CN=Trainer")


def test_what_is_signed_in_these_tests_the_tool_takes_for_its_own(folder: Path, tmp_path: Path) -> None:
    signer, public = Signer(), tmp_path / "public"
    public.write_bytes(signer.pem)
    (folder / SIGNATURE_NAME).write_bytes(signer.sign(FILES))

    tool("verify", "key", folder, "--public_key", public, "--signature", folder / SIGNATURE_NAME)
