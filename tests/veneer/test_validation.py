from __future__ import annotations

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from veneer.controlplane.v1 import bases_pb2, catalog_pb2, nodes_pb2, tenants_pb2
from veneer.dataplane.v1 import generation_pb2 as pb
from veneer.errors import InvalidArgumentError
from veneer.validation import validate


def test_a_message_within_its_rules_passes() -> None:
    validate(pb.GenerateRequest(text="hello", sampling=pb.SamplingParams(max_tokens=1, temperature=0)))


def test_paths_name_the_field_and_its_place_in_lists() -> None:
    message = pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user"), pb.ChatMessage(role="robot")]))
    with pytest.raises(InvalidArgumentError) as caught:
        validate(message)
    assert [violation.field for violation in caught.value.violations] == ["chat.messages[1].role"]


def test_a_missing_oneof_is_named() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        validate(catalog_pb2.PublishRequest())
    assert caught.value.violations[0].field == "content"


def test_the_message_lists_every_violation() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        validate(tenants_pb2.CreateKeyRequest(tenant="x" * 64, label="y" * 101))
    assert len(caught.value.violations) == 3
    assert all(violation.field in caught.value.message for violation in caught.value.violations)


def test_every_text_of_the_control_plane_with_a_nul_character_and_every_time_that_is_none_is_named() -> None:
    header = catalog_pb2.PublishHeader(adapter="a", base="b\0", request_id="1", labels={"team\0": "x", "b": "y"})
    entry = nodes_pb2.UsageEntry(tenant="acme", hour=Timestamp(seconds=3600, nanos=-1))
    base = bases_pb2.Base(known_names=["good", "b\0d"])
    for message, fields in (
        (catalog_pb2.PublishRequest(header=header), {"header.base", "header.labels"}),
        (nodes_pb2.ReportUsageRequest(journal="f" * 32, entries=[entry]), {"entries.hour.nanos"}),
        (bases_pb2.RegisterBaseRequest(base=base), {"base.known_names"}),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            validate(message)
        assert fields <= {violation.field for violation in caught.value.violations}


def test_a_prompt_may_hold_a_nul_character() -> None:
    validate(pb.GenerateRequest(text="a\0b", sampling=pb.SamplingParams(max_tokens=1, temperature=0)))
