"""The codec between the processes."""

from __future__ import annotations

import pytest

from dataplane.engine.codec import decode, encode
from dataplane.engine.messages import (
    Abort,
    Fail,
    Failed,
    Holding,
    Logprobs,
    Moved,
    NotFinite,
    Query,
    Ready,
    Sampling,
    Stage,
    State,
    Stop,
    Submit,
    Tokens,
    Unloaded,
    Unstage,
    Wanted,
)

MESSAGES = [
    Submit(request_id="é", tenant="t", prompt=(1, 2), sampling=Sampling(max_tokens=3, stop_token_ids=(7,)), version="v"),
    Abort("a"),
    Stage("v", "/tmp/x"),
    Unstage("v", drop_device=True),
    Fail("v", "NOT_FOUND", "gone"),
    Query(4),
    Stop(),
    Tokens(
        ("a", "b"), (0, 1), (5, 6), (2, 9),
        ((1, "stop", 4),), ((0, Logprobs(-0.5, ((5, -0.5),))),), ((0, (Logprobs(-1.0), Logprobs(-2.0))),),
    ),
    Failed("a", "INTERNAL", "two\nlines"),
    Failed("a", "FAILED_PRECONDITION", "too large", is_tenants_limit=True),
    Wanted("v"),
    Moved("v", "device", 0.25, rank=8, size_bytes=100, epoch=3),
    Moved("v", "host", reason="room"),
    Moved("v", "opened", 0.5, rank=8, size_bytes=100),
    Unloaded("v", 1, 2, 3, came_back=True, num_asked=2),
    NotFinite(None, "a"),
    State(
        token=1, running=2, waiting=3, kv_pages_used=4, kv_pages_total=5, arena_bytes_used=6, arena_bytes_total=7, leases=8,
        steps=9, max_adapters_in_step=10, max_rows_in_step=11, mixed_steps=12, generated_tokens=13, device_hits=14,
        host_hits=15, store_loads=16, evictions=17, holdings=(Holding("v", "host", 8, 100, 1, 2),),
        kv_pages_kept=18, prefix_queries=19, prefix_hits=20,
        waiting_by_reason={"image": 21}, queue_counts=(22, 23), queue_seconds=24.5,
        rank_row_counts=(25, 26), rank_rows=27, disk_hits=28, seconds=(("run", 2.5),),
    ),
    Ready(("line", "line"), 256, 160, "why it is slower"),
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_one_line(message: object) -> None:
    line = encode(message)  # type: ignore[arg-type]
    assert line.count(b"\n") == 1
    assert decode(line) == message


@pytest.mark.parametrize(
    "line", [b"", b"{", b'["Nothing",{}]', b'["Abort",{}]', b'["Abort",{"request_id":"a","more":1}]', b"[1]"]
)
def test_anything_else_is_no_message(line: bytes) -> None:
    with pytest.raises(ValueError, match="not an engine message"):
        decode(line)
