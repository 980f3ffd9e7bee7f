"""The memory plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dataplane.engine import memory
from dataplane.engine.config import EngineConfig
from dataplane.engine.forms import find_native
from dataplane.engine.memory import DoesNotFitError, available_bytes, check_fits, huge_pages_line, plan_memory
from kernels.native import Native

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


def test_the_plan_counts_what_the_chosen_form_gathers(tiny_config: Make, plain: Any) -> None:
    changes = {"max_step_rank_rows": 256, "max_rank": 64, "max_sequences": 8, "max_step_tokens": 32}

    def workspace(**more: Any) -> int:
        return plan_memory(tiny_config(**changes, **more), plain.config).workspace

    rank_rows = 256 * 2 * (64 + 64 + 2 * (64 + 32) + 64 + 64 + 3 * (64 + 96)) * 4
    page = 2 * 16 * 32 * 4  # of one layer
    assert workspace(cpu_form="torch") - workspace(cpu_form="torch", arena_bytes=0) == rank_rows
    least = workspace(cpu_form="torch", batch_invariant=True)
    assert workspace(cpu_form="torch") - least == rank_rows + 2 * 7 * 16 * page
    if isinstance(find_native(tiny_config(), plain.config), Native):
        assert workspace() == workspace(arena_bytes=0) + 32 * 3 * 64 * 4
        assert least - workspace(arena_bytes=0) == 2 * 16 * page


def test_huge_pages_are_counted_where_the_kernel_tells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rollup = tmp_path / "smaps_rollup"
    monkeypatch.setattr(memory, "_ROLLUP", rollup)
    assert huge_pages_line() == "huge pages      unknown"
    rollup.write_text("Rss:   3000 kB\nAnonymous:    2048 kB\nAnonHugePages:    1024 kB\n")
    assert huge_pages_line() == "huge pages             1.0 MiB  of 2.0 MiB held so far"


def test_the_machine_says_what_it_has() -> None:
    available = available_bytes(torch.device("cpu"))
    assert available is not None
    assert available > 1 << 20


def test_a_device_holds_captured_steps_and_a_page_for_rows_that_pad(
    tiny_config: Make, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = SimpleNamespace(name="Card", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    on_cpu, on_device = (plan_memory(tiny_config(device=device, cpu_form="torch"), plain.config) for device in ("cpu", "cuda"))
    assert (on_cpu.graphs, on_cpu.num_spare, on_device.num_spare) == (0, 1, 2)
    assert on_device.num_pages == on_cpu.num_pages - 1
    assert on_device.kv == on_cpu.kv
    without_adapters = plan_memory(tiny_config(device="cuda", arena_bytes=0), plain.config)
    assert on_device.graphs - without_adapters.graphs == 2 * 4 * (4 << 20), "two variants more of buckets 1, 2, 4 and 8"
    assert on_device.workspace > without_adapters.workspace
    assert sum("graphs" in line for line in on_device.lines(None)) == 1
    assert on_device.total == sum((on_device.weights, on_device.workspace, on_device.arena, on_device.kv, on_device.graphs))


def test_in_fp8_the_plan_says_so_and_takes_the_same_scratch(
    tiny_config: Make, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = SimpleNamespace(name="Card", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    wide, narrow = (plan_memory(tiny_config(device="cuda", adapter_dtype=dtype), plain.config) for dtype in ("model", "fp8"))
    assert (wide.workspace, wide.arena) == (narrow.workspace, narrow.arena)
    (line,) = (line for line in narrow.lines(None) if line.startswith("adapter arena"))
    assert line.endswith("MiB  fp8")


def test_the_memory_of_a_device_is_what_its_driver_says_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (7 << 30, 80 << 30))
    assert available_bytes(torch.device("cuda")) == 7 << 30
