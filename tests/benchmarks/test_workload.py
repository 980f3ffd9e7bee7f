"""What contenders are given, and what is read off their runs."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.workload import AdapterKey, Run, Workload, agreement, percentile


def test_every_contender_gets_the_same_prompts() -> None:
    workload = Workload(3, 5, 2, 100)
    assert workload.prompts() == Workload(3, 5, 2, 100).prompts()
    assert [len(prompt) for prompt in workload.prompts()] == [5, 5, 5]
    assert all(0 <= token < 100 for prompt in workload.prompts() for token in prompt)


def test_adapters_are_dealt_out_in_turn() -> None:
    keys = Workload(5, 4, 2, 100, adapters=2, rank=8, modules="qv").adapter_keys()
    assert keys == [AdapterKey(number, 8, "qv") for number in (0, 1, 0, 1, 0)]


def test_without_adapters_every_stream_has_the_base() -> None:
    assert Workload(2, 4, 2, 100).adapter_keys() == [None, None]


def test_popular_adapters_have_most_streams() -> None:
    counts = Counter(Workload(1000, 4, 2, 100, adapters=8, popularity="zipf").adapter_keys())
    numbers = [key.number for key, _ in counts.most_common() if key is not None]
    assert numbers[0] == 0
    assert counts.most_common(1)[0][1] > 1000 / 8 * 2


def test_a_runs_speed_counts_prefill_and_decode_and_its_step_is_the_median_gap() -> None:
    run = Run(2.0, [[1, 2, 3], [4, 5, 6]], firsts_s=[0.5, 0.8], gaps_s=[0.1, 0.2, 0.9])
    assert run.tokens_per_s == 3.0
    assert run.prefill_s == 0.8
    assert run.step_s == 0.2


@pytest.mark.parametrize(("percent", "value"), [(50, 50.0), (99, 99.0), (100, 100.0)])
def test_a_percentile_is_one_of_the_values(percent: float, value: float) -> None:
    assert percentile([float(number) for number in range(100, 0, -1)], percent) == value


def test_agreement_is_the_share_of_equal_tokens_among_the_first() -> None:
    one, other = Run(1.0, [[1, 2, 3, 9], [4, 5, 6, 9]]), Run(1.0, [[1, 2, 0, 8], [4, 0, 0, 8]])
    assert agreement(one, other, first=3) == 0.5
    assert agreement(one, one) == 1.0
