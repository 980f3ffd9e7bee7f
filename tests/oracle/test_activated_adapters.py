"""Adapters that tokens of the prompt activate, in mixed batches and through the whole engine, against PEFT run alone."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dataplane.engine.client import EngineClient
from dataplane.engine.config import EngineConfig
from dataplane.engine.messages import Sampling, Submit
from dataplane.engine.seating import Seating
from dataplane.engine.sequence import Sequence
from dataplane.invocation import find_start
from dataplane.lora.image_file import write_image
from tests.fixtures.oracle import PAGE_SIZE, MixedBatches, Oracle, Row, Setting, compare, image_of, save_peft_adapter
from tests.oracle.conftest import ALL_MODULES
from veneer.artifact import describe_base

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:peft"),
]

INVOCATIONS = {"judge": (7, 8), "check": (150,), "patterns": (), "one-module": ()}
"""Tokens that activate each adapter; the last two are plain ones."""
_FILLERS = [token for token in range(199) if token not in (7, 8, 150)]


@pytest.fixture(scope="module")
def activated(tiny: Setting, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """The tiny model with two adapters that are activated, and two plain ones."""
    folder = tmp_path_factory.mktemp("activated")
    base = AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.float32)

    def save(name: str, seed: int, **config: object) -> Path:
        tokens = list(INVOCATIONS[name])
        return save_peft_adapter(
            base, folder / name, seed=seed, strength=0.6, task_type="CAUSAL_LM", alora_invocation_tokens=tokens, **config
        )

    adapters = {
        "judge": save("judge", 21, r=8, lora_alpha=8, target_modules=ALL_MODULES),
        "check": save("check", 22, r=16, lora_alpha=32, target_modules=["q_proj", "v_proj", "down_proj"]),
        "patterns": tiny.adapters["patterns"],
        "one-module": tiny.adapters["one-module"],
    }
    return Setting(
        tiny.model, adapters, 199, MixedBatches(tiny.model, adapters, max_rows=1024), Oracle(tiny.model, adapters), tiny.tolerance
    )


@pytest.fixture(scope="module")
def activated_native(activated: Setting) -> Setting:
    """The same, our side in the native CPU form."""
    return dataclasses.replace(
        activated, ours=MixedBatches(activated.model, activated.adapters, max_rows=1024, cpu_form="native")
    )


def prompt(random: np.random.Generator, length: int, invocation: Seq[int], *places: int) -> tuple[int, ...]:
    """Random tokens with an invocation at each of these places, and nowhere else."""
    ids = [int(token) for token in random.choice(_FILLERS, length)]
    for place in places:
        ids[place : place + len(invocation)] = invocation
    return tuple(ids)


def rows_of(seed: int) -> list[Row]:
    """Rows for both sides: base, plain adapters, and each activated one from every kind of place on."""
    random = np.random.default_rng(seed)
    rows = [Row(adapter, prompt(random, 37, ())) for adapter in (None, "patterns", "one-module", None)]
    for adapter in ("judge", "check"):
        tokens = INVOCATIONS[adapter]
        n = int(random.integers(34, 40))
        many = ((0,), (5,), (PAGE_SIZE,), (n // 2,), (n - len(tokens),), (3, 11, 24), (1, 2 * PAGE_SIZE - 1), ())
        rows += [Row(adapter, prompt(random, n, tokens, *places)) for places in many]
    return [rows[index] for index in random.permutation(len(rows))]


def as_served(row: Row) -> Row:
    """The row as the data plane would serve it: with its start, or by the base when it is not invoked."""
    start = find_start(row.ids, INVOCATIONS.get(row.adapter or "", ()))
    return Row(None, row.ids) if start is None else dataclasses.replace(row, active_from=start)


@pytest.mark.parametrize("chunk", [1, 7, PAGE_SIZE, 512])
@pytest.mark.parametrize("name", ["activated", "activated_native"])
def test_a_mixed_batch_with_activated_adapters_equals_each_row_alone(
    name: str, chunk: int, request: pytest.FixtureRequest
) -> None:
    setting: Setting = request.getfixturevalue(name)
    rows = rows_of(seed=chunk)
    ours = setting.ours.logits([as_served(row) for row in rows], chunk=chunk)
    result = compare(ours, setting.theirs.logits(rows), tolerance=setting.tolerance)
    assert result.largest_error <= setting.tolerance
    assert result.decided >= 0.98
    assert result.wrong_tokens == 0


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_start_that_is_one_token_off_is_seen(activated: Setting, shift: int) -> None:
    rows = [
        Row("judge", prompt(np.random.default_rng(3), 30, (7, 8), 12)),
        Row("check", prompt(np.random.default_rng(4), 30, (150,), 12)),
    ]
    theirs = activated.theirs.logits(rows)
    for row, expected in zip(rows, theirs, strict=True):
        ours = activated.ours.logits([dataclasses.replace(row, active_from=12 + shift)], chunk=512)
        assert compare(ours, [expected], tolerance=activated.tolerance).largest_error > 100 * activated.tolerance


@pytest.mark.parametrize(("form", "step_tokens", "num_pages"), [("torch", 24, 64), ("torch", 7, 12), ("native", 512, 12)])
async def test_the_engine_gives_the_oracles_tokens_whether_cache_and_adapters_are_there_or_not(
    form: str, step_tokens: int, num_pages: int, activated: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(9)
    context = prompt(random, 3 * PAGE_SIZE, ())
    rows = [Row(None, context)]
    for adapter, tokens in INVOCATIONS.items():
        for count in (0, 20, 40):
            own, end = prompt(random, count, ()), prompt(random, 3, ())
            rows.append(Row(adapter, (*context, *own, *tokens, *end)))
    rows += [Row("judge", (*context, *INVOCATIONS["check"])), Row(None, (*context, 5))]
    base = describe_base(activated.model)
    config = EngineConfig(
        model_dir=str(activated.model), dtype="float32", cpu_form=form, num_threads=1, page_size=PAGE_SIZE, max_context=160,
        kv_bytes=(num_pages + 1) * 16384, arena_bytes=4 << 20, arena_unit_bytes=4096, max_slots=4, max_sequences=6,
        max_step_tokens=step_tokens, max_step_rank_rows=256,
    )  # fmt: skip
    ahead: list[str] = []
    preempted: list[str] = []
    requeue = Seating.requeue

    def note(self: Seating, sequence: Sequence) -> None:
        (ahead if sequence.is_ahead else preempted).append(sequence.submit.request_id)
        requeue(self, sequence)

    monkeypatch.setattr(Seating, "requeue", note)
    client = await EngineClient.start(config, in_process=True)
    wanted: set[str] = set()
    client.on_wanted = lambda event: wanted.add(event.version)

    banned = (8, 150)  # a call in the answer would move the oracle's start, which sees prompt and answer as one
    sampling = Sampling(max_tokens=44, temperature=0.0, logit_bias=tuple((token, -100.0) for token in banned))

    async def run(index: int) -> tuple[int, ...]:
        served = as_served(rows[index])
        request = Submit(
            request_id=str(index), tenant="x", prompt=served.ids, sampling=sampling, version=served.adapter,
            active_from=served.active_from, cache_salt="x",
        )  # fmt: skip
        return tuple([token async for delta in client.submit(request) for token in delta.ids])

    try:
        async with asyncio.timeout(120):
            outputs = [await run(0)]
            others = [asyncio.create_task(run(index)) for index in range(1, len(rows))]
            while (await client.state()).running or wanted != set(INVOCATIONS):  # noqa: ASYNC110  the engine has no event for it
                await asyncio.sleep(0.01)  # the base rows run to their end, and every context that can be computed ahead is
            known = (await client.state()).prefix_hits
            for name, folder in activated.adapters.items():
                write_image(tmp_path / name, image_of(name, folder, base=base))
                client.stage(name, tmp_path / name)
            outputs += await asyncio.gather(*others)
            state = await client.state()
            assert (state.running, state.waiting, state.kv_pages_used, state.leases) == (0, 0, 0, 0)
            assert known >= 3 * PAGE_SIZE, "adapters that start later share the context with the base"
            assert state.prefix_hits > known
            assert ahead
            assert bool(preempted) == (num_pages < 24)
            outputs += [await run(index) for index in range(1, len(rows))]  # once more, with a warm cache
    finally:
        await client.stop()
    asked = [*rows, *rows[1:]]
    whole = [dataclasses.replace(row, ids=row.ids + output) for row, output in zip(asked, outputs, strict=True)]
    known_logits = dict(zip(different := [*dict.fromkeys(whole)], activated.theirs.logits(different), strict=True))
    decided = 0
    for row, output, long in zip(asked, outputs, whole, strict=True):
        best = known_logits[long][len(row.ids) - 1 : -1].index_fill(1, torch.tensor(banned), -torch.inf).topk(2, dim=-1)
        clear = (best.values[:, 0] - best.values[:, 1]) > 2 * activated.tolerance
        assert torch.equal(best.indices[clear, 0], torch.tensor(output)[clear]), row.adapter
        decided += int(clear.sum())
    assert decided >= 0.98 * 44 * len(asked)
