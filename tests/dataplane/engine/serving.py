"""Requests to a real engine over its message interface, and what comes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from dataplane.engine.client import EngineClient
from dataplane.engine.config import EngineConfig
from dataplane.engine.messages import Delta, Sampling, State, Submit

Make = Callable[..., EngineConfig]
PROMPTS = [[1, 2, 3], [40] * 20, list(range(5, 50)), [7], [99, 98, 97, 96, 95]]


def request(name: str, prompt: list[int], *, max_tokens: int = 8, **fields: Any) -> Submit:
    sampling = fields.pop("sampling", Sampling(max_tokens=max_tokens, temperature=0.0))
    return Submit(request_id=name, tenant=fields.pop("tenant", "t"), prompt=tuple(prompt), sampling=sampling, **fields)


async def collect(client: EngineClient, submit: Submit) -> list[int]:
    ids: list[int] = []
    async for delta in client.submit(submit):
        assert delta.index == len(ids)
        ids += delta.ids
    return ids


async def collect_deltas(client: EngineClient, submit: Submit) -> list[Delta]:
    return [delta async for delta in client.submit(submit)]


async def idle(client: EngineClient) -> State:
    """Waits until nothing is held: the step in flight holds what it uses a little longer than the last answer."""
    return await until(client, lambda state: not (state.running or state.waiting or state.kv_pages_used or state.leases))


async def until(client: EngineClient, condition: Callable[[State], bool]) -> State:
    async with asyncio.timeout(120):
        while not condition(state := await client.state()):
            pass
    return state
