"""The engine end to end, over its message interface."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from dataplane.engine.client import EngineClient
from dataplane.engine.config import EngineConfig
from dataplane.engine.messages import Delta, Sampling, State, Submit
from veneer.errors import InvalidArgumentError, UnavailableError

Make = Callable[..., EngineConfig]


def request(name: str, prompt: list[int], *, max_tokens: int = 8, **fields: Any) -> Submit:
    sampling = fields.pop("sampling", Sampling(max_tokens=max_tokens, temperature=0.0))
    return Submit(request_id=name, tenant=fields.pop("tenant", "t"), prompt=tuple(prompt), sampling=sampling, **fields)


async def collect(client: EngineClient, submit: Submit) -> list[int]:
    ids: list[int] = []
    async for delta in client.submit(submit):
        assert delta.index == len(ids)
        ids += delta.ids
    return ids


def is_idle(state: State) -> bool:
    return (state.running, state.waiting, state.kv_pages_used, state.leases) == (0, 0, 0, 0)


@pytest.mark.parametrize("in_process", [True, False])
async def test_three_requests_stream_the_tokens_of_a_plain_forward_pass(
    tiny_config: Make, plain: Any, *, in_process: bool
) -> None:
    client = await EngineClient.start(tiny_config(), in_process=in_process)
    prompts = [[1, 2, 3], [40] * 20, list(range(5, 50))]
    try:
        outputs = await asyncio.gather(*(collect(client, request(str(i), prompt)) for i, prompt in enumerate(prompts)))
        assert outputs == [plain.greedy(prompt, 8) for prompt in prompts]
        assert is_idle(await client.state())
    finally:
        await client.stop()
