"""A caller that does not read, over real flow control and with the real engine: it holds up nobody but itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import save_file

from dataplane.access import RULES
from dataplane.engine.client import EngineClient
from dataplane.engine.config import EngineConfig
from dataplane.engine.messages import State
from dataplane.frontend.prompts import Prompts
from dataplane.generation import Generator, StreamLimits
from dataplane.metering import Metering
from dataplane.model.config import parse_config
from dataplane.model.decoder import weight_shapes
from dataplane.quotas import Quotas
from dataplane.resolution import Answer
from dataplane.resolve_cache import Key, ResolveCache
from dataplane.servicer import GenerationServicer
from tests.dataplane.doubles import BASE, answer, make_metrics, resolution
from tests.dataplane.engine.conftest import FIELDS
from tests.dataplane.frontend.conftest import train_byte_level
from tests.dataplane.stage import Entry, lease_nothing
from veneer.access import Authenticator, Identity
from veneer.dataplane.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc
from veneer.server import PlaneServer, ServerOptions, Service

KEY = (("authorization", "Bearer vnr_" + "A" * 43),)
MAX_TOKENS = 1000
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096))


class Nobody(Authenticator):
    async def authenticate(self, key_digest: bytes) -> Identity | None:
        return None


async def base_for_everyone(key: Key) -> Answer:
    return answer(resolution())


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long-context")
    fields = FIELDS | {"vocab_size": 512, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(fields))
    generator = torch.Generator().manual_seed(1)
    shapes = weight_shapes(parse_config(fields))
    save_file(
        {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}, folder / "model.safetensors"
    )
    train_byte_level().save(str(folder / "tokenizer.json"))
    return folder


class Rig:
    """A server of `Generate` in front of a real engine."""

    def __init__(self, engine: EngineClient, address: str) -> None:
        self.engine = engine
        self.address = address
        self.channels: list[grpc.aio.Channel] = []

    def stub(self, *options: tuple[str, int]) -> Any:
        self.channels.append(grpc.aio.insecure_channel(self.address, options=(*options, ("grpc.use_local_subchannel_pool", 1))))
        return generation_pb2_grpc.GenerationServiceStub(self.channels[-1])

    async def until_nothing_runs(self) -> State:
        """Waits until no step lies between two questions: the engine answers once a turn, and a turn runs what can run."""
        async with asyncio.timeout(60):
            last = await self.engine.state()
            while (state := await self.engine.state()).steps != last.steps:
                last = state
        return state


Start = Callable[..., Awaitable[Rig]]


@pytest.fixture
async def start(model_dir: Path) -> AsyncIterator[Start]:
    opened: list[Any] = []

    async def make(**limits: Any) -> Rig:
        engine = await EngineClient.start(
            EngineConfig(
                model_dir=str(model_dir), dtype="float32", num_threads=1, max_sequences=4, max_step_tokens=32,
                kv_bytes=16 << 20, arena_bytes=0, max_slots=1,
            ),
            in_process=True,
        )  # fmt: skip
        prompts = Prompts(model_dir, max_context=engine.ready.max_context, vocab_size=engine.ready.vocab_size)
        generator = Generator(
            metering=Metering(Quotas(lease_nothing), lambda: Entry([], [])),
            resolver=ResolveCache(base_for_everyone, soft_age_s=60), prompts=prompts, loader=None, engine=engine,
            metrics=make_metrics(), base_digest=BASE, limits=StreamLimits(**limits),
        )  # type: ignore[arg-type]  # fmt: skip
        generation = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
        admin = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
        server = PlaneServer(
            ServerOptions(callers="127.0.0.1:0", operators="127.0.0.1:0"),
            services=[
                Service(
                    generation,
                    partial(generation_pb2_grpc.add_GenerationServiceServicer_to_server, GenerationServicer(generator)),
                    ("callers",),
                ),
                Service(
                    admin,
                    partial(admin_pb2_grpc.add_AdminServiceServicer_to_server, admin_pb2_grpc.AdminServiceServicer()),
                    ("operators",),
                ),
            ],
            rules=RULES,
            authenticators={"callers": Nobody(), "operators": Nobody()},
        )
        rig = Rig(engine, (await server.start()).callers)
        opened.append((rig, server, engine, prompts))
        return rig

    yield make
    for rig, server, engine, prompts in opened:
        for channel in rig.channels:
            await channel.close()
        await server.stop(grace_s=0)
        await engine.stop()
        prompts.close()


def request(*, max_tokens: int, logprobs: int | None = None) -> generation_pb2.GenerateRequest:
    sampling = generation_pb2.SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=5, logprobs=logprobs, ignore_eos=True)
    return generation_pb2.GenerateRequest(tokens=generation_pb2.TokenPrompt(ids=[5, 6, 7]), sampling=sampling)


async def ids_of(call: Any, *, taken: int = 0) -> list[int]:
    ids: list[int] = []
    async for response in call:
        assert not response.HasField("chunk") or response.chunk.index == taken + len(ids)
        assert len(response.chunk.logprobs) in (0, len(response.chunk.ids))
        ids += response.chunk.ids
    return ids


async def test_a_slow_reader_pauses_its_own_sequence_and_still_gets_every_token(start: Start) -> None:
    rig = await start(slow_reader_s=120.0, max_buffer_tokens=32)
    call = rig.stub(*SMALL_WINDOW).Generate(request(max_tokens=MAX_TOKENS, logprobs=20), metadata=KEY)
    slow = aiter(call)
    first = await anext(slow)
    others = rig.stub()
    neighbours = await asyncio.gather(*(ids_of(others.Generate(request(max_tokens=200), metadata=KEY)) for _ in range(3)))
    state = await rig.until_nothing_runs()
    assert (state.running, state.waiting) == (1, 0), "the slow reader's sequence keeps its place"
    assert state.kv_pages_used > 0
    generated = state.generated_tokens - 3 * 200
    assert 0 < generated < MAX_TOKENS // 2, "little waits for a reader that is away"
    rest = await ids_of(slow, taken=len(first.chunk.ids))
    assert [*first.chunk.ids, *rest][:200] == neighbours[0] == neighbours[1] == neighbours[2]
    assert len(first.chunk.ids) + len(rest) == MAX_TOKENS
    assert (await rig.engine.state()).kv_pages_used == 0


async def test_a_reader_that_stays_away_loses_its_request_and_nothing_else(start: Start) -> None:
    rig = await start(slow_reader_s=0.5, max_buffer_tokens=32)
    call = rig.stub(*SMALL_WINDOW).Generate(request(max_tokens=MAX_TOKENS, logprobs=20), metadata=KEY)
    slow = aiter(call)
    first = await anext(slow)
    others = rig.stub()
    async with asyncio.timeout(60):
        while (await rig.engine.state()).running:
            assert len(await ids_of(others.Generate(request(max_tokens=50), metadata=KEY))) == 50
    state = await rig.engine.state()
    assert (state.waiting, state.kv_pages_used) == (0, 0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ids_of(slow, taken=len(first.chunk.ids))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "was not read" in (caught.value.details() or "")
