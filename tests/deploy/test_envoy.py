from __future__ import annotations

from pathlib import Path

from veneer.client import ADAPTER_KEY_HEADER
from veneer.dataplane.v1 import generation_pb2

EXAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "envoy" / "envoy.yaml"


def test_the_example_hashes_the_header_that_the_client_sends_on_the_service_that_it_calls() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    assert f"header_name: {ADAPTER_KEY_HEADER}}}" in text
    service = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
    assert f"prefix: /{service}/}}" in text
