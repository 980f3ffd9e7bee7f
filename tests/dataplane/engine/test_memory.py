"""The memory plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dataplane.engine.config import EngineConfig
from dataplane.engine.memory import DoesNotFitError, available_bytes, check_fits, plan_memory

Make = Callable[..., EngineConfig]


def test_the_plan_counts_weights_and_pages_exactly(tiny_config: Make, plain: Any) -> None:
    plan = plan_memory(tiny_config(), plain.config)
    elements = sum(weight.numel() for weight in plain.weights.values())
    assert plan.weights == 4 * (elements + plain.weights["model.embed_tokens.weight"].numel())
    page = 2 * 2 * 16 * 32 * 4
    assert plan.num_pages == (1 << 20) // page - 1
    assert plan.kv == 1 << 20
    assert plan.max_context == 256


def test_the_context_is_cut_to_what_all_pages_hold(tiny_config: Make, plain: Any) -> None:
    page = 2 * 2 * 16 * 32 * 4
    assert plan_memory(tiny_config(kv_bytes=5 * page), plain.config).max_context == 64
    assert plan_memory(tiny_config(max_context=40), plain.config).max_context == 40
    with pytest.raises(DoesNotFitError, match="kv_bytes"):
        plan_memory(tiny_config(kv_bytes=page), plain.config)


def test_a_plan_beyond_the_memory_is_refused_with_its_table(tiny_config: Make, plain: Any) -> None:
    plan = plan_memory(tiny_config(), plain.config)
    check_fits(plan, plan.total)
    check_fits(plan, None)
    with pytest.raises(DoesNotFitError, match="KV pages"):
        check_fits(plan, plan.total - 1)


def test_the_machine_says_what_it_has() -> None:
    available = available_bytes(torch.device("cpu"))
    assert available is not None
    assert available > 1 << 20
