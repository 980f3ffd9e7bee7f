from __future__ import annotations

import pytest

from veneer.controlplane.v1 import catalog_pb2, tenants_pb2
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
