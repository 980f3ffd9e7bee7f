"""A request is bound once, answered once, and gives everything back however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest

from dataplane.binding import Served
from dataplane.choices import Choice
from dataplane.fallback import FallbackMode, FallbackReason
from dataplane.frontend.prompts import TextPrompt, TokenPrompt
from dataplane.quotas import Amounts, Demand, Leased, Quotas
from dataplane.resolution import Refusal, Target, TenantQuotas
from tests.dataplane.doubles import BASE, OTHER, VERSION, answer, caller, delta, resolution, until
from tests.dataplane.stage import REQUEST, Stage, hang_after_first_token, hang_in_engine, hang_in_load
from veneer.call_records import collect_facts
from veneer.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)


async def test_the_first_part_says_what_is_served_and_the_last_how_it_ended(stage: Stage) -> None:
    parts = await stage.run()
    assert parts[0].served == Served("mine", BASE, VERSION, "acme", "bot", 1, "stable", 1, 0)
    assert all(part.served is None for part in parts[1:])
    assert [id_ for part in parts for id_ in part.piece.ids] == [70, 71, 72]
    assert parts[-1].piece.end is not None
    assert (parts[-1].piece.end.prompt_tokens, parts[-1].piece.end.completion_tokens) == (3, 3)
    assert stage.holds_nothing()


async def test_the_engine_hears_of_the_tenant_the_version_and_the_rest_of_the_deadline(stage: Stage) -> None:
    choice = Choice(max_tokens=7, temperature=0.5, seed=11, stop_token_ids=(9, 0))
    await stage.run(replace(REQUEST, deadline_s=5, choice=choice))
    (submit,) = stage.engine.submits
    assert (submit.tenant, submit.version, submit.prompt, submit.weight) == ("acme", VERSION, (5, 6), 1)
    assert submit.deadline_s is not None
    assert 4 < submit.deadline_s <= 5
    sampling = submit.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (7, 0.5, 11)
    assert sampling.stop_token_ids == (0, 9)


async def test_the_log_line_of_a_request_says_what_became_of_it(stage: Stage) -> None:
    facts = collect_facts()
    served = await stage.served(replace(REQUEST, request_id="r-7", choice=Choice(n=2)))
    assert facts == {
        "request_id": "r-7", "owner": "acme", "adapter": "bot", "alias": "stable", "version": served.version, "version_number": 1,
        "fallback": "", "prompt_tokens": 2, "cached_tokens": 0, "output_tokens": 6, "finish_reason": "length,length",
    }  # fmt: skip


async def test_the_log_line_of_a_refused_request_says_what_was_asked_for(stage: Stage) -> None:
    stage.says = UnavailableError("the control plane is unreachable")
    facts = collect_facts()
    with pytest.raises(UnavailableError):
        await stage.run(replace(REQUEST, target=Target("bot", "acme", "", VERSION)))
    assert facts["request_id"]
    assert (facts["adapter"], facts["owner"], facts["version"]) == ("bot", "acme", VERSION)
    assert (facts["output_tokens"], facts["finish_reason"]) == (0, "")


async def test_the_log_line_of_a_fallback_names_the_adapter_and_why_it_did_not_answer(stage: Stage) -> None:
    stage.says = answer(Refusal.NOT_FOUND)
    facts = collect_facts()
    await stage.run(replace(REQUEST, target=Target("nothing"), fallback=FallbackMode.ANY))
    assert (facts["adapter"], facts["version"], facts["fallback"]) == ("nothing", "", "not_found")
    assert facts["finish_reason"] == "length"


async def test_ignore_eos_leaves_only_the_callers_own_stop_tokens(stage: Stage) -> None:
    await stage.run(replace(REQUEST, choice=Choice(ignore_eos=True, stop_token_ids=(9,))))
    assert stage.engine.submits[0].sampling.stop_token_ids == (9,)


async def test_equal_request_identifiers_do_not_meet_in_the_engine(stage: Stage) -> None:
    await asyncio.gather(stage.run(), stage.run())
    first, second = stage.engine.submits
    assert first.request_id != second.request_id


async def test_without_a_seed_every_request_draws_its_own(stage: Stage) -> None:
    await stage.run()
    await stage.run()
    first, second = stage.engine.submits
    assert first.sampling.seed != second.sampling.seed


async def test_the_cache_salt_parts_sub_salts_and_does_not_show_the_tenants_secret(stage: Stage) -> None:
    for sub_salt in (b"", b"a", b"b", b"a"):
        await stage.run(replace(REQUEST, sub_salt=sub_salt))
    salts = [submit.cache_salt for submit in stage.engine.submits]
    assert salts[1] == salts[3]
    assert len(set(salts)) == 3
    assert (b"s" * 32).hex() not in salts


async def test_the_same_unit_gets_the_same_arm_and_says_so(stage: Stage) -> None:
    stage.says = answer(resolution(1, 1))
    arms = {(await stage.served(replace(REQUEST, split_unit="eve", request_id=str(number)))).arm for number in range(20)}
    assert len(arms) == 1
    drawn = [await stage.served(replace(REQUEST, request_id=str(number))) for number in range(40)]
    assert {served.version for served in drawn} == {VERSION, OTHER}
    assert not any(served.sticky for served in drawn)
    assert (await stage.served(replace(REQUEST, split_unit="eve"))).sticky


async def test_the_base_itself_is_no_fallback(stage: Stage) -> None:
    stage.says = answer(resolution())
    served = await stage.served(replace(REQUEST, target=Target()))
    assert served == Served("mine", BASE)
    assert stage.loader.claims == []


@pytest.mark.parametrize("mode", list(FallbackMode))
async def test_an_arm_that_is_not_ready_is_never_replaced(stage: Stage, mode: FallbackMode) -> None:
    stage.says = answer(resolution(1, state="QUARANTINED"))
    with pytest.raises(FailedPreconditionError):
        await stage.run(replace(REQUEST, fallback=mode))
    assert stage.engine.submits == []


async def test_a_quota_refuses_before_any_work_and_gives_back_what_was_not_used(stage: Stage) -> None:
    quotas, told = TenantQuotas(tokens=60, streams=1), list[Demand]()

    async def lease(demands: Sequence[Demand]) -> Leased:
        told.extend(demands)
        return Leased({"acme": Amounts(requests=0, tokens=60, streams=1)}, 6.0)

    stage.quotas = Quotas(lease)
    stage.generator = stage.build()
    keeper = asyncio.create_task(stage.quotas.run())
    stage.says = replace(answer(resolution(1)), caller=caller(quotas=quotas, ticket=b"t"))
    with pytest.raises(ResourceExhaustedError, match="max_streams: 2 streams are asked for, the quota allows 1"):
        await stage.run(replace(REQUEST, choice=Choice(n=2, max_tokens=4)))
    with pytest.raises(ResourceExhaustedError, match="max_tokens_per_minute: 62 tokens are asked for"):
        await stage.run(replace(REQUEST, choice=Choice(max_tokens=60)))
    assert stage.engine.submits == []

    for _ in range(10):  # each uses two tokens of the prompt and three of its forty
        await stage.run(replace(REQUEST, choice=Choice(max_tokens=8)))
    with pytest.raises(ResourceExhaustedError, match="60 tokens in all") as refusal:
        await stage.run(replace(REQUEST, choice=Choice(max_tokens=20)))
    assert refusal.value.retry_after_s is not None
    assert len(stage.engine.submits) == 10
    assert (told[0].ticket, told[0].held["tokens"]) == (b"t", 0)
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)
    assert stage.holds_nothing()


async def test_what_a_request_used_is_noted_once_and_before_its_caller_hears_of_the_end(stage: Stage) -> None:
    stage.says = answer(resolution(1, ticket=b"v"), ticket=b"c")
    async with aclosing(stage.generator.run(REQUEST)) as parts:
        async for part in parts:
            assert len(stage.uses) == (part.piece.end is not None)
    (use,) = stage.uses
    assert use[:6] == ("acme", "acme", "bot", VERSION, b"v".hex(), "OK")
    assert use[7:] == (2, 0, 3)

    hang_in_engine(stage)
    task = asyncio.create_task(stage.run())
    await until(lambda: len(stage.engine.submits) == 2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert stage.uses[1][1:] == ("acme", "bot", VERSION, b"v".hex(), "CANCELLED", stage.uses[1].unix_s, 2, 0, 0)
    stage.says = answer(Refusal.NOT_FOUND)
    with pytest.raises(NotFoundError):
        await stage.run()
    assert len(stage.uses) == 2  # what was never admitted used nothing


async def test_an_unknown_adapter_is_answered_by_the_base_under_any(stage: Stage) -> None:
    stage.says = answer(Refusal.NOT_FOUND)
    served = await stage.served(replace(REQUEST, fallback=FallbackMode.ANY))
    assert served == Served("mine", BASE, fallback=FallbackReason.NOT_FOUND)
    assert stage.engine.submits[0].version is None
    with pytest.raises(NotFoundError, match=r"^no such adapter, alias or version$"):
        await stage.run(replace(REQUEST, fallback=FallbackMode.NOT_READY))


async def test_the_version_starts_where_the_prompt_last_invokes_it(stage: Stage) -> None:
    stage.says = answer(resolution(1, invocation=(8, 9)))
    served = await stage.served(replace(REQUEST, prompt=TokenPrompt((8, 9, 1, 8, 9, 1)), choice=Choice(n=2)))
    assert (served.version, served.fallback) == (VERSION, None)
    assert [(submit.version, submit.active_from) for submit in stage.engine.submits] == [(VERSION, 3)] * 2


async def test_the_invocation_is_sought_among_the_tokens_of_a_text(stage: Stage) -> None:
    text = TextPrompt("the quick brown fox")
    ids = (await stage.prompts.prepare(text, max_tokens=1)).ids
    stage.says = answer(resolution(1, invocation=ids[2:4]))
    await stage.run(replace(REQUEST, prompt=text))
    assert stage.engine.submits[0].active_from == 2


@pytest.mark.parametrize("mode", list(FallbackMode))
@pytest.mark.parametrize("allowed", [True, False])
async def test_a_prompt_that_does_not_invoke_its_adapter_is_answered_by_the_base(
    stage: Stage, mode: FallbackMode, allowed: bool
) -> None:
    stage.says = answer(resolution(1, invocation=(9,)), fallback_allowed=allowed)
    served = await stage.served(replace(REQUEST, fallback=mode))
    assert served == Served("mine", BASE, fallback=FallbackReason.NOT_INVOKED)
    assert [(submit.version, submit.active_from) for submit in stage.engine.submits] == [(None, 0)]
    assert stage.loader.claims == [], "nothing is loaded for it"
    assert stage.counter("veneer_fallbacks_total", reason="not_invoked", by="base") == 1
    assert stage.holds_nothing()


async def test_a_version_that_may_not_be_served_is_refused_though_the_prompt_does_not_invoke_it(stage: Stage) -> None:
    stage.says = answer(resolution(1, state="QUARANTINED", invocation=(9,)))
    with pytest.raises(FailedPreconditionError):
        await stage.run()


async def test_the_base_takes_over_from_the_first_token_on(stage: Stage) -> None:
    stage.says = answer(resolution(1, invocation=(6,)))
    stage.loader.ready = False
    stage.engine.gates[VERSION] = asyncio.Event()
    running = asyncio.create_task(stage.served(replace(REQUEST, fallback=FallbackMode.NOT_READY)))
    await until(lambda: stage.loader.claims)
    stage.loader.claims[0].loaded.set_exception(UnavailableError("the store cannot be read"))
    assert (await running).fallback is FallbackReason.NOT_READY
    assert [(submit.version, submit.active_from) for submit in stage.engine.submits] == [(VERSION, 1), (None, 0)]


@pytest.mark.parametrize("mode", list(FallbackMode))
async def test_a_load_that_fails_ends_the_request_or_lets_the_base_answer(stage: Stage, mode: FallbackMode) -> None:
    stage.loader.ready = False
    stage.engine.gates[VERSION] = asyncio.Event()
    running = asyncio.create_task(stage.run(replace(REQUEST, fallback=mode)))
    await until(lambda: stage.loader.claims)
    stage.loader.claims[0].loaded.set_exception(UnavailableError("the store cannot be read"))
    if mode is FallbackMode.FAIL:
        with pytest.raises(UnavailableError, match="not loaded yet"):
            await running
        assert stage.engine.submits == []
        assert stage.holds_nothing()
        return
    if mode in (FallbackMode.NONE, FallbackMode.PREVIOUS):  # there is no version before it
        with pytest.raises(UnavailableError, match="the store cannot be read"):
            await running
    else:
        assert (await running)[0].served == Served("mine", BASE, fallback=FallbackReason.NOT_READY)
        assert [submit.version for submit in stage.engine.submits] == [VERSION, None]
    assert stage.engine.aborted == [stage.engine.submits[0].request_id]
    assert stage.holds_nothing()


@pytest.mark.parametrize("deadline_s", [None, 0.2])
async def test_a_load_that_takes_too_long_lets_the_base_answer_in_time(stage: Stage, deadline_s: float | None) -> None:
    stage.loader.ready = False
    stage.limits = replace(stage.limits, fallback_after_s=0.02 if deadline_s is None else 30)
    stage.generator = stage.build()
    stage.engine.gates[VERSION] = asyncio.Event()
    served = await stage.served(replace(REQUEST, fallback=FallbackMode.NOT_READY, deadline_s=deadline_s))
    assert served.fallback is FallbackReason.NOT_READY


async def test_a_tenant_that_forbids_fallback_waits_for_its_version(stage: Stage) -> None:
    stage.loader.ready = False
    stage.limits = replace(stage.limits, fallback_after_s=0.001)
    stage.generator = stage.build()
    stage.says = answer(resolution(1), fallback_allowed=False)
    gate = stage.engine.gates[VERSION] = asyncio.Event()
    running = asyncio.create_task(stage.served(replace(REQUEST, fallback=FallbackMode.ANY)))
    done, _ = await asyncio.wait({running}, timeout=0.05)
    assert not done
    gate.set()
    assert (await running).version == VERSION


async def test_an_engine_failure_before_the_first_token_is_the_whole_answer(stage: Stage) -> None:
    stage.engine.script = (ResourceExhaustedError("too large for KV"),)
    with pytest.raises(ResourceExhaustedError):
        await stage.run(replace(REQUEST, fallback=FallbackMode.ANY))
    assert stage.holds_nothing()


async def test_an_engine_failure_after_the_first_token_is_an_error_too(stage: Stage) -> None:
    stage.engine.script = (delta(70), UnavailableError("the engine ended"))
    with pytest.raises(UnavailableError):
        await stage.run()
    assert stage.holds_nothing()


async def test_nobody_without_a_key_reaches_tokenizer_or_engine(stage: Stage) -> None:
    stage.says = UnauthenticatedError("no valid credential")
    with pytest.raises(UnauthenticatedError):
        await stage.run(replace(REQUEST, prompt=TextPrompt("x" * 100_000)))
    assert stage.engine.submits == []


async def test_a_prompt_that_does_not_fit_gives_its_place_back(stage: Stage) -> None:
    with pytest.raises(InvalidArgumentError):
        await stage.run(replace(REQUEST, prompt=TokenPrompt((5,) * 64)))
    assert stage.holds_nothing()


@pytest.mark.parametrize("hang", [hang_in_engine, hang_in_load, hang_after_first_token])
async def test_a_caller_that_leaves_frees_everything(stage: Stage, hang: Callable[[Stage], None]) -> None:
    hang(stage)
    running = asyncio.create_task(stage.run())
    await until(lambda: stage.engine.submits and (hang is not hang_after_first_token or stage.engine.num_taken))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert stage.engine.aborted == [stage.engine.submits[0].request_id]
    assert stage.holds_nothing()


async def test_a_caller_that_stops_reading_frees_the_engine_and_learns_why_when_it_reads_again(stage: Stage) -> None:
    stage.limits = replace(stage.limits, max_buffer_bytes=1, slow_reader_s=0.02)
    stage.generator = stage.build()
    stage.engine.script = tuple(delta(70, index=place) for place in range(1000))
    async with aclosing(stage.generator.run(REQUEST)) as parts:
        await anext(parts)
        await until(lambda: stage.engine.aborted)
        assert stage.engine.num_taken < 10
        with pytest.raises(ResourceExhaustedError, match="was not read"):
            async for _ in parts:
                pass
    assert stage.holds_nothing()


async def test_streams_are_bounded_for_the_node_and_for_each_tenant(stage: Stage) -> None:
    hang_in_engine(stage)
    running = [asyncio.create_task(stage.run()) for _ in range(2)]
    await until(lambda: len(stage.engine.submits) == 2)
    with pytest.raises(ResourceExhaustedError, match="the tenant runs 2 streams"):
        await stage.run()
    stage.says = replace(answer(resolution(1)), caller=replace(answer(resolution(1)).caller, tenant="other"))
    running.append(asyncio.create_task(stage.run()))
    await until(lambda: len(stage.engine.submits) == 3)
    with pytest.raises(ResourceExhaustedError, match="the node runs 3 streams"):
        await stage.run()
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert stage.holds_nothing()


async def test_a_draining_node_refuses_and_waits_for_what_runs(stage: Stage) -> None:
    hang_in_engine(stage)
    running = asyncio.create_task(stage.run())
    await until(lambda: stage.engine.submits)
    stage.generator.draining = True
    with pytest.raises(UnavailableError, match="draining"):
        await stage.run()
    waiting = asyncio.create_task(stage.generator.wait_idle())
    await asyncio.sleep(0)
    assert not waiting.done()
    stage.engine.gates[VERSION].set()
    await running
    await waiting
