"""Who may call what: identities, the rule of each method, and the check that no method is without one."""

from __future__ import annotations

import hashlib
import ipaddress
import re
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, Protocol

from google.protobuf.descriptor import ServiceDescriptor

from veneer.errors import KEY_KIND, PermissionDeniedError, UnauthenticatedError, VeneerError

Kind = Literal["tenant", "organization", "operator", "node", "enrollment", "bearer"]
"""What a credential is. `bearer` is one that is well formed and not looked up: the method itself asks whose it is."""

ListenerName = Literal["callers", "operators"]

_LISTENER_OF_KIND: Mapping[Kind, ListenerName] = {
    "tenant": "callers",
    "organization": "callers",
    "node": "callers",
    "enrollment": "callers",
    "bearer": "callers",
    "operator": "operators",
}
_WITH_ROLES = ("tenant", "organization")
_SECRET = re.compile(r"vnr_[A-Za-z0-9_-]{43}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who calls.

    Attributes:
        kind: What the credential is.
        key_digest: SHA-256 of the credential.
        key_id: Identifier of the key, for logs; empty for `bearer`.
        tenant: Name of the tenant, for tenant keys.
        tenant_id: Identifier of the tenant's row, for tenant keys, where the authenticator knows it.
        roles: Names of the key's roles, for tenant keys: `owner`, `publisher`, `caller`, `auditor`; for keys of organisations:
            `owner`, `auditor`.
        organization: Name of the organisation, for keys of organisations.
    """

    kind: Kind
    key_digest: bytes
    key_id: str = ""
    tenant: str = ""
    tenant_id: str = ""
    roles: frozenset[str] = frozenset()
    organization: str = ""


class Authenticator(Protocol):
    """Finds the owner of a credential; each plane has its own."""

    async def authenticate(self, key_digest: bytes) -> Identity | None:
        """Returns who holds the credential with this SHA-256; None for unknown, expired and revoked ones alike.

        Raises:
            UnavailableError: It cannot be told now.
        """


@dataclass(frozen=True, slots=True)
class Rule:
    """Who may call one method.

    Attributes:
        kinds: Kinds of identity that may. A kind may only come in by its own listener: operators by `operators`, all others by
            `callers`.
        roles: For keys of tenants and organisations: at least one of these roles is needed; empty asks for none.
        open: Anyone may, on both listeners, without a credential (health, reflection).
    """

    kinds: frozenset[Kind] = frozenset()
    roles: frozenset[str] = frozenset()
    open: bool = False

    @classmethod
    def of(cls, *kinds: Kind, roles: Iterable[str] = ()) -> Rule:
        """`Rule.of("tenant", "operator", roles=["owner"])`."""
        return cls(frozenset(kinds), frozenset(roles))

    def admit(self, identity: Identity, listener: ListenerName) -> None:
        """Checks an identity that came in by a listener.

        Raises:
            PermissionDeniedError: The rule does not admit it.
        """
        if identity.kind not in self.kinds or _LISTENER_OF_KIND[identity.kind] != listener:
            raise WrongKeyError(f"this method is not for a {identity.kind} key on the {listener} listener")
        if identity.kind in _WITH_ROLES and self.roles and not self.roles & identity.roles:
            raise PermissionDeniedError(f"the key needs one of the roles {', '.join(sorted(self.roles))}")


class WrongKeyError(PermissionDeniedError):
    """Another kind of key is needed, or another listener; no role of this one helps."""

    kind = KEY_KIND


class RuleError(VeneerError):
    """The table of rules does not match the services; the start fails."""


Rules = Mapping[str, Rule]
"""Rule by full method name, e.g. `/veneer.controlplane.v1.CatalogService/Publish`."""

OPEN_RULES: Rules = {
    "/grpc.health.v1.Health/Check": Rule(open=True),
    "/grpc.health.v1.Health/Watch": Rule(open=True),
    "/grpc.health.v1.Health/List": Rule(open=True),
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": Rule(open=True),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Rule(open=True),
}

_identity: ContextVar[Identity | None] = ContextVar("identity", default=None)
_peer: ContextVar[Callable[[], str] | None] = ContextVar("peer", default=None)


def current_identity() -> Identity:
    """Who makes the call that runs in this task.

    Raises:
        UnauthenticatedError: No call runs here, or an open method does.
    """
    identity = _identity.get()
    if identity is None:
        raise UnauthenticatedError("no valid credential")
    return identity


def current_kind() -> Kind | None:
    """What the credential is of the call that runs in this task; None when no call runs."""
    identity = _identity.get()
    return None if identity is None else identity.kind


def current_actor() -> str:
    """Who makes the call that runs in this task, as logs name it: kind and identifier of the key; `service` when no call runs."""
    identity = _identity.get()
    return "service" if identity is None else f"{identity.kind} {identity.key_id}".rstrip()


def set_identity(identity: Identity) -> None:
    """States who makes the call that runs in this task. For the interceptor, and for tests of use cases."""
    _identity.set(identity)


def set_peer(peer: Callable[[], str]) -> None:
    """States where the call that runs in this task comes from, as gRPC tells it when asked. For the interceptor."""
    _peer.set(peer)


def current_peer() -> str:
    """Address that the call of this task comes from, without its port; of IPv6 the network of 64 bits. Empty: no call runs."""
    peer = _peer.get()
    return "" if peer is None else _host_of(peer())


def _host_of(peer: str) -> str:
    """E.g. `ipv4:192.0.2.1` of `ipv4:192.0.2.1:4711`; what is no such address is one peer as it is."""
    kind, _, rest = urllib.parse.unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return kind
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    if kind == "ipv4":
        return f"ipv4:{host}"
    try:
        return f"ipv6:{ipaddress.IPv6Network((host, 64), strict=False)}"
    except ValueError:
        return peer


def key_digest_of(authorization: str | bytes | None) -> bytes | None:
    """SHA-256 of the credential in an `authorization` header, or None when there is none or it is not of our form."""
    if not isinstance(authorization, str):
        return None
    scheme, _, secret = authorization.partition(" ")
    if scheme.lower() != "bearer" or not _SECRET.fullmatch(secret.strip()):
        return None
    return hashlib.sha256(secret.strip().encode()).digest()


def method_names(services: Iterable[ServiceDescriptor]) -> frozenset[str]:
    """Full names of all methods of the services."""
    return frozenset(f"/{service.full_name}/{method.name}" for service in services for method in service.methods)


def check_rules(rules: Rules, services: Iterable[ServiceDescriptor]) -> None:
    """Checks that every served method has a rule and every rule a method.

    Raises:
        RuleError: With the names of those that lack the other.
    """
    served = method_names(services)
    without_rule, without_method = sorted(served - rules.keys()), sorted(rules.keys() - served)
    unusable = sorted(name for name, rule in rules.items() if not rule.open and not rule.kinds)
    faults = [f"no rule for {name}" for name in without_rule]
    faults += [f"rule for {name}, which is not served" for name in without_method]
    faults += [f"rule for {name} admits nobody" for name in unusable]
    if faults:
        raise RuleError("; ".join(faults))
