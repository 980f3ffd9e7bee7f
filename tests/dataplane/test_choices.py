"""What is asked of the choice of tokens reaches the engine, and several choices of one request come apart again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from dataplane.asked import GenerationRequest
from dataplane.choices import Choice, seed_of
from dataplane.engine.messages import Logprobs
from dataplane.fallback import FallbackMode, FallbackReason
from dataplane.frontend.grammars import Constraint
from dataplane.resolution import Answer
from tests.dataplane.doubles import VERSION, answer, delta, resolution, until
from tests.dataplane.stage import REQUEST, Stage, hang_in_engine, hang_in_load
from veneer.errors import (
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)


def with_choice(**fields: Any) -> GenerationRequest:
    return replace(REQUEST, choice=Choice(**fields))


@pytest.fixture
def roomy(stage: Stage) -> Stage:
    stage.limits = replace(stage.limits, max_streams=9, max_streams_per_tenant=9)
    stage.generator = stage.build()
    return stage


async def test_every_choice_comes_whole_under_its_index_and_is_served_once(roomy: Stage) -> None:
    parts = await roomy.run(with_choice(n=3, seed=11))
    assert [part.served is not None for part in parts] == [True] + [False] * (len(parts) - 1)
    for choice in range(3):
        mine = [part.piece for part in parts if part.choice == choice]
        assert [id_ for piece in mine for id_ in piece.ids] == [70, 71, 72]
        assert [piece.end is not None for piece in mine] == [False] * (len(mine) - 1) + [True]
    assert roomy.holds_nothing()


async def test_choices_draw_from_seeds_of_their_own_and_the_first_keeps_the_requests(roomy: Stage) -> None:
    await roomy.run(with_choice(n=3, seed=11))
    await roomy.run(with_choice(n=2, seed=12))
    seeds = [submit.sampling.seed for submit in roomy.engine.submits]
    assert seeds[0] == 11
    assert seeds[:3] == [seed_of(11, index) for index in range(3)]
    assert len(set(seeds)) == 5
    assert len({submit.request_id for submit in roomy.engine.submits}) == 5


async def test_what_all_choices_share_is_found_once(roomy: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    stop_ids = roomy.generator._prompts.stop_ids

    def count(stops: Sequence[str]) -> tuple[int, ...]:
        asked.append(stops)
        return stop_ids(stops)

    monkeypatch.setattr(roomy.generator._prompts, "stop_ids", count)
    await roomy.run(with_choice(n=3, seed=11, stop=("end",), prompt_logprobs=0))
    assert asked == [("end",)]
    assert [submit.sampling.prompt_logprobs for submit in roomy.engine.submits] == [0, None, None]


async def test_each_choice_takes_a_place_among_the_streams(stage: Stage) -> None:
    with pytest.raises(ResourceExhaustedError, match="the tenant runs 0 streams, at most 2"):
        await stage.run(with_choice(n=3))
    hang_in_engine(stage)
    running = asyncio.create_task(stage.run(with_choice(n=2)))
    await until(lambda: len(stage.engine.submits) == 2)
    assert stage.generator.num_streams == 2
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert len(stage.engine.aborted) == 2
    assert stage.holds_nothing()


async def test_one_choice_that_breaks_ends_the_request_and_the_others(roomy: Stage) -> None:
    roomy.engine.script = (delta(70), UnavailableError("the engine ended"))
    with pytest.raises(UnavailableError):
        await roomy.run(with_choice(n=3))
    assert roomy.holds_nothing()


async def test_all_choices_fall_back_together(roomy: Stage) -> None:
    hang_in_load(roomy)
    roomy.limits = replace(roomy.limits, fallback_after_s=0.01)
    roomy.generator = roomy.build()
    parts = await roomy.run(replace(with_choice(n=2), fallback=FallbackMode.NOT_READY))
    assert [submit.version for submit in roomy.engine.submits] == [VERSION, VERSION, None, None]
    assert sum(part.piece.end is not None for part in parts) == 2
    assert parts[0].served is not None
    assert parts[0].served.fallback is FallbackReason.NOT_READY
    assert roomy.holds_nothing()


async def test_the_prompt_is_sent_back_once_with_its_logprobs(roomy: Stage) -> None:
    scores = (Logprobs(-0.5, ((5, -0.5),)),)
    roomy.engine.script = (delta(70)._replace(prompt_logprobs=scores), delta(71, index=1, finish="length"))
    parts = await roomy.run(with_choice(n=2, echo=True, prompt_logprobs=1))
    assert [submit.sampling.prompt_logprobs for submit in roomy.engine.submits] == [1, None]
    echoes = [(part.choice, part.piece.index, part.echo) for part in parts if part.echo is not None]
    ((choice, index, echo),) = echoes
    assert (choice, index) == (0, 0)
    assert (echo.ids, echo.text, echo.logprobs) == ((5, 6), roomy.prompts.tokenizer.decode((5, 6)), scores)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("sampling.min_tokens", {"min_tokens": 5, "max_tokens": 4}),
        ("sampling.logit_bias", {"logit_bias": ((500, 1.0),)}),
        ("sampling.stop_token_ids[1]", {"stop_token_ids": (499, 500)}),
        ("sampling.stop_token_ids[0]", {"stop_token_ids": (2**32 - 1,)}),
        ("sampling.stop[1]", {"stop": ("END", "and <|im_end|>")}),
        ("sampling.stop[0]", {"stop": ("<|im_end|>\n",)}),
        ("sampling.stop[0]", {"stop": ("<|im_end|><|im_end|>",)}),
    ],
)
async def test_rules_that_do_not_fit_are_refused_before_the_engine_hears_of_them(
    stage: Stage, field: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await stage.run(with_choice(**fields))
    assert [violation.field for violation in caught.value.violations] == [field]
    assert stage.engine.submits == []
    assert stage.holds_nothing()


@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_a_stop_string_that_is_a_special_token_ends_every_choice_at_it(roomy: Stage, ignore_eos: bool) -> None:
    end = roomy.prompts.tokenizer.token_id("<|im_start|>")
    assert end is not None
    roomy.engine.script = (delta(70), delta(71, end, index=1, finish="stop"))
    parts = await roomy.run(with_choice(n=2, stop=("END", "<|im_start|>"), stop_token_ids=(9,), ignore_eos=ignore_eos))
    own = () if ignore_eos else roomy.prompts.eos_ids
    assert [submit.sampling.stop_token_ids for submit in roomy.engine.submits] == [(*own, 9, end)] * 2
    ends = [part.piece.end for part in parts if part.piece.end is not None]
    assert [end.reason for end in ends] == ["stop", "stop"]
    for choice in (0, 1):
        text = "".join(part.piece.text for part in parts if part.choice == choice)
        assert text == roomy.prompts.tokenizer.decode((70, 71))


async def test_a_part_of_a_special_token_is_an_ordinary_stop_string(stage: Stage) -> None:
    await stage.run(with_choice(stop=("<|im", "|>", "<tool call>")))
    assert stage.engine.submits[0].sampling.stop_token_ids == stage.prompts.eos_ids


async def test_bad_words_are_cut_alone_and_after_a_space(stage: Stage) -> None:
    await stage.run(with_choice(bad_words=("fox", " lazy")))
    words = stage.engine.submits[0].sampling.bad_words
    encode = stage.prompts.tokenizer.encode
    assert words == tuple(encode(text, add_special_tokens=False) for text in ("fox", " fox", "lazy", " lazy"))


async def test_a_grammar_is_checked_before_anything_is_queued_or_loaded(stage: Stage) -> None:
    for constraint in (Constraint("json", "{nonsense"), Constraint("regex", "(?=a)b"), Constraint("grammar", "start: none")):
        with pytest.raises(InvalidArgumentError) as caught:
            await stage.run(with_choice(constraint=constraint))
        assert [violation.field for violation in caught.value.violations] == [f"sampling.structured_outputs.{constraint.kind}"]
    assert (stage.engine.submits, stage.loader.claims) == ([], [])
    assert stage.generator.num_streams == 0


async def test_the_engine_gets_the_grammar_and_the_token_that_ends_it(stage: Stage) -> None:
    await stage.run(with_choice(constraint=Constraint("regex", "[ab]+")))
    sampling = stage.engine.submits[0].sampling
    assert "[ab]+" in sampling.grammar
    assert sampling.stop_token_ids == (0,)
    with pytest.raises(InvalidArgumentError, match="ignore_eos"):
        await stage.run(with_choice(constraint=Constraint("regex", "[ab]+"), ignore_eos=True))
    assert len(stage.engine.submits) == 1


@pytest.mark.parametrize(("asked", "cap", "given"), [(80, 50, 50), (20, 50, 20), (-9, 0, -9), (1, 0, 0)])
async def test_a_priority_is_capped_by_the_key_and_the_answer_says_so(stage: Stage, asked: int, cap: int, given: int) -> None:
    found = answer(resolution(1))
    stage.says = Answer(replace(found.caller, max_priority=cap), found.outcome)
    parts = await stage.run(replace(REQUEST, priority=asked))
    assert stage.engine.submits[0].priority == given
    assert parts[0].served is not None
    assert parts[0].served.priority == given
