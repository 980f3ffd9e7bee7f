"""Whole engines against transformers and PEFT: every family, under every load that must not change an answer.

One engine serves one batch of requests that mixes all adapters with every way to ask (a pairwise covering set). Each answer is
then forced through transformers alone, and every one of its tokens must be the one that the request's rules make of those
logits.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataplane.choices import seed_of
from dataplane.engine.client import EngineClient
from dataplane.engine.config import EngineConfig
from dataplane.engine.messages import Delta, Sampling, State, Submit
from dataplane.engine.seating import Seating
from dataplane.engine.sequence import Sequence
from dataplane.lora.image_file import write_image
from dataplane.model.config import read_config
from tests.fixtures.covering import pairwise
from tests.fixtures.families import LONGEST, MODELS, VOCAB, make_setting
from tests.fixtures.judge import check_logprobs, expected
from tests.fixtures.oracle import Oracle, Row, Setting, image_of, save_peft_adapter
from veneer.artifact import describe_base

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:peft"),
]

TOLERANCE = 1e-4
LEAST_DECIDED = 0.88
ACTIVATED = "activated"
INVOCATION = (7, 8)
"""Tokens of the prompt that activate the adapter of that name. Answers may not have the second one: the oracle looks for the last
place in all that it is given."""
ADAPTERS = (None, "one-module", "two-modules", "rslora", "patterns", "some-layers", ACTIVATED)
ASKED: dict[str, tuple[Any, ...]] = {
    "adapter": ADAPTERS,
    "cache": ("none", "cold", "warm"),
    "n": (1, 3),
    "ruled": (False, True),
    "reported": (False, True),
    "drawn": (False, True),
}
RULES: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.7,
    "presence_penalty": -0.4,
    "logit_bias": ((9, 3.0), (11, -100.0)),
    "min_tokens": 3,
    "stop_token_ids": tuple(range(0, VOCAB, 7)),
    "bad_words": ((3,), (4, 5), (20, 21, 22)),
}
DRAWN = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02}
REPORTED = {"logprobs": 4, "prompt_logprobs": 2}


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine has to bear.

    Attributes:
        form: CPU form; `auto` is the native one where the model has it.
        steps: Rows of a step (prompts are cut into chunks of what decoding leaves of them), and whether the next one is planned
            while it runs.
        preempted: Pages for two sequences, while eight have a seat.
    """

    form: str
    steps: tuple[int, str]
    preempted: bool

    def __str__(self) -> str:
        size, stepping = self.steps
        return f"{self.form}, {stepping} steps of {size}{', preempted' if self.preempted else ''}"


STEPS = ((8, "serial"), (19, "overlapped"), (256, "serial"))
LOADS = [Load(*values) for values in itertools.product(("torch", "auto"), STEPS, (False, True))]


@dataclass(frozen=True, slots=True)
class Case:
    """A model and what is asked of it.

    Attributes:
        setting: The model and its adapters.
        images: Image of each adapter.
        warming: Requests that warm the cache.
        submits: The requests that are judged.
    """

    setting: Setting
    images: dict[str, Path]
    warming: list[Submit]
    submits: list[Submit]

    def logits(self, rows: Seq[Row]) -> list[np.ndarray[Any, np.dtype[np.float64]]]:
        """Returns the oracle's logits, [len(ids), vocab] for each row."""
        return [one.double().numpy() for one in self.setting.theirs.logits(rows)]


