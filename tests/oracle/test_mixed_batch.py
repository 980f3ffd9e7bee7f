"""Every row of a mixed batch against transformers and PEFT run alone."""

from __future__ import annotations

import itertools

import pytest

from tests.fixtures.oracle import PAGE_SIZE, Row, Setting, compare, mixed_rows

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:peft"),
]

LEAST_DECIDED = 0.98


def _check(setting: Setting, *, chunk: int, seed: int) -> None:
    rows = mixed_rows(setting, seed=seed)
    result = compare(setting.ours.logits(rows, chunk=chunk), setting.theirs.logits(rows), tolerance=setting.tolerance)
    assert result.largest_error <= setting.tolerance
    assert result.decided >= LEAST_DECIDED
    assert result.wrong_tokens == 0


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("chunk", [1, 7, PAGE_SIZE, 512])
@pytest.mark.parametrize("name", ["tiny", "tiny_native"])
def test_a_mixed_batch_of_the_tiny_model_equals_each_row_alone(
    name: str, chunk: int, seed: int, request: pytest.FixtureRequest
) -> None:
    _check(request.getfixturevalue(name), chunk=chunk, seed=seed)


@pytest.mark.parametrize("chunk", [1, 7, PAGE_SIZE])
@pytest.mark.parametrize("name", ["smollm2", "smollm2_native"])
def test_a_mixed_batch_of_smollm2_equals_each_row_alone(name: str, chunk: int, request: pytest.FixtureRequest) -> None:
    _check(request.getfixturevalue(name), chunk=chunk, seed=3)


@pytest.mark.parametrize("name", ["tiny", "smollm2"])
def test_every_adapter_changes_at_least_half_of_the_tokens(name: str, request: pytest.FixtureRequest) -> None:
    setting: Setting = request.getfixturevalue(name)
    ids = mixed_rows(setting, seed=4)[0].ids
    tokens = {
        adapter: setting.theirs.logits([row])[0].argmax(-1)
        for adapter in (None, *setting.adapters)
        for row in [Row(adapter, ids)]
    }
    for one, other in itertools.combinations(tokens, 2):
        assert (tokens[one] != tokens[other]).float().mean() >= 0.5, f"{one} and {other} choose the same tokens"
