"""A whole data plane over a tiny real model, with a control plane of the test's own."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dataplane.node import Node
from dataplane.settings import Settings
from tests.dataplane.doubles import FolderSource
from tests.dataplane.frontend.conftest import CHAT, train_byte_level
from tests.fixtures.adapters import make_adapter_folder, write_safetensors
from veneer.artifact import BaseDescription
from veneer.controlplane.v1 import bases_pb2, bases_pb2_grpc, nodes_pb2, nodes_pb2_grpc
from veneer.dataplane.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc

TENANT, OPERATOR = "vnr_" + "T" * 43, "vnr_" + "O" * 43

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS, VOCAB = 32, 48, 4, 2, 2, 421


def digest_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def bearer(secret: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {secret}"),)


def save_model(folder: Path) -> None:
    """Writes a random Llama with a tokenizer and a template."""
    train_byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": HIDDEN,
                "intermediate_size": INNER,
                "num_attention_heads": HEADS,
                "num_key_value_heads": KV_HEADS,
                "num_hidden_layers": LAYERS,
                "vocab_size": VOCAB,
                "max_position_embeddings": 256,
                "rms_norm_eps": 1e-5,
                "rope_theta": 10000.0,
                "tie_word_embeddings": True,
                "eos_token_id": 0,
            }
        )
    )
    random = np.random.default_rng(3)
    kv = HIDDEN * KV_HEADS // HEADS
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (HIDDEN,),
            prefix + "post_attention_layernorm.weight": (HIDDEN,),
            prefix + "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            prefix + "self_attn.k_proj.weight": (kv, HIDDEN),
            prefix + "self_attn.v_proj.weight": (kv, HIDDEN),
            prefix + "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            prefix + "mlp.gate_proj.weight": (INNER, HIDDEN),
            prefix + "mlp.up_proj.weight": (INNER, HIDDEN),
            prefix + "mlp.down_proj.weight": (HIDDEN, INNER),
        }
    tensors = {}
    for name, shape in shapes.items():
        values = (random.standard_normal(shape) * 0.2 + (len(shape) == 1)).astype("<f4")
        tensors[name] = ("F32", shape, values.tobytes())
    write_safetensors(folder / "model.safetensors", tensors, metadata={"format": "pt"})


class ControlPlane(nodes_pb2_grpc.NodeServiceServicer, bases_pb2_grpc.BaseServiceServicer):
    """A control plane with one tenant, one operator and one adapter."""

    def __init__(self, base: BaseDescription, folder: Path) -> None:
        self.source = FolderSource(make_adapter_folder(folder, base, ranks=4, scale=3.0), base_digest=base.digest)
        self.state = "READY"
        self.changes: list[nodes_pb2.Change] = []
        self.store_is_away = False
        self.enrolled = 0
        self.operators: list[bytes] = []
        self.usage: list[nodes_pb2.UsageEntry] = []

    def add_to(self, server: grpc.aio.Server) -> None:
        """Has a server serve it."""
        nodes_pb2_grpc.add_NodeServiceServicer_to_server(self, server)
        bases_pb2_grpc.add_BaseServiceServicer_to_server(self, server)

    async def ListBases(self, request: Any, context: Any) -> Any:
        return bases_pb2.ListBasesResponse()

    async def EnrollNode(self, request: Any, context: Any) -> Any:
        self.enrolled += 1
        return nodes_pb2.EnrollNodeResponse(secret="node-key")

    async def Resolve(self, request: Any, context: Any) -> Any:
        if request.key_digest != digest_of(TENANT):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no valid credential")
        response = nodes_pb2.ResolveResponse()
        response.caller.MergeFrom(
            nodes_pb2.Caller(tenant="acme", roles=["caller"], fallback_allowed=True, weight=1, cache_salt=b"s" * 32)
        )
        if not request.target.adapter:
            response.resolution.SetInParent()
        elif request.target.adapter != "bot":
            response.refusal = nodes_pb2.REFUSAL_REASON_NOT_FOUND
        elif self.state != "READY":
            response.refusal = nodes_pb2.REFUSAL_REASON_QUARANTINED
        else:
            response.resolution.MergeFrom(nodes_pb2.Resolution(owner="acme", adapter="bot", alias="stable", generation=1))
            response.resolution.arms.add(digest=self.source.version, number=1, weight=1, max_rank=4, state="READY")
        return response

    async def Introspect(self, request: Any, context: Any) -> Any:
        kinds = {digest_of(TENANT): "tenant", digest_of(OPERATOR): "operator", digest_of("node-key"): "node"}
        if request.key_digest not in kinds:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no valid credential")
        return nodes_pb2.IntrospectResponse(kind=kinds[request.key_digest], key_id="id")

    async def GrantBlobs(self, request: Any, context: Any) -> Any:
        self.operators.append(request.operator_key_digest)
        if self.store_is_away:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        if request.version != self.source.version or self.state != "READY":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such version")
        grant = self.source.grant
        blobs = [nodes_pb2.Blob(name=blob.name, digest=blob.digest, size_bytes=blob.size_bytes) for blob in grant.blobs]
        return nodes_pb2.GrantBlobsResponse(grant="grant", blobs=blobs, base_digest=grant.base_digest, owner=grant.owner)

    async def ReadBlob(self, request: Any, context: Any) -> AsyncIterator[Any]:
        (name,) = (blob.name for blob in self.source.grant.blobs if blob.digest == request.digest)
        yield nodes_pb2.ReadBlobResponse(data=self.source.files[name][request.offset :])

    async def ReportUsage(self, request: Any, context: Any) -> Any:
        self.usage += request.entries
        return nodes_pb2.ReportUsageResponse(last_sequence=request.last_sequence)

    async def ListChanges(self, request: Any, context: Any) -> Any:
        place = int(request.cursor or len(self.changes))
        return nodes_pb2.ListChangesResponse(changes=self.changes[place:], next_cursor=str(len(self.changes)))


class Rig:
    """A running node with stubs for its callers and operators."""

    def __init__(self, node: Node, plane: ControlPlane) -> None:
        self.node = node
        self.plane = plane
        addresses = node.server.addresses
        assert addresses is not None
        self.addresses = addresses
        self.callers = grpc.aio.insecure_channel(addresses.callers)
        self.operators = grpc.aio.insecure_channel(addresses.operators)
        self.admin: Any = admin_pb2_grpc.AdminServiceStub(self.operators)
        self._generation: Any = generation_pb2_grpc.GenerationServiceStub(self.callers)

    def call(
        self, *, key: str = TENANT, max_tokens: int = 8, n: int = 1, headers: tuple[tuple[str, str], ...] = (), **fields: Any
    ) -> Any:
        request = generation_pb2.GenerateRequest(
            text="the quick brown fox",
            sampling=generation_pb2.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, n=n),
            **fields,
        )
        return self._generation.Generate(request, metadata=(*bearer(key), *headers))

    async def read(self, **fields: Any) -> tuple[generation_pb2.Served, list[int], generation_pb2.Finish]:
        responses = [response async for response in self.call(**fields)]
        ids = [id_ for response in responses for id_ in response.chunk.ids]
        return responses[0].served, ids, responses[-1].finish

    async def residency(self) -> admin_pb2.GetResidencyResponse:
        response: admin_pb2.GetResidencyResponse = await self.admin.GetResidency(
            admin_pb2.GetResidencyRequest(), metadata=bearer(OPERATOR)
        )
        return response

    async def health(self) -> int:
        stub: Any = health_pb2_grpc.HealthStub(self.callers)
        status: int = (await stub.Check(health_pb2.HealthCheckRequest())).status
        return status

    async def until_health(self, status: int) -> None:
        async with asyncio.timeout(60):
            while await self.health() != status:  # noqa: ASYNC110  a caller can only ask
                await asyncio.sleep(0.01)

    async def is_idle(self) -> bool:
        state = (await self.residency()).engine
        return state.running == state.waiting == state.kv_pages_used == state.leases == 0


BOT = {"adapter": generation_pb2.AdapterRef(adapter="bot")}


def settings_for(model_dir: Path, folder: Path, control_plane: str, **changes: Any) -> Settings:
    fields: dict[str, Any] = {
        "model_dir": model_dir,
        "dtype": "float32",
        "num_threads": 1,
        "kv_bytes": 4 << 20,
        "arena_bytes": 1 << 20,
        "arena_unit_bytes": 4096,
        "max_sequences": 8,
        "max_step_tokens": 64,
        "max_step_rank_rows": 256,
        "control_plane": control_plane,
        "node_key_file": folder / "node.key",
        "enrollment_token": "token",
        "cache_folder": folder / "cache",
        "host_cache_bytes": 16 << 20,
        "load_timeout_s": 0.5,
        "poll_interval_s": 0.05,
        "listen_callers": "127.0.0.1:0",
        "listen_operators": "127.0.0.1:0",
        "listen_metrics": "127.0.0.1:0",
    }
    return Settings(**(fields | changes))


@asynccontextmanager
async def run_node(node: Node, plane: ControlPlane) -> AsyncIterator[Rig]:
    """A node from its start to its stop."""
    try:
        await node.start()
        rig = Rig(node, plane)
        yield rig
        await rig.callers.close()
        await rig.operators.close()
    finally:
        await node.stop()