def _invoke(prompt: tuple[int, ...], start: int) -> tuple[int, ...]:
    """Returns a prompt that calls the activated adapter at two places, of which the later one counts."""
    ids = [0 if token == INVOCATION[-1] else token for token in prompt]
    for place in (start // 2, start):
        ids[place : place + len(INVOCATION)] = INVOCATION
    return tuple(ids)


def _requests(seed: int) -> tuple[list[Submit], list[Submit]]:
    """Returns requests that warm the cache, and the requests that are judged."""
    random = np.random.default_rng(seed)
    warming: list[Submit] = []
    submits: list[Submit] = []
    for place, asked in enumerate(pairwise(ASKED, seed=seed)):
        warm = asked["cache"] == "warm"
        length = int(random.integers(17, 25) if warm else random.integers(5, 16))
        prompt = tuple(int(token) for token in random.integers(0, VOCAB, length))
        chosen: dict[str, Any] = {"temperature": 0.0, "max_tokens": LONGEST - 1 - length}
        chosen |= (RULES if asked["ruled"] else {}) | (DRAWN if asked["drawn"] else {}) | (REPORTED if asked["reported"] else {})
        salt = "" if asked["cache"] == "none" else f"salt {place}"
        start = 0
        if asked["adapter"] == ACTIVATED:
            start = int(random.integers(1, length - len(INVOCATION) + 1))
            prompt = _invoke(prompt, start)
            chosen["logit_bias"] = (*chosen.get("logit_bias", ()), (INVOCATION[-1], -100.0))
        fields: dict[str, Any] = {"version": asked["adapter"], "active_from": start, "cache_salt": salt}
        for index in range(asked["n"]):
            sampling = dict(chosen, seed=seed_of(place, index))
            if index:
                sampling["prompt_logprobs"] = None
            submits.append(
                Submit(request_id=f"{place}.{index}", tenant="t", prompt=prompt, sampling=Sampling(**sampling), **fields)
            )
        if warm:
            one = Sampling(max_tokens=1, temperature=0.0)
            warming.append(Submit(request_id=f"w{place}", tenant="t", prompt=prompt, sampling=one, **fields))
    return warming, submits


def _with_activated(setting: Setting, folder: Path, modules: Seq[str]) -> Setting:
    """Returns the setting with one adapter more, which tokens of the prompt activate."""
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(setting.model, dtype=torch.float32, attn_implementation="eager")
    config: dict[str, Any] = {"r": 8, "lora_alpha": 8, "target_modules": list(modules), "task_type": "CAUSAL_LM"}
    one = save_peft_adapter(base, folder / ACTIVATED, seed=6, strength=0.6, alora_invocation_tokens=list(INVOCATION), **config)
    adapters = {**setting.adapters, ACTIVATED: one}
    return dataclasses.replace(setting, adapters=adapters, theirs=Oracle(setting.model, adapters))


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    cases: dict[str, Case] = {}

    def make(model: str) -> Case:
        if model not in cases:
            folder = tmp_path_factory.mktemp("engine")
            setting = _with_activated(make_setting(MODELS[model], folder, tolerance=TOLERANCE), folder, MODELS[model].modules)
            base = describe_base(setting.model)
            images = {name: folder / f"{name}.image" for name in setting.adapters}
            for name, path in images.items():
                write_image(path, image_of(name, setting.adapters[name], base=base))
            cases[model] = Case(setting, images, *_requests(seed=[*MODELS].index(model)))
        return cases[model]

    return make


def _page_size(load: Load) -> int:
    return 4 if load.form == "torch" else 16


def _config(case: Case, load: Load) -> EngineConfig:
    form = read_config(case.setting.model)
    page_size = _page_size(load)
    pages = -(-LONGEST // page_size)
    num_pages = 2 * pages if load.preempted else 40 * pages
    return EngineConfig(
        model_dir=str(case.setting.model),
        dtype="float32",
        cpu_form=load.form,
        max_sequences=8,
        max_step_tokens=load.steps[0],
        stepping=load.steps[1],
        page_size=page_size,
        kv_bytes=(num_pages + 1) * form.num_layers * 2 * page_size * form.kv_size * 4,
        arena_bytes=4 << 20,
        arena_unit_bytes=4096,
        max_slots=4,
        max_context=LONGEST,
    )


async def _idle(client: EngineClient) -> State:
    """Returns the counters once the step in flight, which holds pages and leases longer than the last answer, is committed."""
    async with asyncio.timeout(60):
        while True:
            state = await client.state()
            if not (state.running or state.waiting or state.kv_pages_used or state.leases):
                return state


async def _answers(case: Case, load: Load) -> tuple[dict[str, list[Delta]], State]:
    client = await EngineClient.start(_config(case, load), in_process=True)
    client.on_wanted = lambda wanted: client.stage(wanted.version, case.images[wanted.version])

    async def read(submit: Submit) -> list[Delta]:
        return [delta async for delta in client.submit(submit)]

    try:
        await asyncio.gather(*map(read, case.warming))
        answers = await asyncio.gather(*map(read, case.submits))
        state = await _idle(client)
    finally:
        await client.stop()
    return {submit.request_id: answer for submit, answer in zip(case.submits, answers, strict=True)}, state


def _check(case: Case, answers: dict[str, list[Delta]]) -> Iterator[bool]:
    """Asserts that every decided token, every end and every logprob is the oracle's; yields whether each token is decided."""
    ids = {name: tuple(id_ for delta in deltas for id_ in delta.ids) for name, deltas in answers.items()}
    forced = case.logits([Row(submit.version, submit.prompt + ids[submit.request_id][:-1]) for submit in case.submits])
    for submit, logits in zip(case.submits, forced, strict=True):
        output, deltas, sampling = ids[submit.request_id], answers[submit.request_id], submit.sampling
        first = len(submit.prompt) - 1
        for index, token in enumerate(output):
            want = expected(logits[first + index], sampling, prompt=submit.prompt, output=output[:index], tolerance=TOLERANCE)
            assert token == want.token or not want.decided, (submit, index)
            yield want.decided
        stops = [index for index, token in enumerate(output) if token in sampling.stop_token_ids]
        assert (deltas[-1].finish, len(output)) == (("stop", stops[0] + 1) if stops else ("length", sampling.max_tokens)), submit
        reported = [one for delta in deltas for one in delta.logprobs]
        assert len(reported) == (0 if sampling.logprobs is None else len(output))
        for index, one in enumerate(reported):
            check_logprobs(one, logits[first + index], output[index], num_top=sampling.logprobs or 0, tolerance=TOLERANCE)
        scores = [one for delta in deltas for one in delta.prompt_logprobs]
        assert len(scores) == (0 if sampling.prompt_logprobs is None else first)
        for index, one in enumerate(scores):
            check_logprobs(
                one, logits[index], submit.prompt[index + 1], num_top=sampling.prompt_logprobs or 0, tolerance=TOLERANCE
            )


def _runs() -> Iterator[Any]:
    """Yields every model with every load; one load of each model is fast, in turn, so that every load is."""
    for place, model in enumerate(MODELS):
        for load in LOADS:
            is_fast = load is LOADS[5 * place % len(LOADS)]
            yield pytest.param(model, load, id=f"{model}: {load}", marks=() if is_fast else pytest.mark.slow)


@pytest.mark.parametrize(("model", "load"), list(_runs()))
async def test_every_answer_is_what_transformers_makes_of_it(
    model: str, load: Load, case_of: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(model)
    preempted: list[Sequence] = []
    requeue = Seating.requeue

    def note(self: Seating, sequence: Sequence) -> None:
        if not sequence.is_ahead:
            preempted.append(sequence)
        requeue(self, sequence)

    monkeypatch.setattr(Seating, "requeue", note)
    answers, state = await _answers(case, load)
    decided = list(_check(case, answers))
    assert np.mean(decided) >= LEAST_DECIDED
    assert bool(preempted) == load.preempted
    page_size = _page_size(load)
    warmed = {one.cache_salt for one in case.warming}
    readers = [one for one in case.submits if one.cache_salt in warmed and one.sampling.prompt_logprobs is None]
    found = sum((len(one.prompt) - 1) // page_size * page_size for one in readers)
    assert state.prefix_hits >= (1 if load.preempted else found)
    assert state.evictions > 0, "six adapters shared four slots"
