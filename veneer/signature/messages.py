"""Policies, trusted keys and reports as messages, and back: the same on both planes, in the client and offline."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import datetime

from google.protobuf.timestamp_pb2 import Timestamp

from veneer.controlplane.v1 import signatures_pb2 as pb
from veneer.signature.keys import TrustedKey
from veneer.signature.policy import Policy, SignatureReport


def policy_value(policy: Policy) -> pb.SignaturePolicy.ValueType:
    """A policy as the API numbers it."""
    return pb.SignaturePolicy.Value(f"SIGNATURE_POLICY_{policy.value}")


def policy_of(value: pb.SignaturePolicy.ValueType) -> Policy:
    """A policy from its number. One that is not known asks for the most: whoever set it knew of more than we do."""
    if value == pb.SIGNATURE_POLICY_UNSPECIFIED:
        return Policy.OFF
    if value not in pb.SignaturePolicy.values():
        return Policy.REQUIRE
    return Policy(pb.SignaturePolicy.Name(value).removeprefix("SIGNATURE_POLICY_"))


def key_message(key: TrustedKey, create_time: datetime | None = None) -> pb.TrustedKey:
    """A trusted key as a message."""
    message = pb.TrustedKey(
        id=key.id,
        name=key.name,
        kind=pb.TrustedKeyKind.Value(f"TRUSTED_KEY_KIND_{key.kind}"),
        algorithm=key.algorithm,
        subject=key.subject,
        pem=key.pem,
    )
    if create_time is not None:
        message.create_time.CopyFrom(timestamp_of(create_time))
    return message


def trust_message(policy: Policy, keys: Sequence[TrustedKey], *, signature: bytes, publish_time: datetime) -> pb.SignatureTrust:
    """What a signature is judged by, as a message."""
    return pb.SignatureTrust(
        policy=policy_value(policy),
        signature=signature,
        keys=map(key_message, keys),
        publish_time=timestamp_of(publish_time),
    )


def report_message(report: SignatureReport) -> pb.SignatureReport:
    """What was found of a signature, as a message."""
    fields = dataclasses.asdict(report)
    fields["state"] = pb.SignatureState.Value(f"SIGNATURE_STATE_{report.state}")
    fields["reason"] = pb.SignatureReason.Value(f"SIGNATURE_REASON_{report.reason or 'UNSPECIFIED'}")
    return pb.SignatureReport(**fields)


def timestamp_of(time: datetime) -> Timestamp:
    """A time as a message."""
    message = Timestamp()
    message.FromDatetime(time)
    return message
