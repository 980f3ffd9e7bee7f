from __future__ import annotations

import hashlib

import pytest

from veneer.access import Identity, Kind, ListenerName, Rule, current_identity, key_digest_of
from veneer.errors import PermissionDeniedError, UnauthenticatedError

KEY = "vnr_" + "Aa0_-" * 8 + "xyz"
KINDS: tuple[Kind, ...] = ("tenant", "operator", "node", "enrollment", "bearer")


def identity(kind: Kind, *roles: str) -> Identity:
    return Identity(kind=kind, key_digest=b"", roles=frozenset(roles))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("allowed", KINDS)
@pytest.mark.parametrize("listener", ["callers", "operators"])
def test_a_kind_comes_in_by_its_own_listener_only(kind: Kind, allowed: Kind, listener: ListenerName) -> None:
    own = "operators" if kind == "operator" else "callers"
    if kind == allowed and listener == own:
        Rule.of(allowed).admit(identity(kind), listener)
    else:
        with pytest.raises(PermissionDeniedError, match=f"not for a {kind} key on the {listener} listener"):
            Rule.of(allowed).admit(identity(kind), listener)


def test_one_of_the_roles_is_enough_and_none_is_not() -> None:
    rule = Rule.of("tenant", "operator", roles=["owner", "publisher"])
    rule.admit(identity("tenant", "publisher", "caller"), "callers")
    rule.admit(identity("operator"), "operators")
    with pytest.raises(PermissionDeniedError, match="owner, publisher"):
        rule.admit(identity("tenant", "caller"), "callers")


@pytest.mark.parametrize("header", [f"Bearer {KEY}", f"bearer {KEY}", f"BEARER  {KEY} "])
def test_a_key_is_known_by_its_digest(header: str) -> None:
    assert key_digest_of(header) == hashlib.sha256(KEY.encode()).digest()


@pytest.mark.parametrize(
    "header",
    [None, b"Bearer " + KEY.encode(), "", KEY, f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Bearer {KEY} {KEY}"],
)
def test_what_is_not_of_our_form_is_no_key(header: str | bytes | None) -> None:
    assert key_digest_of(header) is None


def test_outside_of_a_call_there_is_no_identity() -> None:
    with pytest.raises(UnauthenticatedError):
        current_identity()
