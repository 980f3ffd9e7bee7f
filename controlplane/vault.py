"""Secrets of the service: the pepper, what is derived from it, and credentials for others."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path

from controlplane.settings import PREFIX, Settings
from veneer.private_files import open_private
from veneer.settings import SettingError, check_file

SECRET_PREFIX = "vnr_"

_SECRET_BYTES = 32
_MIN_PEPPER = 32


def new_secret() -> str:
    """A fresh credential: `vnr_` and 43 characters that carry 256 random bits."""
    return SECRET_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def _random() -> str:
    return secrets.token_urlsafe(48)


def secret_digest(secret: str) -> bytes:
    """SHA-256 of a credential: what nodes forward in place of it."""
    return hashlib.sha256(secret.encode()).digest()


class Vault:
    """Derives everything that must be secret from the pepper. Immutable.

    Derivations are keyed HMAC-SHA-256 over tagged, length-prefixed parts, so that no two uses share an input.
    """

    def __init__(self, pepper: bytes) -> None:
        """Holds the pepper.

        Raises:
            SettingError: It is shorter than 32 bytes.
        """
        if len(pepper) < _MIN_PEPPER:
            raise SettingError.of_variable(
                f"{PREFIX}PEPPER", f"the pepper has {len(pepper)} bytes; at least {_MIN_PEPPER} are needed"
            )
        self._pepper = pepper

    def key_hash(self, key_digest: bytes) -> bytes:
        """What the database stores of a credential: HMAC-SHA-256(pepper, SHA-256(secret))."""
        return hmac.digest(self._pepper, key_digest, "sha256")

    def cache_salt(self, tenant: str) -> bytes:
        """Secret of a tenant that data planes mix into every cache key; 32 bytes."""
        return self._derive("cache-salt", tenant.encode())

    def split_salt(self, owner: str, adapter: str, alias: str, versions: Iterable[str]) -> bytes:
        """Secret of one experiment, an alias's split between these versions, by which data planes draw a unit's arm; 32 bytes.

        It stays while their weights change, so that only the units move that must; another set of versions draws afresh.
        """
        digests = (version.encode() for version in sorted(versions))
        return self._derive("split-salt", owner.encode(), adapter.encode(), alias.encode(), *digests)

    def key_secret(self, tenant: str, nonce: bytes) -> str:
        """Credential of a tenant that a nonce of 256 random bits gives, and nothing without the pepper."""
        secret = self._derive("key-secret", tenant.encode(), nonce)
        return SECRET_PREFIX + base64.urlsafe_b64encode(secret).decode().rstrip("=")

    def sign(self, purpose: str, message: bytes) -> bytes:
        """Tag of a message for one purpose; 32 bytes."""
        return self._derive(f"sign/{purpose}", message)

    def _derive(self, purpose: str, *parts: bytes) -> bytes:
        tagged = b"veneer/1" + b"".join(len(part).to_bytes(8, "big") + part for part in (purpose.encode(), *parts))
        return hmac.digest(self._pepper, tagged, "sha256")


def open_vault(settings: Settings) -> Vault:
    """The vault with the pepper of the settings.

    Raises:
        SettingError: No pepper is set, or its file cannot be read.
    """
    if settings.pepper is not None:
        return Vault(settings.pepper.get_secret_value().encode())
    if settings.pepper_file is None:
        raise SettingError.of_variable(f"{PREFIX}PEPPER", f"set it, or {PREFIX}PEPPER_FILE")
    try:
        pepper = check_file(settings.pepper_file).strip()
    except ValueError as error:
        raise SettingError.of_variable(f"{PREFIX}PEPPER_FILE", str(error)) from error
    return Vault(pepper)


def ensure_secret_file(path: Path, make: Callable[[], str] = _random) -> bool:
    """Makes a file with a secret, readable by its owner only, unless it exists; says whether it made it.

    It appears whole: whoever sees it sees all of it, and one that was cut short is not taken for a secret.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        return False
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        with open_private(part, "xb") as file:
            file.write(make().encode())
            file.flush()
            os.fsync(file.fileno())
        os.link(part, path)
    except FileExistsError:
        return False
    finally:
        part.unlink(missing_ok=True)
    return True


def ensure_secret_files(*, owner: Path, service: Path) -> None:
    """Makes the secrets of an installation as files named after their settings, for `--secrets-dir`; those that exist stay.

    Args:
        owner: Folder for the password of the tables' owner, which serving needs not.
        service: Folder for the pepper and the passwords of the three roles.
    """
    ensure_secret_file(owner / secret_file_name("owner_password"))
    for setting in ("pepper", "app_password", "auth_password", "relay_password"):
        ensure_secret_file(service / secret_file_name(setting))


def secret_file_name(setting: str) -> str:
    """Name of the file from which `--secrets-dir` reads a setting."""
    return f"{Settings.model_config['env_prefix']}{setting}".lower()
