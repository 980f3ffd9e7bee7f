"""Plans on tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dataplane.engine.config import EngineConfig
from dataplane.engine.forms import model_sites
from dataplane.engine.kv_cache import PagePool
from dataplane.engine.limits import Limits
from dataplane.engine.memory import plan_memory
from dataplane.engine.messages import Sampling, Submit
from dataplane.engine.plan import Plan
from dataplane.engine.runner import Runner, model_features
from dataplane.engine.scheduler import Scheduler
from dataplane.lora.residency import Residency
from tests.dataplane.engine.driving import rows_of

Make = Callable[..., EngineConfig]
PROMPTS = [[1, 2, 3], [40] * 20, list(range(5, 50)), [7]]


class NoAdapters(Residency):
    def __init__(self) -> None:
        super().__init__(1, num_units=1, unit_bytes=128)

    def is_starved(self, version: str) -> bool:
        return False

    def arrived(self) -> dict[str, int]:
        return {}


def build(config: EngineConfig, model: Any) -> tuple[Scheduler, Runner]:
    memory = plan_memory(config, model)
    limits = Limits(
        max_sequences=config.max_sequences, max_step_tokens=config.max_step_tokens, max_step_rank_rows=64,
        max_context=memory.max_context, max_waiting=100,
    )  # fmt: skip
    scheduler = Scheduler(limits, PagePool(memory.num_pages, config.page_size), NoAdapters())  # type: ignore[arg-type]
    return scheduler, Runner(config, model, memory)


def submit(name: str, prompt: list[int], **fields: Any) -> Submit:
    sampling = Sampling(**({"max_tokens": 12, "temperature": 0.0} | fields))
    return Submit(request_id=name, tenant="t", prompt=tuple(prompt), sampling=sampling)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("step_tokens", [8, 32])
def test_a_step_planned_before_the_last_one_is_committed_gives_the_same_tokens(
    tiny_config: Make, plain: Any, lag: int, step_tokens: int
) -> None:
    scheduler, runner = build(tiny_config(max_step_tokens=step_tokens), plain.config)
    for i, prompt in enumerate(PROMPTS):
        scheduler.add(submit(str(i), prompt), 0.0)
    outputs: dict[str, list[int]] = {}
    uncommitted: deque[tuple[Plan, list[int | None]]] = deque()
    while (plan := scheduler.schedule()) or uncommitted:
        if plan is not None:
            uncommitted.append((plan, runner.run(plan)))
        if len(uncommitted) > lag or plan is None:
            for delta in scheduler.commit(*uncommitted.popleft()).tokens.deltas():
                outputs.setdefault(delta.request_id, []).extend(delta.ids)
    assert [outputs[str(i)] for i in range(4)] == [plain.greedy(prompt, 12) for prompt in PROMPTS]
    assert scheduler.num_pages_used == 0


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.4), ("float16", 0.05), ("float32", 1e-3)])
def test_every_dtype_chooses_tokens_that_are_the_likeliest_within_its_precision(
    tiny_config: Make, plain: Any, dtype: str, tolerance: float
) -> None:
    scheduler, runner = build(tiny_config(dtype=dtype), plain.config)
    for i, prompt in enumerate(PROMPTS):
        scheduler.add(submit(str(i), prompt, max_tokens=6), 0.0)
    tokens = {str(i): list(prompt) for i, prompt in enumerate(PROMPTS)}
    while (plan := scheduler.schedule()) is not None:
        for delta in scheduler.commit(plan, runner.run(plan)).tokens.deltas():
            logits = plain.logits(tokens[delta.request_id])[-1]
            assert logits.max() - logits[delta.ids[0]] <= tolerance * logits.std()
            tokens[delta.request_id] += delta.ids


def test_a_page_is_cleared_when_it_is_handed_out(tiny_config: Make, plain: Any) -> None:
    scheduler, runner = build(tiny_config(), plain.config)
    runner.kv.data.fill_(float("nan"))
    scheduler.add(submit("a", [1, 2, 3], max_tokens=1), 0.0)
    plan = scheduler.schedule()
    assert plan is not None
    runner.run(plan)
    (page,) = plan.rows[0].new_pages
    assert runner.kv.data[page].isfinite().all()
    assert runner.kv.data[page].ne(0).sum() == runner.kv.data[page].numel() * 3 // 16  # three tokens of sixteen


def test_the_step_never_writes_page_zero(tiny_config: Make, plain: Any) -> None:
    scheduler, runner = build(tiny_config(), plain.config)
    for i, prompt in enumerate(PROMPTS):
        scheduler.add(submit(str(i), prompt, max_tokens=20), 0.0)
    while (plan := scheduler.schedule()) is not None:
        scheduler.commit(plan, runner.run(plan))
    assert runner.kv.data[0].eq(0).all()


def test_each_site_has_one_base_product_over_all_rows(tiny_config: Make, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, runner = build(tiny_config(max_step_tokens=16), plain.config)
    counts: list[int] = []
    product = torch.nn.functional.linear

    def count(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        counts.append(len(x))
        return product(x, weight, bias)

    monkeypatch.setattr("dataplane.model.linear.F.linear", count)
    scheduler.add(submit("a", [1]), 0.0)
    first = scheduler.schedule()
    assert first is not None
    scheduler.commit(first, runner.run(first))
    for i, prompt in enumerate(PROMPTS):
        scheduler.add(submit(str(i), prompt), 0.0)
    plan = scheduler.schedule()
    assert plan is not None
    assert {rows.count > 1 for rows in rows_of(plan)} == {True, False}
    counts.clear()
    runner.run(plan)
    sampled = sum(rows.sampling is not None for rows in rows_of(plan))
    assert counts == [16] * 4 * plain.config.num_layers + [sampled]


def test_slices_follow_the_order_of_the_module_table(plain: Any) -> None:
    assert [index for site in model_sites(plain.config) for index in site.slices] == list(range(7))
    assert model_features(plain.config) == ((64, 64), (64, 32), (64, 32), (64, 64), (64, 96), (64, 96), (96, 64))
