"""What is reported of a prompt's and an answer's tokens, through the engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from dataplane.engine.client import EngineClient
from dataplane.engine.messages import Sampling
from tests.dataplane.engine.serving import Make, collect, collect_deltas, idle, request


@pytest.mark.parametrize("in_process", [True, False])
async def test_logprobs_of_prompt_and_output_are_the_models_own(tiny_config: Make, plain: Any, in_process: bool) -> None:
    client = await EngineClient.start(tiny_config(), in_process=in_process)
    prompt = [int(token) for token in torch.randint(160, (150,), generator=torch.Generator().manual_seed(3))]
    sampling = Sampling(max_tokens=5, temperature=0.0, logprobs=2, prompt_logprobs=3, frequency_penalty=0.5)
    neighbours = [asyncio.create_task(collect(client, request(f"n{i}", prompt[: 20 + i], max_tokens=30))) for i in range(3)]
    deltas = await collect_deltas(client, request("scored", prompt, sampling=sampling))
    ids = [id_ for delta in deltas for id_ in delta.ids]
    want = plain.logits([*prompt, *ids]).log_softmax(-1)
    scores = deltas[0].prompt_logprobs
    assert not any(delta.prompt_logprobs for delta in deltas[1:])
    assert [one.logprob for one in scores] == pytest.approx([float(want[i, prompt[i + 1]]) for i in range(149)], abs=1e-3)
    assert [[token for token, _ in one.top] for one in scores] == want[:149].topk(3).indices.tolist()
    reported = [one for delta in deltas for one in delta.logprobs]
    assert [one.logprob for one in reported] == pytest.approx([float(want[149 + i, id_]) for i, id_ in enumerate(ids)], abs=1e-3)
    assert all(len(one.top) == 2 for one in reported)
    for i, neighbour in enumerate(neighbours):
        assert await neighbour == plain.greedy(prompt[: 20 + i], 30)
    await idle(client)
    await client.stop()


async def test_scores_are_whole_after_a_preemption(tiny_config: Make, plain: Any) -> None:
    """Two long prompts share few pages: one is sent back while it is scored or later, and reports every token once."""
    page = 16
    client = await EngineClient.start(tiny_config(kv_bytes=(11 + 1) * 2 * 2 * page * 32 * 4, max_context=170), in_process=True)
    prompts = [[int(t) for t in torch.randint(160, (70,), generator=torch.Generator().manual_seed(i))] for i in range(2)]
    sampling = Sampling(max_tokens=60, temperature=0.0, prompt_logprobs=0, logprobs=0)
    runs = await asyncio.gather(
        *(collect_deltas(client, request(f"r{i}", prompt, sampling=sampling)) for i, prompt in enumerate(prompts))
    )
    for prompt, deltas in zip(prompts, runs, strict=True):
        ids = [id_ for delta in deltas for id_ in delta.ids]
        assert ids == plain.greedy(prompt, 60)
        want = plain.logits(prompt).log_softmax(-1)
        scores = [one.logprob for delta in deltas for one in delta.prompt_logprobs]
        assert scores == pytest.approx([float(want[i, prompt[i + 1]]) for i in range(69)], abs=1e-3)
        assert sum(len(delta.logprobs) for delta in deltas) == 60
    await client.stop()


@pytest.mark.parametrize("size", [32, 33, 65])
async def test_scores_of_a_prompt_are_told_whatever_its_last_step_holds(tiny_config: Make, plain: Any, size: int) -> None:
    """The last step of a prompt may hold its last token alone, after which nothing is left to score."""
    client = await EngineClient.start(tiny_config(max_step_tokens=32), in_process=True)
    prompt = [int(token) for token in torch.randint(160, (size,), generator=torch.Generator().manual_seed(size))]
    sampling = Sampling(max_tokens=3, temperature=0.0, prompt_logprobs=0)
    deltas = await collect_deltas(client, request("scored", prompt, sampling=sampling))
    want = plain.logits(prompt).log_softmax(-1)
    scores = [one.logprob for one in deltas[0].prompt_logprobs]
    assert scores == pytest.approx([float(want[i, prompt[i + 1]]) for i in range(size - 1)], abs=1e-3)
    assert not any(delta.prompt_logprobs for delta in deltas[1:])
    await client.stop()
