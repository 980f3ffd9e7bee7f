"""What requests about keys and organisations leave to be read: whose they are, and for how long."""

from __future__ import annotations

from datetime import timedelta

from controlplane.organizations import NO_ORGANIZATION
from veneer.access import current_identity
from veneer.controlplane.v1 import organizations_pb2, tenants_pb2
from veneer.errors import InvalidArgumentError, NotFoundError, Violation

_MAX_LIFETIME = timedelta(days=3650)
_OVERLAP = timedelta(days=1)

_Rotation = tenants_pb2.RotateKeyRequest | organizations_pb2.RotateOrganizationKeyRequest
_Creation = tenants_pb2.CreateKeyRequest | organizations_pb2.CreateOrganizationKeyRequest


def organization_of(named: str) -> str:
    """The organisation that a call is about: the caller's own, or the one that an operator names, if any.

    Raises:
        NotFoundError: An organisation names another one, which may exist or not.
    """
    own = current_identity().organization
    if own and named not in ("", own):
        raise NotFoundError(NO_ORGANIZATION)
    return own or named


def overlap_of(request: _Rotation) -> timedelta:
    """How long a key works on that is rotated."""
    return request.overlap.ToTimedelta() if request.HasField("overlap") else _OVERLAP


def lifetime_of(request: _Creation | _Rotation) -> timedelta | None:
    """How long a new key lives; None where the request does not say.

    Raises:
        InvalidArgumentError: It is too long.
    """
    if not request.HasField("lifetime"):
        return None
    duration = request.lifetime
    # Seconds are compared first: a Duration may hold more than a timedelta can.
    if duration.seconds > _MAX_LIFETIME.total_seconds():
        raise InvalidArgumentError.of([Violation("lifetime", f"must be at most {_MAX_LIFETIME.days} days")])
    return duration.ToTimedelta()
