"""A whole data plane over a tiny real model, with a control plane of the test's own."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from dataplane.catalog_client import EnrollmentError
from dataplane.node import Node
from tests.dataplane.doubles import until
from tests.dataplane.rig import BOT, OPERATOR, TENANT, ControlPlane, Rig, bearer, run_node, save_model, settings_for
from veneer.artifact import describe_base
from veneer.controlplane.v1 import nodes_pb2
from veneer.dataplane.v1 import admin_pb2, admin_pb2_grpc, generation_pb2
from veneer.errors import InvalidArgumentError


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return folder


@pytest.fixture
async def plane(model_dir: Path, tmp_path: Path) -> AsyncIterator[tuple[ControlPlane, str]]:
    made = ControlPlane(describe_base(model_dir), tmp_path / "adapter")
    server = grpc.aio.server()
    made.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield made, f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.fixture
async def rig(model_dir: Path, tmp_path: Path, plane: tuple[ControlPlane, str]) -> AsyncIterator[Rig]:
    node = Node(settings_for(model_dir, tmp_path, plane[1]), in_process=True)
    async with run_node(node, plane[0]) as made:
        yield made


async def test_base_and_adapter_answer_differently_and_say_who_they_are(rig: Rig) -> None:
    (base, base_ids, _), (bot, bot_ids, finish) = await asyncio.gather(rig.read(), rig.read(**BOT))
    assert (base.version, base.fallback) == ("", False)
    assert (bot.version, bot.adapter, bot.owner, bot.generation) == (rig.plane.source.version, "bot", "acme", 1)
    assert len(base_ids) == len(bot_ids) == finish.completion_tokens == 8
    assert base_ids != bot_ids
    assert (await rig.read(**BOT))[1] == bot_ids
    residency = await rig.residency()
    (version,) = residency.versions
    assert (version.version, version.tier, version.max_rank, version.leases) == (bot.version, admin_pb2.TIER_DEVICE, 4, 0)
    assert residency.mean_store_load_s > 0
    assert await rig.is_idle()


async def test_one_line_of_the_log_answers_what_became_of_a_request(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="veneer.interceptors")
    trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    await rig.read(**BOT, request_id="my-request", headers=(("traceparent", f"00-{trace}-{span}-01"),))
    leaving = rig.call(**BOT, max_tokens=200, request_id="left")
    await leaving.read()
    leaving.cancel()
    await until(lambda: rig.node.generator.num_streams == 0)
    with pytest.raises(grpc.aio.AioRpcError):
        await rig.read(adapter=generation_pb2.AdapterRef(adapter="nothing"), request_id="refused")
    lines = {vars(record)["request_id"]: vars(record) for record in caplog.records if record.message == "call ended"}
    line = lines["my-request"]
    wanted = {
        "method": "/veneer.dataplane.v1.GenerationService/Generate", "code": "OK", "tenant": "acme", "owner": "acme",
        "adapter": "bot", "alias": "stable", "version": rig.plane.source.version, "version_number": 1, "fallback": "",
        "output_tokens": 8, "finish_reason": "length", "trace_id": trace, "span_id": span,
    }  # fmt: skip
    assert {name: line[name] for name in wanted} == wanted
    assert line["prompt_tokens"] > 0
    left, refused = lines["left"], lines["refused"]
    assert (left["code"], left["finish_reason"], left["version"]) == ("CANCELLED", "", rig.plane.source.version)
    assert 0 < left["output_tokens"] < 200
    assert (refused["code"], refused["adapter"], refused["version"]) == ("NOT_FOUND", "nothing", "")
    said = str([vars(record) for record in caplog.records])
    assert "quick brown fox" not in said
    assert TENANT not in said


async def test_fallback_is_the_bases_own_answer(rig: Rig) -> None:
    nothing = {"adapter": generation_pb2.AdapterRef(adapter="nothing")}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.read(**nothing)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    served, ids, _ = await rig.read(**nothing, fallback=generation_pb2.FALLBACK_MODE_ANY)
    assert (served.fallback, served.fallback_reason) == (True, generation_pb2.FALLBACK_REASON_NOT_FOUND)
    assert ids == (await rig.read())[1]


async def test_a_store_that_is_away_costs_only_those_who_need_it(rig: Rig) -> None:
    rig.plane.store_is_away = True
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.read(**BOT)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    served, _, _ = await rig.read(**BOT, fallback=generation_pb2.FALLBACK_MODE_NOT_READY)
    assert served.fallback_reason == generation_pb2.FALLBACK_REASON_NOT_READY
    await until(lambda: rig.node.prefetcher.num_loads == 0)
    (failing,) = (await rig.residency()).failing
    assert (failing.version, failing.state, failing.status) == (
        rig.plane.source.version,
        admin_pb2.CIRCUIT_STATE_FAILING,
        "UNAVAILABLE",
    )
    rig.plane.store_is_away = False
    assert (await rig.read(**BOT))[0].version == rig.plane.source.version
    assert list((await rig.residency()).failing) == []
    assert await rig.is_idle()


async def test_an_alias_that_moves_brings_its_version_where_the_adapter_was_asked_for_lately(rig: Rig) -> None:
    rig.plane.store_is_away = True
    for _ in range(2):  # known by its alias, though its version was never loaded
        with pytest.raises(grpc.aio.AioRpcError):
            await rig.read(**BOT, fallback=generation_pb2.FALLBACK_MODE_FAIL)
    await until(lambda: rig.node.prefetcher.num_loads == 0)
    rig.plane.store_is_away = False
    moved = nodes_pb2.Change(kind=nodes_pb2.CHANGE_KIND_ALIAS, tenant="acme", version=rig.plane.source.version)
    moved.adapter = "other"
    rig.plane.changes.append(moved)
    await until(lambda: rig.node.feed._cursor == str(len(rig.plane.changes)))
    assert rig.node.prefetcher.num_loads == 0
    moved.adapter = "bot"
    rig.plane.changes.append(moved)
    await until(lambda: rig.plane.source.version in rig.node.cache)
    served, _, _ = await rig.read(**BOT, fallback=generation_pb2.FALLBACK_MODE_FAIL)
    assert (served.version, served.fallback) == (rig.plane.source.version, False)


async def test_a_quarantined_version_is_refused_and_its_bytes_go(rig: Rig) -> None:
    await rig.read(**BOT)
    rig.plane.state = "QUARANTINED"
    rig.plane.changes.append(
        nodes_pb2.Change(kind=nodes_pb2.CHANGE_KIND_VERSION, tenant="acme", adapter="bot", version=rig.plane.source.version)
    )
    await until(lambda: not rig.node.cache.versions())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.read(**BOT, fallback=generation_pb2.FALLBACK_MODE_ANY)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    residency = await rig.residency()
    assert list(residency.versions) == []
    assert residency.engine.arena_bytes_used == 0


async def test_a_caller_that_leaves_frees_everything(rig: Rig) -> None:
    call = rig.call(**BOT, max_tokens=200)
    await call.read()
    call.cancel()
    await until(lambda: rig.node.generator.num_streams == 0)
    assert await rig.is_idle()


async def test_operators_and_tenants_keep_to_their_listeners(rig: Rig) -> None:
    for key, code in ((TENANT, "PERMISSION_DENIED"), ("vnr_" + "X" * 43, "UNAUTHENTICATED")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.admin.GetResidency(admin_pb2.GetResidencyRequest(), metadata=bearer(key))
        assert caught.value.code().name == code
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.read(key=OPERATOR)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    stub: Any = admin_pb2_grpc.AdminServiceStub(rig.callers)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GetResidency(admin_pb2.GetResidencyRequest(), metadata=bearer(OPERATOR))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_drained_node_lets_streams_end_and_takes_no_more(rig: Rig) -> None:
    call = rig.call(max_tokens=100)
    await call.read()
    assert (await rig.admin.Drain(admin_pb2.DrainRequest(), metadata=bearer(OPERATOR))).remaining == 0
    assert await rig.health() == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.read()
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNAVAILABLE, "the node is draining")
    while (response := await call.read()) is not grpc.aio.EOF:
        last = response
    assert last.finish.completion_tokens == 100


async def test_the_metrics_page_has_the_names_that_routers_read(rig: Rig) -> None:
    await rig.read(**BOT)

    def page() -> str:
        with urllib.request.urlopen(f"http://{rig.addresses.metrics}/metrics") as response:
            return str(response.read().decode())

    running = f'running_lora_adapters="{rig.plane.source.version}"'
    async with asyncio.timeout(60):
        while running not in (text := await asyncio.to_thread(page)):  # noqa: ASYNC110  the figures are taken once a second
            await asyncio.sleep(0.05)
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "num_requests_waiting_by_reason",
        "request_queue_time_seconds_bucket",
        "kv_cache_usage_perc",
        "lora_requests_info",
    ):
        assert f"vllm:{name}{{" in text
    assert TENANT not in text


async def test_a_full_queue_refuses_with_a_time_to_come_back_and_without_any_header(
    model_dir: Path, tmp_path: Path, plane: tuple[ControlPlane, str]
) -> None:
    settings = settings_for(model_dir, tmp_path, plane[1], max_waiting_per_tenant=1, load_timeout_s=60)
    async with run_node(Node(settings, in_process=True), plane[0]) as rig:
        rig.plane.store_is_away = True
        waits = rig.call(**BOT)
        async with asyncio.timeout(60):
            while (await rig.residency()).engine.waiting != 1:  # noqa: ASYNC110  a caller can only ask
                await asyncio.sleep(0.01)
        call = rig.call()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "wait already" in str(caught.value.details())
        assert list(await call.initial_metadata()) == []
        assert int(dict(await call.trailing_metadata())["grpc-retry-pushback-ms"]) > 0
        waits.cancel()


async def test_a_restarted_node_uses_its_kept_key_and_its_host_images(
    model_dir: Path, tmp_path: Path, plane: tuple[ControlPlane, str]
) -> None:
    settings = settings_for(model_dir, tmp_path, plane[1])
    async with run_node(Node(settings, in_process=True), plane[0]) as rig:
        before = (await rig.read(**BOT))[1]
    again = settings.model_copy(update={"enrollment_token": None})
    async with run_node(Node(again, in_process=True), plane[0]) as rig:
        plane[0].store_is_away = True
        assert (await rig.read(**BOT))[1] == before
    assert plane[0].enrolled == 1


async def test_a_node_without_key_and_token_does_not_start(
    model_dir: Path, tmp_path: Path, plane: tuple[ControlPlane, str]
) -> None:
    node = Node(settings_for(model_dir, tmp_path, plane[1], enrollment_token=None), in_process=True)
    with pytest.raises(EnrollmentError):
        await node.start()
    await node.stop()


async def test_plaintext_to_a_control_plane_beyond_loopback_is_refused(model_dir: Path, tmp_path: Path) -> None:
    node = Node(settings_for(model_dir, tmp_path, "control.internal:7600"), in_process=True)
    with pytest.raises(InvalidArgumentError, match="control_plane"):
        await node.start()
    await node.stop()


async def test_an_engine_that_is_killed_ends_its_streams_unavailable_and_comes_back(
    model_dir: Path, tmp_path: Path, plane: tuple[ControlPlane, str]
) -> None:
    async with run_node(Node(settings_for(model_dir, tmp_path, plane[1])), plane[0]) as rig:
        before = (await rig.read(**BOT))[1]
        call = rig.call(max_tokens=200)
        await call.read()
        client = rig.node.supervisor._client
        assert client is not None
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await rig.until_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while True:
                assert await call.read() is not grpc.aio.EOF
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await until(lambda: rig.node.supervisor._client is not None)
        async with asyncio.timeout(60):
            while (await rig.residency()).versions[0].tier != admin_pb2.TIER_HOST:  # noqa: ASYNC110  an operator can only ask
                await asyncio.sleep(0.01)
        assert (await rig.read(**BOT))[1] == before
        await rig.until_health(health_pb2.HealthCheckResponse.SERVING)


async def test_what_requests_used_is_told_with_what_the_prefix_cache_saved(rig: Rig) -> None:
    for _ in range(2):
        await rig.read(**BOT, max_tokens=40)
    await rig.read(max_tokens=3)
    await until(lambda: sum(one.requests for one in rig.plane.usage) == 3)
    of_bot = [one for one in rig.plane.usage if one.adapter == "bot"]
    of_base = [one for one in rig.plane.usage if not one.adapter]
    assert {(one.tenant, one.owner, one.version) for one in of_bot} == {("acme", "acme", rig.plane.source.version)}
    assert sum(one.output_tokens for one in of_bot) == 80
    assert sum(one.failed_requests for one in rig.plane.usage) == 0
    prompt = of_base[0].prompt_tokens
    assert sum(one.prompt_tokens for one in of_bot) == 2 * prompt
    assert sum(one.cached_tokens for one in of_bot) == (prompt - 1) // 16 * 16
