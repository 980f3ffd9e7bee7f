"""The engine end to end, over its message interface."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataplane.engine.client import EngineClient
from dataplane.engine.config import EngineConfig
from dataplane.engine.messages import Delta, Moved, NotFinite, Sampling, State, Submit
from dataplane.engine.runner import model_features
from dataplane.lora.image import ImagePair, build_image, write_image
from veneer.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)

Make = Callable[..., EngineConfig]
PROMPTS = [[1, 2, 3], [40] * 20, list(range(5, 50)), [7], [99, 98, 97, 96, 95]]


def request(name: str, prompt: list[int], *, max_tokens: int = 8, **fields: Any) -> Submit:
    sampling = fields.pop("sampling", Sampling(max_tokens=max_tokens, temperature=0.0))
    return Submit(request_id=name, tenant=fields.pop("tenant", "t"), prompt=tuple(prompt), sampling=sampling, **fields)


async def collect(client: EngineClient, submit: Submit) -> list[int]:
    ids: list[int] = []
    async for delta in client.submit(submit):
        assert delta.index == len(ids)
        ids += delta.ids
    return ids


def assert_idle(state: State) -> None:
    assert (state.running, state.waiting, state.kv_pages_used, state.leases) == (0, 0, 0, 0)


async def until(client: EngineClient, condition: Callable[[State], bool]) -> State:
    async with asyncio.timeout(120):
        while not condition(state := await client.state()):
            pass
    return state


@pytest.fixture
async def started(tiny_config: Make) -> AsyncIterator[Callable[..., Any]]:
    clients: list[EngineClient] = []

    async def start(*, in_process: bool = True, **changes: Any) -> EngineClient:
        clients.append(await EngineClient.start(tiny_config(**changes), in_process=in_process))
        return clients[-1]

    yield start
    for client in clients:
        await client.stop()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, plain: Any) -> dict[str, Any]:
    """Three adapters of other ranks and modules: image paths, and the merged model of each."""
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(5)
    features = model_features(plain.config)
    names = ["self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"]
    made: dict[str, Any] = {}
    for version, rank, slices in (("v1", 3, range(7)), ("v2", 16, (0, 2)), ("v3", 1, (6,))):
        pairs, weights = [], dict(plain.weights)
        for layer in range(plain.config.num_layers):
            for index in slices:
                a = generator.standard_normal((rank, features[index][0])).astype(np.float32) * 0.3
                b = generator.standard_normal((features[index][1], rank)).astype(np.float32) * 0.3
                pairs.append(ImagePair(layer, index, 0.5, a, b))
                name = f"model.layers.{layer}.{names[index]}_proj.weight"
                weights[name] = weights[name] + 0.5 * torch.from_numpy(b @ a)
        image = build_image(
            pairs, version=version, base_digest="base", dtype="float32", num_layers=plain.config.num_layers, num_slices=7
        )
        write_image(folder / version, image)
        made[version] = (folder / version, type(plain)(plain.config, weights))
    return made


@pytest.mark.parametrize(("in_process", "stepping"), [(True, "serial"), (False, "serial"), (False, "overlapped")])
async def test_requests_stream_the_tokens_of_a_plain_forward_pass(
    started: Any, plain: Any, *, in_process: bool, stepping: str
) -> None:
    client = await started(in_process=in_process, stepping=stepping)
    outputs = await asyncio.gather(*(collect(client, request(str(i), prompt)) for i, prompt in enumerate(PROMPTS)))
    assert outputs == [plain.greedy(prompt, 8) for prompt in PROMPTS]
    state = await client.state()
    assert_idle(state)
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
    assert_idle(await client.state())


@pytest.mark.parametrize("stepping", ["serial", "overlapped"])
async def test_a_mixed_batch_gives_each_row_its_own_adapter(started: Any, plain: Any, adapters: Any, stepping: str) -> None:
    client: EngineClient = await started(stepping=stepping)
    moved: list[Moved] = []
    client.on_moved = moved.append
    client.on_wanted = lambda wanted: client.stage(wanted.version, adapters[wanted.version][0])
    versions = [None, "v1", "v2", "v3", "v1", None, "v2"]
    jobs = [request(str(i), PROMPTS[i % 5], max_tokens=24, version=version) for i, version in enumerate(versions)]
    outputs = await asyncio.gather(*(collect(client, job) for job in jobs))
    for i, version in enumerate(versions):
        model = plain if version is None else adapters[version][1]
        assert outputs[i] == model.greedy(PROMPTS[i % 5], 24), version
    state = await client.state()
    assert_idle(state)
    assert {(item.version, item.place) for item in moved} == {(version, "device") for version in ("v1", "v2", "v3")}
    assert state.max_adapters_in_step >= 2
    assert (state.store_loads, state.device_hits) == (5, 0)
    assert outputs[1] != plain.greedy(PROMPTS[1], 24)


async def test_more_adapters_than_slots_take_turns(started: Any, adapters: Any) -> None:
    client: EngineClient = await started(max_slots=1)
    for version, (path, _) in adapters.items():
        client.stage(version, path)
    jobs = [request(f"{version}{i}", [5, 6, 7], version=version) for i in range(3) for version in adapters]
    outputs = await asyncio.gather(*(collect(client, job) for job in jobs))
    for job, output in zip(jobs, outputs, strict=True):
        assert output == adapters[job.version][1].greedy([5, 6, 7], 8)
    state = await client.state()
    assert_idle(state)
    assert state.evictions >= 2


async def test_a_flood_of_adapters_keeps_no_other_tenant_off_the_device_and_loses_no_token(
    started: Any, plain: Any, adapters: Any
) -> None:
    client: EngineClient = await started(max_slots=2, max_sequences=16, quantum_tokens=16)
    for version, (path, _) in adapters.items():
        client.stage(version, path)
    floods = [request(f"x{i}", [i, 2, 3], max_tokens=60, version=f"v{1 + i % 2}", tenant="x") for i in range(16)]
    ended: list[str] = []

    async def run(job: Submit) -> list[int]:
        output = await collect(client, job)
        ended.append(job.tenant)
        return output

    running = [asyncio.create_task(run(job)) for job in floods]
    await until(client, lambda state: state.leases >= 6)
    mine = await run(request("v", [9, 8, 7], max_tokens=4, version="v3", tenant="v"))
    assert ended.index("v") < 8, "it waited for no more than a few steps and a load"
    assert mine == adapters["v3"][1].greedy([9, 8, 7], 4)
    outputs = await asyncio.gather(*running)
    for job, output in zip(floods, outputs, strict=True):
        assert output == adapters[job.version][1].greedy(list(job.prompt), 60)
    state = await client.state()
    assert_idle(state)
    assert state.evictions >= 1


async def test_a_corrupt_image_is_reported_and_a_good_copy_helps(started: Any, adapters: Any, tmp_path: Path) -> None:
    client: EngineClient = await started()
    bad = bytearray(adapters["v1"][0].read_bytes())
    bad[-5] ^= 1
    (tmp_path / "bad").write_bytes(bad)
    moved: list[Moved] = []
    sent: list[Path] = []

    def send(_: object) -> None:
        sent.append(adapters["v1"][0] if sent else tmp_path / "bad")
        client.stage("v1", sent[-1])

    client.on_moved, client.on_wanted = moved.append, send
    assert await collect(client, request("a", [5, 6], version="v1")) == adapters["v1"][1].greedy([5, 6], 8)
    assert [item.place for item in moved] == ["corrupt", "device"]
    assert len(sent) == 2


async def test_a_version_that_cannot_be_had_ends_its_requests_with_the_given_status(started: Any) -> None:
    client: EngineClient = await started()
    client.on_wanted = lambda wanted: client.fail(wanted.version, status="NOT_FOUND", message="gone")
    with pytest.raises(NotFoundError, match="gone"):
        await collect(client, request("a", [1], version="nowhere"))
    assert_idle(await client.state())


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
    assert_idle(await client.state())


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
    assert_idle(await until(client, lambda state: state.running == 0))
    assert client._streams == {}


async def test_a_deadline_ends_a_request_that_waits_for_its_adapter(started: Any) -> None:
    client: EngineClient = await started()
    with pytest.raises(DeadlineExceededError):
        await collect(client, request("a", [1], version="nowhere", deadline_s=0.05))
    assert_idle(await client.state())


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
    alone: EngineClient = await started()
    crowded: EngineClient = await started(max_step_tokens=8, kv_bytes=13 * 2 * 2 * 16 * 32 * 4, max_context=100)
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


async def collect_deltas(client: EngineClient, submit: Submit) -> list[Delta]:
    return [delta async for delta in client.submit(submit)]


@pytest.mark.parametrize("in_process", [True, False])
async def test_logprobs_of_prompt_and_output_are_the_models_own(tiny_config: Make, plain: Any, in_process: bool) -> None:
    client = await EngineClient.start(tiny_config(), in_process=in_process)
    prompt = [int(token) for token in torch.randint(160, (150,), generator=torch.Generator().manual_seed(3))]
    sampling = Sampling(max_tokens=5, temperature=0.0, logprobs=2, prompt_logprobs=3, frequency_penalty=0.5)
    neighbours = [asyncio.create_task(collect(client, request(f"n{i}", prompt[: 20 + i], max_tokens=30))) for i in range(3)]
    deltas = await collect_deltas(client, request("scored", prompt, sampling=sampling))
    ids = [id_ for delta in deltas for id_ in delta.ids]
    want = plain.logits([*prompt, *ids]).log_softmax(-1)
    scores = deltas[0].prompt_logprobs
    assert not any(delta.prompt_logprobs for delta in deltas[1:])
    assert [one.logprob for one in scores] == pytest.approx([float(want[i, prompt[i + 1]]) for i in range(149)], abs=1e-3)
    assert [[token for token, _ in one.top] for one in scores] == want[:149].topk(3).indices.tolist()
    reported = [one for delta in deltas for one in delta.logprobs]
    assert [one.logprob for one in reported] == pytest.approx([float(want[149 + i, id_]) for i, id_ in enumerate(ids)], abs=1e-3)
    assert all(len(one.top) == 2 for one in reported)
    for i, neighbour in enumerate(neighbours):
        assert await neighbour == plain.greedy(prompt[: 20 + i], 30)
    assert_idle(await client.state())
    await client.stop()


async def test_scores_are_whole_after_a_preemption(tiny_config: Make, plain: Any) -> None:
    """Two long prompts share few pages: one is sent back while it is scored or later, and reports every token once."""
    page = 16
    client = await EngineClient.start(tiny_config(kv_bytes=(11 + 1) * 2 * 2 * page * 32 * 4, max_context=170), in_process=True)
    prompts = [[int(t) for t in torch.randint(160, (70,), generator=torch.Generator().manual_seed(i))] for i in range(2)]
    sampling = Sampling(max_tokens=60, temperature=0.0, prompt_logprobs=0, logprobs=0)
    runs = await asyncio.gather(
        *(collect_deltas(client, request(f"r{i}", prompt, sampling=sampling)) for i, prompt in enumerate(prompts))
    )
    for prompt, deltas in zip(prompts, runs, strict=True):
        ids = [id_ for delta in deltas for id_ in delta.ids]
        assert ids == plain.greedy(prompt, 60)
        want = plain.logits(prompt).log_softmax(-1)
        scores = [one.logprob for delta in deltas for one in delta.prompt_logprobs]
        assert scores == pytest.approx([float(want[i, prompt[i + 1]]) for i in range(69)], abs=1e-3)
        assert sum(len(delta.logprobs) for delta in deltas) == 60
    await client.stop()


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
