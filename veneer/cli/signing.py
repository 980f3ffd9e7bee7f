"""A signature held against keys on this machine, as publish would against those that the tenant trusts."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Sequence
from pathlib import Path

from veneer.client import CONFIG_NAME, WEIGHTS_NAME
from veneer.controlplane.v1 import signatures_pb2
from veneer.signature import Policy, judge, read_trusted_key
from veneer.signature.messages import report_message
from veneer.signature_file import read_signature


def check_signature(folder: Path, signature: Path | None, trusted: Sequence[Path]) -> signatures_pb2.SignatureReport | None:
    """What is found of an adapter's signature; None when there is none.

    Args:
        folder: Of the adapter.
        signature: The file; None: `model.sig` in the folder, if there is one.
        trusted: PEM files of keys and authorities, of which one must have signed; none: what it says is only told.

    Raises:
        SignatureError: It does not hold, or there is none though somebody is trusted.
        InvalidArgumentError: A file is not what it must be.
    """
    data = read_signature(folder, signature)
    keys = [read_trusted_key(path.read_bytes(), name=path.name, field=str(path)) for path in trusted]
    files = {name: _digest(folder / name) for name in (CONFIG_NAME, WEIGHTS_NAME)} if data else {}
    policy = Policy.REQUIRE if trusted else Policy.OFF
    found = judge(policy, data, keys, files, at=datetime.datetime.now(datetime.UTC))
    return None if found is None else report_message(found)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
