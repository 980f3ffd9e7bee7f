"""Bad uploads over the wire, through the real jail: a typed refusal that lists every fault, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import pickle
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psycopg
import pytest

from controlplane.intake import JailedChecks
from controlplane.service import ControlPlane
from controlplane.settings import Settings
from controlplane.vault import open_vault
from tests.e2e.conftest import Connect, Publish, Secrets
from tests.e2e.driving import generate, until
from tests.fixtures.adapters import Tensors, encode, make_adapter_folder, write_safetensors
from veneer.artifact import BaseDescription
from veneer.channel import bearer
from veneer.client import Client
from veneer.controlplane.v1 import catalog_pb2, catalog_pb2_grpc
from veneer.errors import InvalidArgumentError
from veneer.local.stack import ALL_ROLES, LocalStack
from veneer.statuses import error_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_STEM = "base_model.model.model.layers.{layer}.self_attn.{module}.lora_{part}.weight"
MUCH_MEMORY = b'{"target_modules": [' + b"[]," * 340_000 + b"[]]}"
"""A configuration of the largest size that is allowed; parsed, it takes twenty times as much."""

Q0A, Q0B, Q1B, V1A = (
    _STEM.format(layer=layer, module=module, part=part)
    for layer, module, part in ((0, "q_proj", "A"), (0, "q_proj", "B"), (1, "q_proj", "B"), (1, "v_proj", "A"))
)


class _Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self._path,)


def _reshape(name: str, shape: tuple[int, ...]) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[name] = ("F32", shape, bytes(4 * int(np.prod(shape))))

    return edit


def _poison(value: float) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        for name in (Q0B, V1A):
            _, shape, data = tensors[name]
            values = np.frombuffer(data, "<f4").copy()
            values[1] = value
            tensors[name] = ("F32", shape, encode(values, "F32"))

    return edit


def _add_strangers(tensors: Tensors) -> None:
    tensors["base_model.model.lm_head.weight"] = ("F32", (2, 2), bytes(16))
    tensors["optimizer.step"] = ("F32", (1,), bytes(4))


def _drop_partners(tensors: Tensors) -> None:
    del tensors[Q0A], tensors[Q1B]


def _many_faults(tensors: Tensors) -> None:
    _drop_partners(tensors)
    _poison(float("nan"))(tensors)
    tensors["optimizer.step"] = ("F32", (1,), bytes(4))


def _raw(weights: Path, header: bytes, *, length: int | None = None) -> None:
    weights.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header)


def _repeat_key(weights: Path) -> None:
    data = weights.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = data[8 : 8 + length]
    first = json.dumps({Q0A: json.loads(header)[Q0A]})[:-1].encode()
    doubled = first + b", " + header[1:]
    weights.write_bytes(struct.pack("<Q", len(doubled)) + doubled + data[8 + length :])


def _nest(config: Path) -> None:
    config.write_bytes(b'{"rank_pattern": ' + b'{"a":' * 150_000 + b"1" + b"}" * 150_000 + b"}")


def _swell(config: Path) -> None:
    config.write_bytes(MUCH_MEMORY)


def _choke_on_pattern(config: Path) -> None:
    fields = json.loads(config.read_text())
    fields["rank_pattern"] = {"(((((a{1,999}){1,999}){1,999}){1,999}){1,999})": 8}
    config.write_text(json.dumps(fields))


@dataclass(frozen=True, slots=True)
class Bad:
    """One way to be wrong.

    Attributes:
        expected: For each fault, text that its field and description must hold between them.
        edit: Changes the tensors.
        config: Fields of the configuration that are wrong.
        weights: Changes the weights' file.
        text: Changes the configuration's file.
    """

    expected: tuple[str, ...]
    edit: Callable[[Tensors], None] | None = None
    config: dict[str, Any] | None = None
    weights: Callable[[Path], None] | None = None
    text: Callable[[Path], None] | None = None


BAD = {
    "a truncated file": Bad(("is truncated",), weights=lambda path: path.write_bytes(path.read_bytes()[:-100])),
    "a file cut inside its header": Bad(("is truncated",), weights=lambda path: path.write_bytes(path.read_bytes()[:50])),
    "a file of eight bytes": Bad(("too few",), weights=lambda path: path.write_bytes(bytes(8))),
    "bytes after the last tensor": Bad(
        ("after the last tensor",), weights=lambda path: path.write_bytes(path.read_bytes() + b"x")
    ),
    "two wrong shapes": Bad(
        (Q0A, V1A), edit=lambda tensors: (_reshape(Q0A, (8, 63))(tensors), _reshape(V1A, (8, 65))(tensors))[0]
    ),
    "NaN in two tensors": Bad((Q0B, V1A), edit=_poison(float("nan"))),
    "infinity in two tensors": Bad((Q0B, V1A), edit=_poison(float("inf"))),
    "a value that no half can hold": Bad((Q0B, V1A), edit=_poison(1e30)),
    "empty tensors": Bad((Q0A, "empty"), edit=lambda tensors: _reshape(Q0A, (0, 64))(tensors)),
    "no tensor at all": Bad((_WEIGHTS,), edit=lambda tensors: tensors.clear()),
    "unknown tensors": Bad(("lm_head", "optimizer.step"), edit=_add_strangers),
    "two pairs with one half": Bad(("layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj"), edit=_drop_partners),
    "a header that claims gigabytes": Bad(("header of",), weights=lambda path: _raw(path, b"{}", length=1 << 40)),
    "a header over the limit": Bad(("header of",), weights=lambda path: _raw(path, b"{" + b" " * (5 << 20) + b"}")),
    "a header with a key twice": Bad((Q0A,), weights=_repeat_key),
    "a header that is no JSON": Bad((_WEIGHTS,), weights=lambda path: _raw(path, b"{nonsense}")),
    "another kind of adapter": Bad(("peft_type",), config={"peft_type": "IA3"}),
    "a rank of nothing and no alpha": Bad(("r", "lora_alpha"), config={"r": 0, "lora_alpha": "much"}),
    "a configuration nested without end": Bad((_CONFIG,), text=_nest),
    "a configuration that swells": Bad((f"{_CONFIG}: target_modules",), text=_swell),
    "a pattern that blows up": Bad(("rank_pattern",), text=_choke_on_pattern),
    "a configuration that is no text": Bad((_CONFIG,), text=lambda path: path.write_bytes(b"\xff\xfe\x00")),
    "faults of every kind at once": Bad(
        ("peft_type", f"{Q0B}': has no matching", "layers.1.self_attn.q_proj", "optimizer.step", f"{V1A}': has 1 elements"),
        edit=_many_faults,
        config={"peft_type": "IA3"},
    ),
}


@dataclass(frozen=True, slots=True)
class Traces:
    """All that publishing writes: rows of the catalogue, files of the store, files that wait for their check."""

    rows: dict[str, int]
    store: frozenset[str]
    spool: frozenset[str]


_TENANT = "uploader"


def traces(stack: LocalStack) -> Traces:
    """Rows of the tenant of these tests alone, since what other tests did goes on in the background; and all files."""
    with psycopg.connect(stack.postgres.url(scheme="postgresql"), autocommit=True) as connection:
        tables = ("adapters", "versions", "aliases", "arms", "requests", "changes")
        rows = {
            table: connection.execute(f"SELECT count(*) FROM {table} WHERE tenant = %s", (_TENANT,)).fetchone()[0]  # type: ignore[index, arg-type]
            for table in tables
        }
    files = [
        frozenset(str(path.relative_to(stack.folder)) for path in (stack.folder / name).rglob("*")) for name in ("store", "spool")
    ]
    return Traces(rows, *files)


@pytest.fixture(scope="module")
def secret(stack: LocalStack) -> str:
    """Key of a tenant for whom nothing else is published."""

    async def make() -> str:
        async with stack.operator() as operator:
            await operator.create_tenant(_TENANT)
            return str((await operator.create_key(tenant=_TENANT, roles=ALL_ROLES)).secret)

    return asyncio.run(make())


@pytest.fixture
async def uploader(connect: Connect, secret: str) -> Client:
    """That tenant."""
    return connect(secret)


@pytest.fixture
async def leaves_nothing(stack: LocalStack) -> AsyncIterator[None]:
    """Checks that the test left nothing in database, store and spool folder; others' files may go meanwhile."""
    before = await asyncio.to_thread(traces, stack)
    yield

    async def same() -> bool:
        after = await asyncio.to_thread(traces, stack)
        return after.rows == before.rows and after.store <= before.store and after.spool <= before.spool

    await until(same)


