"""The order of one tenant's waiting requests, against a sorted list; and that it is nobody else's matter."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.engine.line import Line
from dataplane.engine.sequence import Sequence
from tests.dataplane.engine.driving import Loop, add, assert_idle, make, submit

VERBS = st.lists(st.tuples(st.sampled_from(["push", "front", "remove"]), st.integers(-2, 2), st.integers(0, 50)), max_size=40)


@settings(max_examples=3 * settings.default.max_examples)
@given(VERBS)
def test_a_line_equals_a_sorted_list(verbs: list[tuple[str, int, int]]) -> None:
    line, model = Line(), list[tuple[int, int, Sequence]]()
    for count, (verb, priority, index) in enumerate(verbs):
        if verb == "remove":
            if model:
                _, _, sequence = model.pop(index % len(model))
                assert sequence in line
                line.remove(sequence)
                assert sequence not in line
            continue
        sequence = Sequence(submit(f"r{count}", priority=priority), deadline=None, max_context=32)
        line.push(sequence, front=verb == "front")
        model.append((-priority, -count if verb == "front" else count, sequence))
        model.sort(key=lambda entry: entry[:2])
        assert list(line) == [entry[2] for entry in model]
        assert (len(line), bool(line)) == (len(model), bool(model))
    for _, _, sequence in model:
        line.remove(sequence)
    assert (list(line), len(line), bool(line)) == ([], 0, False)


def test_a_tenants_requests_start_by_priority_and_then_as_they_came() -> None:
    scheduler = make(num_pages=64, max_sequences=1)
    loop = Loop(scheduler)
    for name, priority in (("first", 0), ("late", -5), ("second", 0), ("soon", 7), ("next", 7)):
        add(scheduler, submit(name, priority=priority))
    loop.run()
    assert list(loop.finished) == ["soon", "next", "first", "second", "late"]


@given(
    priorities=st.lists(st.integers(-100, 100), min_size=30, max_size=30),
    prompts=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    outputs=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    weights=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_no_priority_changes_what_another_tenant_gets(priorities: list[int], prompts: Any, outputs: Any, weights: Any) -> None:
    def steps_of_y(given: list[int]) -> list[list[str]]:
        scheduler = make(num_pages=24, max_sequences=3, max_step_tokens=12)
        loop = Loop(scheduler)
        for i, priority in enumerate(given):
            fields = {"priority": priority, "weight": weights[0], "max_tokens": outputs[0]}
            add(scheduler, submit(f"x{i}", (i + 1,) * prompts[0], tenant="x", **fields))
            if i % 2:
                add(scheduler, submit(f"y{i}", (i + 1,) * prompts[1], tenant="y", weight=weights[1], max_tokens=outputs[1]))
        served = []
        while loop.turn():
            served.append([name for name in (*loop.finished, *loop.outputs) if name[0] == "y"])
        assert_idle(scheduler)
        assert len(loop.finished) == 45
        return served

    assert steps_of_y(priorities) == steps_of_y([0] * len(priorities))
