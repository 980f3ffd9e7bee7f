"""The engine end to end, over its message interface."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from dataplane.engine.client import EngineClient
from dataplane.engine.messages import NotFinite, Sampling, Submit
from dataplane.lora.holdings import TenantLimitError
from tests.dataplane.engine.serving import PROMPTS, Make, collect, idle, request, until
from veneer.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
)


@pytest.mark.parametrize(("in_process", "stepping"), [(True, "serial"), (False, "serial"), (False, "overlapped")])
async def test_requests_stream_the_tokens_of_a_plain_forward_pass(
    started: Any, plain: Any, *, in_process: bool, stepping: str
) -> None:
    client = await started(in_process=in_process, stepping=stepping)
    outputs = await asyncio.gather(*(collect(client, request(str(i), prompt)) for i, prompt in enumerate(PROMPTS)))
    assert outputs == [plain.greedy(prompt, 8) for prompt in PROMPTS]
    state = await idle(client)
    seconds = dict(state.seconds)
    assert {"receive", "schedule", "run", "commit", "emit"} <= seconds.keys()
    assert sum(seconds[part] for part in ("fill", "forward", "sample")) > 0
    assert stepping == "overlapped" or sum(seconds[part] for part in ("fill", "forward", "sample")) <= seconds["run"]


@pytest.mark.parametrize(
    ("step_tokens", "stepping"), [(8, "serial"), (9, "overlapped"), (16, "serial"), (64, "serial"), (64, "overlapped")]
)
@pytest.mark.parametrize("page_size", [1, 7, 16])
async def test_neither_chunks_nor_pages_nor_preemption_nor_overlap_change_tokens(
    started: Any, plain: Any, step_tokens: int, stepping: str, page_size: int
) -> None:
    page_bytes = 2 * 2 * page_size * 32 * 4
    client = await started(
        max_step_tokens=step_tokens,
        stepping=stepping,
        page_size=page_size,
        kv_bytes=page_bytes * (128 // page_size + 2),
        max_context=72,
    )
    outputs = await asyncio.gather(*(collect(client, request(str(i), prompt, max_tokens=20)) for i, prompt in enumerate(PROMPTS)))
    assert outputs == [plain.greedy(prompt, 20) for prompt in PROMPTS]
    await idle(client)


async def test_nan_left_in_a_freed_page_reaches_nobody(started: Any, plain: Any) -> None:
    client: EngineClient = await started(kv_bytes=10 * 2 * 2 * 16 * 32 * 4, max_context=100)
    await collect(client, request("warm", PROMPTS[2]))
    runner = client._link._engine._runner  # type: ignore[attr-defined]
    runner.kv.data[1:] = float("nan")
    outputs = await asyncio.gather(*(collect(client, request(str(i), PROMPTS[i])) for i in (0, 2)))
    assert outputs == [plain.greedy(PROMPTS[i], 8) for i in (0, 2)]


async def test_a_request_whose_values_are_not_finite_fails_alone(started: Any, plain: Any, adapters: Any) -> None:
    client: EngineClient = await started()
    reports: list[NotFinite] = []
    client.on_not_finite = reports.append
    client.stage("v2", adapters["v2"][0])
    await collect(client, request("warm", [3], version="v2"))
    arena = client._link._engine._runner.arena  # type: ignore[attr-defined]
    arena.tensor.fill_(3e38)
    arena.descriptors.epoch += 1
    bad, good = await asyncio.gather(
        collect(client, request("bad", [3], version="v2")), collect(client, request("good", PROMPTS[0])), return_exceptions=True
    )
    assert isinstance(bad, InternalError)
    assert good == plain.greedy(PROMPTS[0], 8)
    assert reports == [NotFinite("v2", "bad")]
    await idle(client)


@pytest.mark.parametrize(("in_process", "stepping"), [(True, "serial"), (False, "serial"), (True, "overlapped")])
async def test_leaving_a_stream_frees_everything(started: Any, *, in_process: bool, stepping: str) -> None:
    client: EngineClient = await started(in_process=in_process, stepping=stepping, max_sequences=2, max_step_tokens=2)
    streams = [client.submit(request(str(i), [1] * 100, max_tokens=100)) for i in range(3)]
    readers = [asyncio.create_task(anext(stream)) for stream in streams]  # type: ignore[arg-type]
    await until(client, lambda state: state.running == 2 and state.waiting == 1)
    for reader in readers[1:]:
        reader.cancel()
    await until(client, lambda state: state.running == 1)
    await readers[0]
    await streams[0].aclose()  # type: ignore[attr-defined]
    await idle(client)
    assert client._streams == {}


async def test_a_deadline_ends_a_request_that_waits_for_its_adapter(started: Any) -> None:
    client: EngineClient = await started()
    with pytest.raises(DeadlineExceededError):
        await collect(client, request("a", [1], version="nowhere", deadline_s=0.05))
    await idle(client)


async def test_a_limit_of_the_tenant_is_told_from_a_fault_of_the_version(started: Any) -> None:
    client: EngineClient = await started()
    with pytest.raises(TenantLimitError, match="takes 64 rank rows; its tenant may have 16 and uses 0"):
        await collect(client, request("a", [1], version="large", rank=64, max_rank_rows=16))
    await idle(client)


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (request("a", []), "prompt"),
        (request("a", [1] * 256), "prompt"),
        (request("a", [160]), "prompt"),
        (request("a", [-1]), "prompt"),
        (request("a", [1], max_tokens=0), "max_tokens"),
        (request("a", [1], sampling=Sampling(max_tokens=1, temperature=float("nan"))), "temperature"),
        (request("a", [1], sampling=Sampling(max_tokens=1, top_p=0.0)), "top_p"),
        (request("a", [1], sampling=Sampling(max_tokens=1, min_p=2.0)), "min_p"),
        (request("a", [1], sampling=Sampling(max_tokens=1, top_k=-1)), "top_k"),
        (request("a", [1], sampling=Sampling(max_tokens=1, repetition_penalty=0.0)), "repetition_penalty"),
    ],
)
async def test_bad_requests_name_the_field_and_leave_the_engine_alone(started: Any, bad: Submit, field: str) -> None:
    client: EngineClient = await started()
    with pytest.raises(InvalidArgumentError, match=field):
        await collect(client, bad)
    assert len(await collect(client, request("b", [1] * 255))) == 1


@pytest.mark.parametrize("sampling", [{"temperature": 0.9, "seed": 4}, {"temperature": 0.0, "repetition_penalty": 1.7}])
async def test_sampled_tokens_are_the_same_alone_among_others_and_after_preemption(started: Any, sampling: Any) -> None:
    alone: EngineClient = await started(batch_invariant=True)
    crowded: EngineClient = await started(
        batch_invariant=True, max_step_tokens=8, kv_bytes=13 * 2 * 2 * 16 * 32 * 4, max_context=100
    )
    settings = Sampling(max_tokens=30, **sampling)
    want = await collect(alone, request("a", [9, 8, 7], sampling=settings))
    others = [request(str(i), PROMPTS[i % 5], sampling=Sampling(max_tokens=40, seed=i)) for i in range(7)]
    got, *_ = await asyncio.gather(*(collect(crowded, job) for job in (request("a", [9, 8, 7], sampling=settings), *others)))
    assert got == want
    assert len(set(want)) > 5


@pytest.mark.parametrize("stepping", ["serial", "overlapped"])
async def test_a_fault_in_the_shared_part_ends_every_stream_unavailable(
    started: Any, monkeypatch: pytest.MonkeyPatch, stepping: str
) -> None:
    client: EngineClient = await started(stepping=stepping)
    deaths: list[bool] = []
    client.on_death = lambda: deaths.append(True)

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(client._link._engine._runner, "run", fail)  # type: ignore[attr-defined]
    results = await asyncio.gather(*(collect(client, request(str(i), [1])) for i in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [UnavailableError] * 3
    with pytest.raises(UnavailableError):
        await client.state()
    assert deaths == [True]
    assert not client.is_alive


async def test_a_killed_engine_ends_every_stream_unavailable(started: Any) -> None:
    client: EngineClient = await started(in_process=False)
    assert client.pid is not None
    stream = client.submit(request("a", [1] * 50, max_tokens=200))
    await anext(stream)  # type: ignore[arg-type]
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(UnavailableError):
        async for _ in stream:
            pass
    with pytest.raises(UnavailableError):
        await collect(client, request("b", [1]))


async def test_an_engine_on_the_processor_gives_way_to_other_processes(started: Any) -> None:
    client: EngineClient = await started(in_process=False)
    assert client.pid is not None
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, client.pid) == min(19, niceness + 5)


async def test_stopping_ends_running_requests_unavailable_and_the_process(started: Any) -> None:
    client: EngineClient = await started(in_process=False)
    stream = client.submit(request("a", [1] * 50, max_tokens=200))
    await anext(stream)  # type: ignore[arg-type]
    await client.stop()
    with pytest.raises(UnavailableError):
        async for _ in stream:
            pass
    assert client._link._process.returncode == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("in_process", [True, False])
async def test_a_start_that_cannot_work_is_refused_with_its_reason(tiny_config: Make, *, in_process: bool) -> None:
    with pytest.raises(FailedPreconditionError, match="do not fit into memory"):
        await EngineClient.start(tiny_config(kv_bytes=1 << 50), in_process=in_process)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("sampling.frequency_penalty", {"frequency_penalty": 2.5}),
        ("sampling.presence_penalty", {"presence_penalty": float("nan")}),
        ("sampling.logit_bias", {"logit_bias": tuple((i, 1.0) for i in range(301))}),
        ("sampling.logit_bias", {"logit_bias": ((160, 1.0),)}),
        ("sampling.logit_bias[4]", {"logit_bias": ((4, float("inf")),)}),
        ("sampling.min_tokens", {"min_tokens": 6}),
        ("sampling.bad_words[0]", {"bad_words": ((),)}),
        ("sampling.bad_words[1]", {"bad_words": ((1,), (160,))}),
        ("sampling.logprobs", {"logprobs": 21}),
        ("sampling.prompt_logprobs", {"prompt_logprobs": -1}),
    ],
)
async def test_rules_out_of_range_are_refused_by_name(started: Any, field: str, fields: dict[str, Any]) -> None:
    client = await started()
    with pytest.raises(InvalidArgumentError) as caught:
        await collect(client, request("r", [1, 2], sampling=Sampling(max_tokens=5, **fields)))
    assert field in caught.value.message