async def refusal(client: Client, folder: Path, base: BaseDescription) -> InvalidArgumentError:
    with pytest.raises(InvalidArgumentError) as caught:
        await client.publish(folder, adapter="bad", base=base.digest)
    return caught.value


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("name", BAD)
async def test_a_bad_upload_is_refused_with_every_fault(
    uploader: Client, model_base: BaseDescription, tmp_path: Path, name: str
) -> None:
    bad = BAD[name]
    folder = make_adapter_folder(tmp_path / "bad", model_base, edit=bad.edit, config=bad.config)
    if bad.weights is not None:
        bad.weights(folder / _WEIGHTS)
    if bad.text is not None:
        bad.text(folder / _CONFIG)
    error = await refusal(uploader, folder, model_base)
    assert error.violations
    listed = [str(violation) for violation in error.violations]
    for expected in bad.expected:
        assert any(expected in one for one in listed), (expected, listed)


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("form", ["pickle", "zip", "gguf"])
async def test_other_formats_are_refused_by_content_and_not_run(
    uploader: Client, model_base: BaseDescription, tmp_path: Path, form: str
) -> None:
    folder = make_adapter_folder(tmp_path / "bad", model_base)
    canary = tmp_path / "canary"
    pickled = pickle.dumps(_Bomb(canary))
    contents = {"pickle": pickled, "zip": b"PK\x03\x04" + pickled, "gguf": b"GGUF" + bytes(100)}
    (folder / _WEIGHTS).write_bytes(contents[form])
    error = await refusal(uploader, folder, model_base)
    assert [violation.field for violation in error.violations] == [_WEIGHTS]
    assert "only safetensors" in error.violations[0].description
    assert not canary.exists()


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("missing", [_CONFIG, _WEIGHTS])
async def test_half_an_adapter_is_refused_by_name(
    stack: LocalStack, secret: str, model_base: BaseDescription, tmp_path: Path, missing: str
) -> None:
    folder = make_adapter_folder(tmp_path / "half", model_base)
    files = {_CONFIG: catalog_pb2.ADAPTER_FILE_CONFIG, _WEIGHTS: catalog_pb2.ADAPTER_FILE_WEIGHTS}
    async with grpc.aio.insecure_channel(stack.state.control) as channel:
        call = catalog_pb2_grpc.CatalogServiceStub(channel).Publish(timeout=60, metadata=bearer(secret))
        await call.write(_header(model_base, "half"))
        for name, file in files.items():
            if name != missing:
                await call.write(_part(file, (folder / name).read_bytes()))
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
    error = error_of(caught.value)
    assert isinstance(error, InvalidArgumentError)
    assert [violation.field for violation in error.violations] == [missing]


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("way", ["cancelled", "cut off"])
async def test_an_interrupted_upload_leaves_nothing(
    stack: LocalStack, secret: str, model_base: BaseDescription, tmp_path: Path, way: str
) -> None:
    folder = make_adapter_folder(tmp_path / "adapter", model_base)
    channel = grpc.aio.insecure_channel(stack.state.control)
    call = catalog_pb2_grpc.CatalogServiceStub(channel).Publish(timeout=60, metadata=bearer(secret))
    await call.write(_header(model_base, "interrupted"))
    await call.write(_part(catalog_pb2.ADAPTER_FILE_CONFIG, (folder / _CONFIG).read_bytes()))
    await call.write(_part(catalog_pb2.ADAPTER_FILE_WEIGHTS, (folder / _WEIGHTS).read_bytes()[:1000]))

    async def arrived() -> bool:
        return any((stack.folder / "spool").rglob("*"))

    await until(arrived)
    if way == "cancelled":
        call.cancel()
    await channel.close()


