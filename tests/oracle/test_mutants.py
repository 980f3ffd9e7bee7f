"""Faults planted one at a time: the comparison of test_mixed_batch must see each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels import cpu
from kernels.cpu import CpuLowRank
from kernels.descriptors import Descriptors
from kernels.native_low_rank import NativeLowRank
from kernels.rows import RankRows
from tests.fixtures.oracle import MixedBatches, Row, Setting, compare, mixed_rows, random_rows, save_peft_adapter
from veneer.artifact import Limits

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:peft"),
]

Form = type[CpuLowRank] | type[NativeLowRank]
Plant = Callable[[pytest.MonkeyPatch, Descriptors, Form], None]
SETTINGS = ["tiny", "tiny_native"]


def _adapter_ignored(patch: pytest.MonkeyPatch, table: Descriptors, form: Form) -> None:
    patch.setattr(form, "add_", lambda self, y, x, *, layer, site: None)


def _scale_dropped(patch: pytest.MonkeyPatch, table: Descriptors, form: Form) -> None:
    patch.setattr(table, "scale", np.ones_like(table.scale))


def _neighbours_rows(patch: pytest.MonkeyPatch, table: Descriptors, form: Form) -> None:
    begin = form.begin_step

    def rolled(self: NativeLowRank, rows: RankRows) -> None:
        begin(self, dataclasses.replace(rows, row_slot=np.roll(rows.row_slot, 1)))

    patch.setattr(form, "begin_step", rolled)


def _one_site_missing(patch: pytest.MonkeyPatch, table: Descriptors, form: Form) -> None:
    add = form.add_

    def without_down(self: NativeLowRank, y: torch.Tensor, x: torch.Tensor, *, layer: int, site: str) -> None:
        if site != "down":
            add(self, y, x, layer=layer, site=site)

    patch.setattr(form, "add_", without_down)


def _rank_cut(patch: pytest.MonkeyPatch, table: Descriptors, form: Form) -> None:
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


@pytest.fixture(params=SETTINGS)
def either(request: pytest.FixtureRequest) -> Setting:
    """The tiny model in each CPU form."""
    setting: Setting = request.getfixturevalue(request.param)
    return setting


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_seen(either: Setting, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, form = either, type(either.ours.runner._low_rank)
    rows = mixed_rows(tiny, seed=1)
    theirs = tiny.theirs.logits(rows)
    try:
        with monkeypatch.context() as patch:
            MUTANTS[name](patch, tiny.ours.runner.arena.descriptors, form)
            _forget(tiny.ours)
            mutant = compare(tiny.ours.logits(rows, chunk=7), theirs, tolerance=tiny.tolerance)
    finally:
        _forget(tiny.ours)
    assert mutant.largest_error > 10 * tiny.tolerance
    assert mutant.wrong_tokens > 0
    assert compare(tiny.ours.logits(rows, chunk=7), theirs, tolerance=tiny.tolerance).wrong_tokens == 0


@pytest.fixture
def with_huge(tiny: Setting, tmp_path: Path) -> tuple[dict[str, Path], list[Row]]:
    """An adapter with entries of 3e38 beside three victims; publish would refuse it, the engine must bear it."""
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.float32)
    huge = save_peft_adapter(
        base, tmp_path / "huge", seed=9, strength=1.0, r=8, lora_alpha=8, target_modules=["q_proj", "up_proj"]
    )
    weights = huge / "adapter_model.safetensors"
    save_file({name: tensor.sign() * 3e38 for name, tensor in load_file(weights).items()}, weights)
    victims: list[str | None] = ["two-modules", "patterns", None]
    return {**tiny.adapters, "huge": huge}, random_rows(["huge", *victims], vocab=tiny.vocab, seed=5)


def _victims_error(tiny: Setting, adapters: dict[str, Path], rows: list[Row], *, cpu_form: str) -> float:
    ours = MixedBatches(tiny.model, adapters, limits=Limits(max_abs=float("inf")), cpu_form=cpu_form)
    result = ours.logits(rows, chunk=7)
    return compare(result[1:], tiny.theirs.logits(rows[1:]), tolerance=tiny.tolerance).largest_error


@pytest.mark.parametrize("cpu_form", ["torch: tiled", "torch: dense", "native"])
def test_an_adapter_of_huge_numbers_does_not_touch_its_neighbours(
    tiny: Setting, with_huge: tuple[dict[str, Path], list[Row]], cpu_form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, _, way = cpu_form.partition(": ")
    monkeypatch.setattr(cpu, "_tiles_pay", lambda *_: way == "tiled")
    assert _victims_error(tiny, *with_huge, cpu_form=form) <= tiny.tolerance


def test_a_mask_that_multiplies_is_seen(
    tiny: Setting, with_huge: tuple[dict[str, Path], list[Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.theirs.logits(with_huge[1][1:])  # the oracle multiplies by no mask
    monkeypatch.setattr(cpu, "_tiles_pay", lambda *_: False)
    monkeypatch.setattr(torch, "where", lambda mask, value, other: mask * value)
    assert not _victims_error(tiny, *with_huge, cpu_form="torch") <= tiny.tolerance


def test_what_a_freed_page_held_reaches_nobody(either: Setting) -> None:
    tiny = either
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


def test_the_native_form_reads_nothing_behind_a_sequence_even_of_pages_that_are_not_cleared(
    tiny_native: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = mixed_rows(tiny_native, seed=6)
    theirs = tiny_native.theirs.logits(rows)
    kv = tiny_native.ours.runner.kv
    kv.data[1:] = torch.nan
    monkeypatch.setattr(kv, "clear", lambda pages: None)
    tolerance = tiny_native.tolerance
    assert compare(tiny_native.ours.logits(rows, chunk=7), theirs, tolerance=tolerance).largest_error <= tolerance
