"""A real engine under a random load: everything ends once, everything is given back, and no answer changed.

`RANDOM_RUN_SEED` repeats a run's choices; those of threads and clocks stay free, so it shows the same load, not the same order.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dataplane.engine import client as client_module
from dataplane.engine.client import EngineClient
from dataplane.engine.config import EngineConfig
from dataplane.engine.messages import Event, Submit
from dataplane.frontend.tokenizer import Tokenizer
from dataplane.model.config import read_config
from tests.dataplane.engine.driving import assert_idle
from tests.dataplane.engine.random_load import BAD, GOOD, LOST, MAX_CONTEXT, Ledger, Load, alone, write_images

NUM_CHECKED = 100
"""Answers that are compared with those of an engine that runs nothing else."""
FORMS: dict[str, dict[str, Any]] = {
    "torch, overlapped": {"cpu_form": "torch", "page_size": 4, "stepping": "overlapped"},
    "native, invariant": {"cpu_form": "auto", "page_size": 16, "batch_invariant": True},
    "native, invariant, overlapped": {"cpu_form": "auto", "page_size": 16, "batch_invariant": True, "stepping": "overlapped"},
}
_CLEAR = 1e-3  # difference of two logits that no order of summation makes


@pytest.fixture(scope="module")
def images(spoken_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_images(tmp_path_factory.mktemp("images"), read_config(spoken_dir))


def config(folder: Path, form: str, *, num_spare_pages: int, **changes: Any) -> EngineConfig:
    fields = FORMS[form]
    page_size = fields["page_size"]
    num_pages = -(-MAX_CONTEXT // page_size) + num_spare_pages * 16 // page_size
    values: dict[str, Any] = {
        "model_dir": str(folder), "dtype": "float32", "num_threads": 1, "max_context": MAX_CONTEXT, "arena_unit_bytes": 4096,
        "kv_bytes": (num_pages + 1) * 2 * 2 * page_size * 32 * 4, "max_rank": 16,
    }  # fmt: skip
    return EngineConfig(**(values | fields | changes))


@pytest.mark.parametrize(("requests", "seconds"), [(600, 0), pytest.param(600, 50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.timeout(900)
async def test_everything_ends_once_is_given_back_and_no_answer_changes(
    form: str, requests: int, seconds: int, spoken_dir: Path, images: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = int(os.environ.get("RANDOM_RUN_SEED", random.SystemRandom().getrandbits(32)))
    print(f"RANDOM_RUN_SEED={seed}")
    threads, tasks = set(threading.enumerate()), asyncio.all_tasks()
    ledger = Ledger()
    receive = EngineClient._receive

    def note(self: EngineClient, events: Iterable[Event]) -> None:
        ledger.note(events)
        receive(self, events)

    monkeypatch.setattr(EngineClient, "_receive", note)
    monkeypatch.setattr(client_module, "_PAUSE_AT", 3)
    tiny = config(
        spoken_dir, form, num_spare_pages=3, max_sequences=6, max_step_tokens=24, arena_bytes=50 * 4096, max_slots=3,
        max_step_rank_rows=48, max_waiting=60, max_waiting_per_tenant=30, quantum_tokens=16,
    )  # fmt: skip
    client = await EngineClient.start(tiny, in_process=True)
    load = Load(client, images, tokenizer=Tokenizer(spoken_dir / "tokenizer.json"), ledger=ledger, seed=seed)
    await load.run(requests=requests, seconds=seconds)
    await assert_everything_is_given_back(client, load)
    await client.stop()
    assert asyncio.all_tasks() == tasks
    left = set(threading.enumerate()) - threads
    assert not [thread for thread in left if not thread.name.startswith("asyncio")], "threads of the event loop's own pool stay"
    assert_ends_are_right(ledger)
    assert_all_was_met(ledger, whole=bool(seconds))
    monkeypatch.undo()
    await assert_answers_are_those_of_solo_runs(ledger, config(spoken_dir, form, num_spare_pages=64), images, seed=seed)


async def assert_everything_is_given_back(client: EngineClient, load: Load) -> None:
    load.forget_adapters()
    async with asyncio.timeout(60):
        while True:  # aborts and loads may still be on their way
            state = await client.state()
            if not (state.running or state.waiting or state.arena_bytes_used or state.holdings):
                break
    assert (state.kv_pages_used, state.leases) == (0, 0)
    assert client._streams == client._queries == {}
    engine = client._link._engine  # type: ignore[attr-defined]
    assert_idle(engine._scheduler)
    assert engine._scheduler._seating.held == {}
    residency = engine._adapters.residency
    assert residency.wanted() == ()
    assert (residency._entries, residency._copies.units.free, len(residency._copies._free_slots)) == ({}, 50, 3)
    shares = residency._shares
    assert (dict(shares._held), dict(shares._claims), shares._weights) == ({}, {}, {})


def assert_ends_are_right(ledger: Ledger) -> None:
    assert ledger.lasting == [], "nothing follows a last event"
    for name, submit in ledger.asked.items():
        end, num_ends = ledger.ends[name], ledger.events[name]
        slow = end == "RESOURCE_EXHAUSTED"  # of a full queue, or of a reader that did not read
        assert num_ends == 1 or (num_ends == 0 and (end == "left" or slow)), (end, submit)
        allowed = {"left", "RESOURCE_EXHAUSTED"} | ({"DEADLINE_EXCEEDED"} if submit.deadline_s is not None else set())
        if submit.version in BAD:
            allowed |= {"INTERNAL", "FAILED_PRECONDITION"}
        elif submit.version == LOST:
            allowed |= {"FAILED_PRECONDITION"}
        else:
            allowed |= {"length"} | ({"stop"} if submit.sampling.stop_token_ids else set())
        assert end in allowed, (end, submit)


def assert_all_was_met(ledger: Ledger, *, whole: bool) -> None:
    """The load meets what it is for: a short one what is frequent, for on a busy machine a few of the rest may be left out."""
    ends = Counter(ledger.ends.values())
    print(dict(ends))
    rare = {"stop", "DEADLINE_EXCEEDED", "INTERNAL", "FAILED_PRECONDITION"}
    assert set(ends) - rare == {"left", "length", "RESOURCE_EXHAUSTED"}
    met, versions = rare & set(ends), {ledger.asked[name].version for name in ledger.answers}
    if whole:
        assert met == rare, "every manner to end occurs"
        assert versions == {None, *GOOD}, "every version answered"
    else:
        assert len(met) >= 2
        assert len(versions) > len(GOOD) / 2


async def assert_answers_are_those_of_solo_runs(
    ledger: Ledger, config: EngineConfig, images: dict[str, Path], *, seed: int
) -> None:
    """All alike where bits are promised; else what is plain and greedy, where the two best tokens are apart."""
    names = [
        name
        for name in ledger.answers
        if config.batch_invariant or (ledger.asked[name].sampling.is_plain and not ledger.asked[name].sampling.temperature)
    ]
    client = await EngineClient.start(config, in_process=True)
    for version in GOOD:
        client.stage(version, images[version])
    try:
        for name in random.Random(seed).sample(names, min(NUM_CHECKED, len(names))):
            submit, answer = ledger.asked[name], ledger.answers[name]
            deltas = await alone(client, submit)
            ids = tuple(id_ for delta in deltas for id_ in delta.ids)
            if ids != answer and not config.batch_invariant:
                assert await _is_open(client, submit, ids, answer), submit
            else:
                assert ids == answer, submit
    finally:
        await client.stop()


async def _is_open(client: EngineClient, submit: Submit, ids: tuple[int, ...], answer: tuple[int, ...]) -> bool:
    """Whether the two likeliest tokens are equally likely where two answers part."""
    first = next(index for index, (one, other) in enumerate(zip(ids, answer, strict=False)) if one != other)
    sampling = replace(submit.sampling, logprobs=2)
    deltas = await alone(client, replace(submit, sampling=sampling))
    (_, best), (_, second) = [one for delta in deltas for one in delta.logprobs][first].top
    return best - second < _CLEAR
