"""Errors of `veneer.errors` as gRPC statuses with details, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from veneer import errors
from veneer.errors import VeneerError, Violation

_DETAILS_KEY = "grpc-status-details-bin"
_DOMAIN = "veneer"
"""Of `google.rpc.ErrorInfo`: whose reasons they are."""
_PUSHBACK_KEY = "grpc-retry-pushback-ms"

# A gRPC client refuses trailers above 8 KiB unless told otherwise, and then shows none of them. The message travels twice (once
# percent-encoded) and the details grow by a third as base64, hence these budgets.
_MAX_MESSAGE_BYTES = 700
_MAX_VIOLATION_BYTES = 2700

_RESET = "Stream removed"
"""How gRPC 1.85's details begin where the transport ended a call: a reset, a GOAWAY, a connection that closed."""

_FAMILIES: dict[str, type[VeneerError]] = {
    family.status: family
    for family in (
        errors.InvalidArgumentError,
        errors.UnauthenticatedError,
        errors.PermissionDeniedError,
        errors.NotFoundError,
        errors.AlreadyExistsError,
        errors.AbortedError,
        errors.FailedPreconditionError,
        errors.ResourceExhaustedError,
        errors.DeadlineExceededError,
        errors.UnavailableError,
        errors.InternalError,
        errors.DataLossError,
    )
}


def code_of(error: VeneerError) -> grpc.StatusCode:
    """The status code of an error's family."""
    return grpc.StatusCode[error.status]


def message_of(error: VeneerError) -> str:
    """The error's message, cut to what trailers can carry; every violation has a place of its own in the details."""
    return _cut(error.message, _MAX_MESSAGE_BYTES)


def trailers_of(error: VeneerError) -> tuple[tuple[str, str | bytes], ...]:
    """Trailing metadata: `google.rpc.Status` with its details, and the pushback that gRPC clients obey."""
    kind = error.kind or (errors.ANSWERED if isinstance(error, errors.UnavailableError) else "")
    if not error.violations and error.retry_after_s is None and not kind:
        return ()
    status = status_pb2.Status(code=code_of(error).value[0], message=message_of(error))
    trailers: list[tuple[str, str | bytes]] = []
    if kind:
        status.details.add().Pack(error_details_pb2.ErrorInfo(reason=kind, domain=_DOMAIN))
    if error.violations:
        detail = _quota_failure if isinstance(error, errors.ResourceExhaustedError) else _bad_request
        status.details.add().Pack(detail(error.violations))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(math.ceil(error.retry_after_s * 1000))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        trailers.append((_PUSHBACK_KEY, str(delay.ToMilliseconds())))
    trailers.append((_DETAILS_KEY, status.SerializeToString()))
    return tuple(trailers)


def error_of(call: grpc.aio.AioRpcError) -> VeneerError:
    """The error that the other side raised, with its violations and retry delay.

    A call that the transport ended is UNAVAILABLE. Codes without a family (UNIMPLEMENTED, UNKNOWN …) give a plain `VeneerError`
    that names the code.
    """
    code, message = call.code(), call.details() or ""
    if ended_by_transport(call):
        return errors.UnavailableError(f"the connection ended the call: {message or code.name}")
    violations: list[Violation] = []
    retry_after_s = None
    kind = ""
    for any_detail in _status(call).details:
        bad_request, retry, quota, info = (
            error_details_pb2.BadRequest(),
            error_details_pb2.RetryInfo(),
            error_details_pb2.QuotaFailure(),
            error_details_pb2.ErrorInfo(),
        )
        if any_detail.Unpack(bad_request):
            violations += [Violation(one.field, one.description) for one in bad_request.field_violations]
        elif any_detail.Unpack(quota):
            violations += [Violation(one.subject, one.description) for one in quota.violations]
        elif any_detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
        elif any_detail.Unpack(info) and info.domain == _DOMAIN:
            kind = info.reason
    family = _FAMILIES.get(code.name)
    error = (family or VeneerError)(message or code.name, violations=violations, retry_after_s=retry_after_s)
    if kind:
        error.kind = kind
    if family is None:
        error.status = code.name
    return error


def ended_by_transport(call: grpc.aio.AioRpcError) -> bool:
    """Whether gRPC ended a call without a word of the plane: the stream was reset, the server stopped or its process ended.

    gRPC gives such calls the code that the HTTP/2 error suggests (CANCELLED, INTERNAL, RESOURCE_EXHAUSTED, UNKNOWN …). No plane
    answers CANCELLED, and a call that its own caller cancels raises `asyncio.CancelledError`.
    """
    code = call.code()
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return False  # it says so itself
    return code is grpc.StatusCode.CANCELLED or (call.details() or "").startswith(_RESET)


def _bad_request(violations: Sequence[Violation]) -> error_details_pb2.BadRequest:
    """As many violations as fit, and a last one that counts the rest."""
    bad_request = error_details_pb2.BadRequest()
    for index, violation in enumerate(violations):
        field, description = _cut(violation.field, 300), _cut(violation.description, 600)
        bad_request.field_violations.add(field=field, description=description)
        if bad_request.ByteSize() > _MAX_VIOLATION_BYTES:
            del bad_request.field_violations[index:]
            rest = f"and {len(violations) - index} more violations that do not fit into the answer"
            bad_request.field_violations.add(field="", description=rest)
            break
    return bad_request


def _quota_failure(violations: Sequence[Violation]) -> error_details_pb2.QuotaFailure:
    """The quotas that are used up; there are few."""
    failure = error_details_pb2.QuotaFailure()
    for violation in violations[:3]:
        failure.violations.add(subject=_cut(violation.field, 300), description=_cut(violation.description, 600))
    return failure


def _status(call: grpc.aio.AioRpcError) -> status_pb2.Status:
    # Not rpc_status.from_call: it raises when code or message differ, which a proxy on the way may cause.
    for key, value in call.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                break
    return status_pb2.Status()


def _cut(text: str, max_bytes: int) -> str:
    encoded = text.encode(errors="replace")
    return text if len(encoded) <= max_bytes else encoded[: max_bytes - 3].decode(errors="ignore") + "…"
