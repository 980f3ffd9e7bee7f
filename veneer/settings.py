"""What the settings of both planes share: checks of values, and the lines that name what is wrong with them."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from veneer.errors import InvalidArgumentError, Violation

_MAX_PORT = 65_535
_REDIS_SCHEMES = ("redis://", "rediss://", "unix://")


class SettingError(InvalidArgumentError, ValueError):
    """A setting is missing, or is not what it must be; the field of its violation is the variable."""

    @classmethod
    def of_variable(cls, variable: str, fault: str) -> SettingError:
        """Builds the error of one variable of the environment."""
        violation = Violation(variable, fault)
        return cls(str(violation), violations=[violation])


def fault_lines(faults: Iterable[Mapping[str, Any]], *, prefix: str) -> list[str]:
    """One line for each fault that pydantic found, with the variable's name before it.

    A fault of several settings together names them itself.

    Args:
        faults: `errors()` of its exception.
        prefix: What the variables' names begin with.
    """
    lines = []
    for fault in faults:
        name = "_".join(str(part) for part in fault["loc"]).upper()
        text = "is not set" if fault["type"] == "missing" else str(fault["msg"]).removeprefix("Value error, ")
        lines.append(f"{prefix}{name}: {text}" if name else text)
    return lines


def host_of(address: str) -> str:
    """The host of an address `host:port`.

    Raises:
        ValueError: It is no such address.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not host or not (port.isascii() and port.isdecimal() and int(port) <= _MAX_PORT):
        raise ValueError("is not an address such as 127.0.0.1:7600 or [::1]:0")
    return host


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an address.

    Raises:
        ValueError: It is no address.
    """
    if address.startswith("unix:"):
        return True
    host = host_of(address).strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(address: str) -> str:
    """An address to listen on.

    Raises:
        ValueError: It is none.
    """
    if not address.startswith("unix:"):
        host_of(address)
    return address


def check_level(level: str) -> str:
    """A level of logs, in any case.

    Raises:
        ValueError: There is none of this name.
    """
    known = logging.getLevelNamesMapping()
    if level.upper() not in known:
        raise ValueError(f"{level!r} is no level; there are {', '.join(sorted(known, key=known.__getitem__))}")
    return level


def check_redis_url(url: str) -> None:
    """An address of Redis; what it says is not repeated, since it may hold a password.

    Raises:
        ValueError: It is none.
    """
    if not url.startswith(_REDIS_SCHEMES):
        raise ValueError(f"is no address of Redis; those begin with {', '.join(_REDIS_SCHEMES)}")


def check_file(path: Path) -> bytes:
    """The contents of a file that a setting names.

    Raises:
        ValueError: It cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error


def check_listeners(addresses: Mapping[str, str], *, prefix: str, has_tls: bool, allow_plaintext: bool) -> None:
    """Plaintext is for this machine alone, unless it is allowed.

    Args:
        addresses: Addresses by their setting.
        prefix: What the variables' names begin with.
        has_tls: Whether TLS is spoken there.
        allow_plaintext: Whether plaintext is allowed.

    Raises:
        ValueError: One is beyond loopback; names variable and remedies.
    """
    for setting, address in addresses.items():
        if not (has_tls or allow_plaintext or is_loopback(address)):
            remedy = f"set {prefix}TLS_CERTIFICATE and {prefix}TLS_KEY, or {prefix}ALLOW_PLAINTEXT"
            raise ValueError(f"{prefix}{setting.upper()}: {address} is not a loopback address: {remedy}")


def check_tls(certificate: Path | None, key: Path | None, *, prefix: str) -> None:
    """A certificate with its key, as PEM files, or neither.

    Raises:
        ValueError: One is missing, or cannot be used, or they do not belong together; names the variables.
    """
    names = f"{prefix}TLS_CERTIFICATE", f"{prefix}TLS_KEY"
    if certificate is None and key is None:
        return
    if certificate is None or key is None:
        raise ValueError(f"{names[0]} and {names[1]} are set together or not at all")
    public = []
    for name, path, read in ((names[0], certificate, _public_of_certificate), (names[1], key, _public_of_key)):
        try:
            public.append(read(check_file(path)))
        except (ValueError, TypeError) as error:  # TypeError: a key under a password
            reason = str(error) if str(error).startswith("cannot read") else f"{path} is no PEM file that can be used"
            raise ValueError(f"{name}: {reason}") from error
    if public[0] != public[1]:
        raise ValueError(f"{names[1]}: {key} is not the key of the certificate {certificate}")


def _public_of_certificate(pem: bytes) -> bytes:
    certificate = x509.load_pem_x509_certificates(pem)[0]
    return certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _public_of_key(pem: bytes) -> bytes:
    return load_pem_private_key(pem, password=None).public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
