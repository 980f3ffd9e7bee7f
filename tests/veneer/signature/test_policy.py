"""What a policy makes of a signature, or of none."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import pytest

from tests.fixtures.signing import NOW, Signer
from veneer.signature import Policy, Reason, SignatureError, SignatureReport, judge

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}
DIGESTS = {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()}


@pytest.mark.parametrize("policy", Policy)
def test_a_signature_that_holds_is_reported_under_every_policy(policy: Policy) -> None:
    signer = Signer()

    report = judge(policy, signer.sign(FILES), [signer.trusted], DIGESTS, at=NOW)

    assert report == SignatureReport(state="VERIFIED", key_id=signer.trusted.id, key_name="trainer")
    assert SignatureReport.from_fields(json.loads(json.dumps(dataclasses.asdict(report)))) == report


@pytest.mark.parametrize(
    ("policy", "missing", "unknown"),
    [
        (Policy.OFF, None, None),
        (Policy.IF_PRESENT, None, Reason.UNKNOWN_KEY),
        (Policy.REQUIRE, Reason.MISSING, Reason.UNKNOWN_KEY),
    ],
)
def test_a_policy_refuses_what_it_must(policy: Policy, missing: Reason | None, unknown: Reason | None) -> None:
    for data, reason in ((b"", missing), (Signer().sign(FILES), unknown)):
        if reason is None:
            report = judge(policy, data, [], DIGESTS, at=NOW)
            assert (report.reason if report else "") == ("UNKNOWN_KEY" if data else "")
        else:
            with pytest.raises(SignatureError) as refused:
                judge(policy, data, [], DIGESTS, at=NOW)
            assert refused.value.reason is reason
