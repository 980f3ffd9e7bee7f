"""The pepper and what is derived from it."""

from __future__ import annotations

import hashlib
import hmac
import stat
from pathlib import Path

import pytest

from controlplane.settings import Settings
from controlplane.vault import Vault, ensure_secret_file, ensure_secret_files, new_secret, open_vault, secret_digest
from veneer.access import key_digest_of

PEPPER = bytes(range(32))


def test_a_stored_credential_is_the_keyed_hash_of_its_hash() -> None:
    secret = new_secret()
    digest = hashlib.sha256(secret.encode()).digest()
    assert secret_digest(secret) == digest
    assert Vault(PEPPER).key_hash(digest) == hmac.new(PEPPER, digest, hashlib.sha256).digest()


def test_a_new_secret_has_the_form_that_the_interceptor_takes() -> None:
    secrets = {new_secret() for _ in range(100)}
    assert len(secrets) == 100
    assert all(key_digest_of(f"Bearer {secret}") == secret_digest(secret) for secret in secrets)


def test_no_two_derivations_agree() -> None:
    vault = Vault(PEPPER)
    derived = [
        vault.cache_salt("acme"),
        vault.cache_salt("acme2"),
        vault.split_salt("acme", "a", "b", ["c", "d"]),
        vault.split_salt("acme", "a", "b", ["c", "e"]),
        vault.split_salt("acme", "a", "b", ["cd", ""]),
        vault.split_salt("acme", "a", "b", ["c", "d", "e"]),
        vault.split_salt("acme", "ab", "", ["c", "d"]),
        vault.split_salt("acmea", "", "b", ["c", "d"]),
        vault.sign("acme", b""),
        vault.sign("cache-salt", b"acme"),
        vault.key_hash(b"acme"),
        Vault(PEPPER[::-1]).cache_salt("acme"),
    ]
    assert len(set(derived)) == len(derived)
    assert {len(one) for one in derived} == {32}
    assert vault.cache_salt("acme") == Vault(PEPPER).cache_salt("acme")
    assert vault.split_salt("acme", "a", "b", ["d", "c"]) == vault.split_salt("acme", "a", "b", ["c", "d"])


def test_a_short_pepper_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 32"):
        Vault(b"short")


def test_the_pepper_file_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "pepper"
    assert ensure_secret_file(path)
    first = path.read_bytes()
    assert not ensure_secret_file(path)
    assert path.read_bytes() == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert open_vault(Settings(pepper_file=path)).cache_salt("a") == Vault(first).cache_salt("a")
    assert [one.name for one in path.parent.iterdir()] == ["pepper"]


def test_a_secret_that_cannot_be_made_leaves_no_file(tmp_path: Path) -> None:
    def fail() -> str:
        raise OSError("no randomness")

    with pytest.raises(OSError, match="no randomness"):
        ensure_secret_file(tmp_path / "pepper", fail)
    assert list(tmp_path.iterdir()) == []


def test_the_secrets_of_an_installation_are_made_once_and_read_by_their_names(tmp_path: Path) -> None:
    owner, service = tmp_path / "owner", tmp_path / "service"
    ensure_secret_files(owner=owner, service=service)
    made = {path.name: path.read_text() for path in (*owner.iterdir(), *service.iterdir())}
    ensure_secret_files(owner=owner, service=service)

    served = Settings(_secrets_dir=[service])
    owned = Settings(_secrets_dir=[owner, service], owner_url="postgresql://someone@db/veneer")

    assert {path.name: path.read_text() for path in (*owner.iterdir(), *service.iterdir())} == made
    assert len(set(made.values())) == 5
    assert None not in (served.app_password, served.auth_password, served.relay_password, served.pepper)
    assert served.owner_password is None
    assert owned.owner().password == made["veneer_controlplane_owner_password"]
    open_vault(served)


def test_the_vault_says_which_setting_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="VENEER_CONTROLPLANE_PEPPER"):
        open_vault(Settings())
    with pytest.raises(ValueError, match="VENEER_CONTROLPLANE_PEPPER_FILE"):
        open_vault(Settings(pepper_file=tmp_path / "absent"))
