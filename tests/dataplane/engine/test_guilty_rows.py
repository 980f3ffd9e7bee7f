"""An exception that one row caused ends that row; one in what all share ends the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import llguidance
import pytest

from dataplane.engine import sampler
from dataplane.engine.client import EngineClient
from dataplane.engine.config import EngineConfig
from dataplane.engine.logit_rules import LogitRules
from dataplane.engine.messages import Sampling, Submit
from dataplane.engine.plan import Pick, PlannedRows
from dataplane.engine.sampler import Sampler
from tests.dataplane.engine.conftest import EOS
from veneer.errors import InternalError, UnavailableError, VeneerError

GUILTY = 666
"""Seed of the request in which an exception is planted."""
TURN = 3
"""Index of the token at which it comes up."""
PROMPT = (5, 6, 7, 300, 301)
NEIGHBOURS: dict[str, dict[str, Any]] = {
    "plain": {},
    "drawn": {"temperature": 0.9, "seed": 4},
    "ruled": {"frequency_penalty": 0.9, "logit_bias": ((9, 2.0),)},
    "drawn and ruled": {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.5, "bad_words": ((8,), (4, 5))},
    "reported": {"logprobs": 3},
    "scored": {"prompt_logprobs": 2},
    "spoken": {"grammar": llguidance.LLMatcher.grammar_from_regex("[a-z ]{40}"), "stop_token_ids": (EOS,)},
}


def submit(name: str, **fields: Any) -> Submit:
    sampling = Sampling(**{"max_tokens": 12, "temperature": 0.0} | fields)
    return Submit(request_id=name, tenant="t", prompt=PROMPT, sampling=sampling)


async def read(client: EngineClient, request: Submit) -> tuple[list[int], VeneerError | None]:
    ids: list[int] = []
    try:
        async for delta in client.submit(request):
            ids += delta.ids
    except VeneerError as error:
        return ids, error
    return ids, None


@pytest.fixture(params=[(False, "serial"), (True, "serial"), (False, "overlapped")], ids=["together", "row by row", "overlapped"])
async def client(spoken_dir: Path, request: pytest.FixtureRequest) -> AsyncIterator[EngineClient]:
    batch_invariant, stepping = request.param
    config = EngineConfig(
        model_dir=str(spoken_dir), dtype="float32", num_threads=1, max_sequences=12, max_step_tokens=64, kv_bytes=1 << 20,
        arena_bytes=0, max_slots=1, batch_invariant=batch_invariant, stepping=stepping,
    )  # fmt: skip
    started = await EngineClient.start(config, in_process=True)
    yield started
    await started.stop()


def is_due(rows: Sequence[Pick]) -> bool:
    return any(row.sampling.seed == GUILTY and row.sample_index >= TURN for row in rows)


Patch = pytest.MonkeyPatch


def _setting_up(patch: Patch) -> None:
    start = LogitRules.start

    def fail(self: LogitRules, rows: PlannedRows) -> None:
        if rows.rules is not None and rows.rules.seed == GUILTY:
            raise ZeroDivisionError
        start(self, rows)

    patch.setattr(LogitRules, "start", fail)


def _applying(patch: Patch) -> None:
    add_bias = LogitRules._add_bias

    def fail(self: LogitRules, logits: Any, rows: Sequence[Pick]) -> None:
        if is_due(rows):
            raise ZeroDivisionError
        add_bias(self, logits, rows)

    patch.setattr(LogitRules, "_add_bias", fail)


def _asking_its_grammar(patch: Patch) -> None:
    ban = LogitRules._ban

    class Broken:
        def allowed(self, index: int) -> bytes:
            raise ZeroDivisionError

    def fail(self: LogitRules, logits: Any, rows: Sequence[Pick]) -> Any:
        return ban(self, logits, [row._replace(mask=Broken()) if is_due([row]) else row for row in rows])

    patch.setattr(LogitRules, "_ban", fail)


def _telling_its_grammar(patch: Patch) -> None:
    note = LogitRules.note

    class Broken:
        def advance(self, token: int) -> None:
            raise ZeroDivisionError

    def fail(self: LogitRules, rows: Mapping[int, Pick], tokens: Any, where: Sequence[int]) -> Any:
        broken = {i: row._replace(mask=Broken()) if is_due([row]) else row for i, row in rows.items()}
        return note(self, broken, tokens, where)

    patch.setattr(LogitRules, "note", fail)


def _reporting(patch: Patch) -> None:
    report = sampler.report

    def fail(logits: Any, tokens: Any, num_top: Sequence[int]) -> Any:
        if 7 in num_top:
            raise ZeroDivisionError
        return report(logits, tokens, num_top)

    patch.setattr(sampler, "report", fail)


PLANTS: dict[str, tuple[Callable[[Patch], None], dict[str, Any], int]] = {
    "setting up": (_setting_up, {"logit_bias": ((9, 2.0),)}, 0),
    "applying": (_applying, {"logit_bias": ((9, 2.0),)}, TURN),
    "applying, drawn": (_applying, {"presence_penalty": 0.5, "temperature": 1.0}, TURN),
    "asking its grammar": (_asking_its_grammar, NEIGHBOURS["spoken"], TURN),
    "telling its grammar": (_telling_its_grammar, NEIGHBOURS["spoken"], TURN),
    "reporting": (_reporting, {"logprobs": 7}, 0),
    "scoring": (_reporting, {"prompt_logprobs": 7}, 0),
}


@pytest.mark.parametrize("plant", PLANTS)
async def test_the_guilty_row_ends_alone_and_its_neighbours_keep_their_tokens(
    plant: str, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, fields, turn = PLANTS[plant]
    guilty = submit("guilty", **fields, seed=GUILTY)
    solo = {name: await read(client, submit(name, **more)) for name, more in NEIGHBOURS.items()}
    solo["guilty"] = await read(client, guilty)
    assert all(len(ids) >= 12 and error is None for ids, error in solo.values())
    put(monkeypatch)
    crowd = [guilty, *(submit(name, **more) for name, more in NEIGHBOURS.items())]
    answers = dict(
        zip([one.request_id for one in crowd], await asyncio.gather(*(read(client, one) for one in crowd)), strict=True)
    )
    ids, error = answers.pop("guilty")
    assert isinstance(error, InternalError)
    assert "ZeroDivisionError" in error.message
    assert ids == solo.pop("guilty")[0][:turn]
    assert answers == solo
    state = await client.state()
    assert (state.running, state.waiting, state.kv_pages_used) == (0, 0, 0)
    monkeypatch.undo()
    assert (await read(client, submit("after", **NEIGHBOURS["ruled"])))[0] == solo["ruled"][0], "the seat is as good as new"


async def test_what_every_row_with_rules_raises_is_nobodys_own_fault(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(LogitRules, "_add_bias", fail)
    answers = await asyncio.gather(*(read(client, submit(name, **NEIGHBOURS[name])) for name in ("plain", "ruled", "reported")))
    assert [type(error) for _, error in answers] == [UnavailableError] * 3
    with pytest.raises(UnavailableError):
        await client.state()


async def test_what_rows_without_rules_raise_is_nobodys_own_fault(client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Sampler, "_draw", fail)
    answers = await asyncio.gather(*(read(client, submit(name, **NEIGHBOURS[name])) for name in ("plain", "drawn", "ruled")))
    assert [type(error) for _, error in answers] == [UnavailableError] * 3
    with pytest.raises(UnavailableError):
        await client.state()
