"""Logprobs of prompt and output against transformers' own logits, plain and with rules that change the choice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from dataplane.engine.client import EngineClient
from dataplane.engine.config import EngineConfig
from dataplane.engine.messages import Delta, Sampling, Submit
from tests.fixtures.oracle import Setting

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore::FutureWarning:transformers")]

RULES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "seed": 4, "top_k": 5, "frequency_penalty": 0.8, "logit_bias": ((9, 4.0),)},
    {"repetition_penalty": 1.4, "min_tokens": 8, "bad_words": ((3,), (4, 5))},
)


async def _run(setting: Setting, submits: list[Submit]) -> list[list[Delta]]:
    config = EngineConfig(
        model_dir=str(setting.model), dtype="float32", max_sequences=8, max_step_tokens=48, kv_bytes=8 << 20, arena_bytes=0
    )
    client = await EngineClient.start(config, in_process=True)
    try:

        async def read(submit: Submit) -> list[Delta]:
            return [delta async for delta in client.submit(submit)]

        return list(await asyncio.gather(*map(read, submits)))
    finally:
        await client.stop()


async def test_reported_logprobs_are_the_log_softmax_of_transformers(tiny: Setting) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(8)
    prompts = [tuple(torch.randint(tiny.vocab, (length,), generator=generator).tolist()) for length in (5, 60, 131, 1)]
    submits = [
        Submit(
            request_id=f"r{i}",
            tenant="t",
            prompt=prompt,
            sampling=Sampling(**({"max_tokens": 12, "temperature": 0.0, "logprobs": 20, "prompt_logprobs": 4} | rules)),
        )
        for i, (prompt, rules) in enumerate(zip(prompts, RULES, strict=True))
    ]
    for submit, deltas in zip(submits, await _run(tiny, submits), strict=True):
        ids = [id_ for delta in deltas for id_ in delta.ids]
        tokens = [*submit.prompt, *ids]
        with torch.inference_mode():
            want = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        reported = [one for delta in deltas for one in (*delta.prompt_logprobs, *delta.logprobs)]
        assert len(reported) == len(tokens) - 1
        for place, one in enumerate(reported):
            assert one.logprob == pytest.approx(float(want[place, tokens[place + 1]]), abs=tiny.tolerance)
            assert len(one.top) == (4 if place < len(submit.prompt) - 1 else 20)
            for (token, number), best in zip(one.top, want[place].topk(len(one.top)).values.tolist(), strict=True):
                assert number == pytest.approx(float(want[place, token]), abs=tiny.tolerance)
                assert number == pytest.approx(best, abs=tiny.tolerance)
