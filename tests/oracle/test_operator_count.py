"""What a step runs does not depend on how many adapters it mixes, and each site has one base product over all rows."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.fixtures.adapters import make_adapter_folder
from tests.fixtures.oracle import MixedBatches, Setting, random_rows
from veneer.artifact import describe_base

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore::FutureWarning:transformers")]

ROWS = 24
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def crowd(tiny: Setting, tmp_path_factory: pytest.TempPathFactory) -> MixedBatches:
    """22 adapters of ranks 1 to 22."""
    folder, base = tmp_path_factory.mktemp("crowd"), describe_base(tiny.model)
    adapters = {
        f"a{index}": make_adapter_folder(
            folder / f"a{index}", base, modules=MODULES[: index % 7 + 1], ranks=index + 1, seed=index
        )
        for index in range(22)
    }
    return MixedBatches(tiny.model, adapters)


def _operators(crowd: MixedBatches, num_adapters: int) -> tuple[Counter[str], list[int]]:
    """Names of all operators of one step in steady state, and the rows of every base product."""
    rows = random_rows([f"a{index % num_adapters}" for index in range(ROWS)], vocab=199, seed=0, lengths=(1, 2))
    crowd.logits(rows, chunk=1)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        crowd.logits(rows, chunk=1)
    base = [event.input_shapes[0][0] for event in recorded.events() if event.name == "aten::linear"]
    return Counter(event.name for event in recorded.events() if event.name.startswith("aten::")), base


def test_a_step_runs_the_same_operators_for_1_8_and_22_adapters(crowd: MixedBatches) -> None:
    counts = {num: _operators(crowd, num)[0] for num in (1, 8, 22)}
    assert counts[1] == counts[8] == counts[22]
    assert counts[1].total() > 100


def test_each_site_has_one_base_product_over_all_rows(crowd: MixedBatches) -> None:
    _, base = _operators(crowd, 22)
    sites, layers = 4, 4
    assert base == [ROWS] * (sites * layers + 1)  # and the head


def test_a_step_without_adapters_runs_no_low_rank_product(crowd: MixedBatches) -> None:
    rows = random_rows([None] * ROWS, vocab=199, seed=0, lengths=(1, 2))
    with profile(activities=[ProfilerActivity.CPU]) as without:
        crowd.logits(rows, chunk=1)
    names = Counter(event.name for event in without.events())
    assert names["aten::where"] == 0
    assert torch.is_inference_mode_enabled() is False