async def test_the_same_publish_again_after_an_interruption_succeeds(
    stack: LocalStack, acme: Client, secrets: Secrets, model_base: BaseDescription, publish: Publish
) -> None:
    async with grpc.aio.insecure_channel(stack.state.control) as channel:
        call = catalog_pb2_grpc.CatalogServiceStub(channel).Publish(timeout=60, metadata=bearer(secrets.acme))
        await call.write(_header(model_base, "again"))
        call.cancel()
    published = await publish(acme, "L", adapter="again", request_id="again")
    assert published.version.number == 1
    assert (await generate(acme, "again")).text == "L" * 8


async def test_a_control_plane_that_refused_much_still_takes_what_is_sound(
    acme: Client, model_base: BaseDescription, tmp_path: Path, publish: Publish
) -> None:
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / _CONFIG).write_text("{}")
    write_safetensors(folder / _WEIGHTS, {})
    await asyncio.gather(*(refusal(acme, folder, model_base) for _ in range(4)))
    adapter = (await publish(acme, "K")).version.adapter
    assert (await generate(acme, adapter)).text == "K" * 8


def _header(base: BaseDescription, request_id: str) -> catalog_pb2.PublishRequest:
    header = catalog_pb2.PublishHeader(adapter="again", base=base.digest, request_id=request_id)
    return catalog_pb2.PublishRequest(header=header)


def _part(file: catalog_pb2.AdapterFile.ValueType, data: bytes) -> catalog_pb2.PublishRequest:
    return catalog_pb2.PublishRequest(part=catalog_pb2.PublishPart(file=file, data=data))


async def test_a_configuration_that_sends_the_parser_out_of_memory_is_refused(
    stack: LocalStack, model_base: BaseDescription, tmp_path: Path
) -> None:
    """Through the same jail with less memory: with what it has otherwise, no configuration of a size that is allowed does."""
    folder = make_adapter_folder(tmp_path / "bad", model_base)
    (folder / _CONFIG).write_bytes(MUCH_MEMORY)
    settings = Settings(
        database_url=stack.postgres.url(scheme="postgresql"),
        pepper_file=stack.folder / "pepper",
        store_url=(tmp_path / "store").as_uri(),
        listen_callers="127.0.0.1:0",
        listen_operators="127.0.0.1:0",
        listen_metrics="",
    )
    jail = JailedChecks(memory_bytes=16 << 20)
    plane = ControlPlane(settings, open_vault(settings), check=jail)
    async with jail, plane:
        addresses = await plane.server.start()
        async with Client(control=addresses.callers, key=stack.state.tenant_key) as client:
            error = await refusal(client, folder, model_base)
        await plane.server.stop(grace_s=0)
    assert [violation.field for violation in error.violations] == ["adapter"]
    assert "exceed its memory of 16777216 bytes" in error.violations[0].description
    assert not any((tmp_path / "store").iterdir())
