"""Faults planted one at a time: the comparison of test_mixed_batch must see each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.cpu import CpuLowRank
from kernels.descriptors import Descriptors
from kernels.rows import RankRows
from tests.fixtures.oracle import MixedBatches, Row, Setting, compare, mixed_rows, random_rows, save_peft_adapter
from veneer.artifact import Limits

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:peft"),
]

Plant = Callable[[pytest.MonkeyPatch, Descriptors], None]


def _adapter_ignored(patch: pytest.MonkeyPatch, table: Descriptors) -> None:
    patch.setattr(CpuLowRank, "add_", lambda self, y, x, *, layer, site: None)


def _scale_dropped(patch: pytest.MonkeyPatch, table: Descriptors) -> None:
    patch.setattr(table, "scale", np.ones_like(table.scale))


def _neighbours_rows(patch: pytest.MonkeyPatch, table: Descriptors) -> None:
    begin = CpuLowRank.begin_step

    def rolled(self: CpuLowRank, rows: RankRows) -> None:
        begin(self, dataclasses.replace(rows, row_slot=np.roll(rows.row_slot, 1)))

    patch.setattr(CpuLowRank, "begin_step", rolled)


def _one_site_missing(patch: pytest.MonkeyPatch, table: Descriptors) -> None:
    add = CpuLowRank.add_

    def without_down(self: CpuLowRank, y: torch.Tensor, x: torch.Tensor, *, layer: int, site: str) -> None:
        if site != "down":
            add(self, y, x, layer=layer, site=site)

    patch.setattr(CpuLowRank, "add_", without_down)


def _rank_cut(patch: pytest.MonkeyPatch, table: Descriptors) -> None:
    patch.setattr(table, "rank", np.minimum(table.rank, 48))


MUTANTS = {
    plant.__name__.strip("_"): plant
    for plant in (
        _adapter_ignored,
        _scale_dropped,
        _neighbours_rows,
        _one_site_missing,
        _rank_cut,
    )
}


def _forget(ours: MixedBatches) -> None:
    """Makes the low-rank form gather everything again, from the descriptors as they are now."""
    for slot in ours.slots.values():
        ours.runner._low_rank.invalidate(slot)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_seen(tiny: Setting, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = mixed_rows(tiny, seed=1)
    theirs = tiny.theirs.logits(rows)
    try:
        with monkeypatch.context() as patch:
            MUTANTS[name](patch, tiny.ours.runner.arena.descriptors)
            _forget(tiny.ours)
            mutant = compare(tiny.ours.logits(rows, chunk=7), theirs, tolerance=tiny.tolerance)
    finally:
        _forget(tiny.ours)
    assert mutant.largest_error > 10 * tiny.tolerance
    assert mutant.wrong_tokens > 0
    assert compare(tiny.ours.logits(rows, chunk=7), theirs, tolerance=tiny.tolerance).wrong_tokens == 0


@pytest.fixture
def with_huge(tiny: Setting, tmp_path: Path) -> tuple[MixedBatches, list[Row]]:
    """An adapter with entries of 3e38 beside three victims; publish would refuse it, the engine must bear it."""
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.float32)
    huge = save_peft_adapter(
        base, tmp_path / "huge", seed=9, strength=1.0, r=8, lora_alpha=8, target_modules=["q_proj", "up_proj"]
    )
    weights = huge / "adapter_model.safetensors"
    save_file({name: tensor.sign() * 3e38 for name, tensor in load_file(weights).items()}, weights)
    ours = MixedBatches(tiny.model, {**tiny.adapters, "huge": huge}, limits=Limits(max_abs=float("inf")))
    victims: list[str | None] = ["two-modules", "patterns", None]
    return ours, random_rows(["huge", *victims], vocab=tiny.vocab, seed=5)


def _victims_error(tiny: Setting, ours: MixedBatches, rows: list[Row]) -> float:
    result = ours.logits(rows, chunk=7)
    return compare(result[1:], tiny.theirs.logits(rows[1:]), tolerance=tiny.tolerance).largest_error


def test_an_adapter_of_huge_numbers_does_not_touch_its_neighbours(
    tiny: Setting, with_huge: tuple[MixedBatches, list[Row]]
) -> None:
    assert _victims_error(tiny, *with_huge) <= tiny.tolerance


def test_a_mask_that_multiplies_is_seen(
    tiny: Setting, with_huge: tuple[MixedBatches, list[Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "where", lambda mask, value, other: mask * value)
    assert not _victims_error(tiny, *with_huge) <= tiny.tolerance


def test_what_a_freed_page_held_reaches_nobody(tiny: Setting) -> None:
    rows = mixed_rows(tiny, seed=6)
    theirs = tiny.theirs.logits(rows)
    tiny.ours.runner.kv.data[1:] = torch.nan
    assert compare(tiny.ours.logits(rows, chunk=7), theirs, tolerance=tiny.tolerance).largest_error <= tiny.tolerance


def test_a_page_that_is_not_cleared_is_seen(tiny: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = mixed_rows(tiny, seed=6)
    theirs = tiny.theirs.logits(rows)
    kv = tiny.ours.runner.kv
    kv.data[1:] = torch.nan
    try:
        monkeypatch.setattr(kv, "clear", lambda pages: None)
        assert not compare(tiny.ours.logits(rows, chunk=7), theirs, tolerance=tiny.tolerance).largest_error <= tiny.tolerance
    finally:
        kv.data.zero_()
