"""Probes on a whole data plane: what is measured of good, broken and peculiar versions, and when nothing is said at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from dataplane import folding, prober, store
from dataplane.engine.messages import Logprobs
from dataplane.lora.image import ImagePair
from dataplane.node import Node
from tests.dataplane.doubles import FolderSource, until
from tests.dataplane.rig import ControlPlane, Rig, run_node, save_model, settings_for
from tests.fixtures.adapters import Tensors, make_adapter_folder
from veneer.artifact import BaseDescription, describe_base
from veneer.controlplane.v1 import nodes_pb2, tenants_pb2


class ProbingPlane(ControlPlane):
    """A control plane that gives each probe once."""

    def __init__(self, base: BaseDescription, folder: Path) -> None:
        super().__init__(base, folder)
        self.base = base
        self.invocation: tuple[int, ...] = ()
        self.limits = tenants_pb2.TenantLimits()
        self.orders = 0
        self.taken: list[str] = []
        self.reports: list[nodes_pb2.ProbeMeasures] = []

    def publish(self, folder: Path) -> None:
        """Has a folder probed."""
        self.source = FolderSource(folder, base_digest=self.base.digest)
        self.orders += 1
        self.changes.append(nodes_pb2.Change(kind=nodes_pb2.CHANGE_KIND_PROBE, tenant="acme", version=self.source.version))

    async def TakeProbe(self, request: Any, context: Any) -> Any:
        self.taken.append(request.version)
        if not self.orders:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is none")
        self.orders -= 1
        return nodes_pb2.TakeProbeResponse(owner="acme", invocation_tokens=self.invocation, limits=self.limits)

    async def ReportProbe(self, request: Any, context: Any) -> Any:
        assert request.version == self.source.version
        self.reports.append(request.measures)
        return nodes_pb2.ReportProbeResponse()

    async def ReportVersion(self, request: Any, context: Any) -> Any:
        return nodes_pb2.ReportVersionResponse(quarantined=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return folder


@pytest.fixture
async def plane(model_dir: Path, tmp_path: Path) -> AsyncIterator[ProbingPlane]:
    made = ProbingPlane(describe_base(model_dir), tmp_path / "adapter")
    server = grpc.aio.server()
    made.add_to(server)
    made.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield made
    await server.stop(0)


@pytest.fixture
async def rig(model_dir: Path, tmp_path: Path, plane: ProbingPlane) -> AsyncIterator[Rig]:
    node = Node(settings_for(model_dir, tmp_path, plane.address), in_process=True)
    async with run_node(node, plane) as made:
        await until(lambda: node.feed._cursor)  # what changes from now on is seen
        yield made


async def probe(plane: ProbingPlane, folder: Path) -> nodes_pb2.ProbeMeasures:
    plane.publish(folder)
    await until(lambda: plane.reports)
    return plane.reports.pop()


def changed(change: Callable[[ImagePair], ImagePair]) -> Callable[..., Iterator[ImagePair]]:
    """What lays adapters out, with a change of every pair."""
    return lambda *arguments, **options: map(change, folding.image_pairs(*arguments, **options))


async def test_a_good_version_differs_from_the_base_and_agrees_with_its_files(
    rig: Rig, plane: ProbingPlane, tmp_path: Path
) -> None:
    modules = ("q_proj", "v_proj", "gate_proj", "down_proj")
    found = await probe(plane, make_adapter_folder(tmp_path / "good", plane.base, modules=modules, ranks=5, scale=3.0))
    assert (found.fault, found.finite, found.num_prompts, found.num_samples) == ("", True, 3, 6)
    assert found.num_tokens > 3
    assert found.max_difference > 0.01
    assert found.max_error <= found.tolerance
    assert await until_idle(rig)


@pytest.mark.parametrize(
    "change",
    [
        lambda pair: replace(pair, scaling=1.1 * pair.scaling),
        lambda pair: replace(pair, a=pair.a[::-1]),
        lambda pair: replace(pair, b=-pair.b),
    ],
    ids=["scaling", "order of rank rows", "sign"],
)
async def test_an_image_that_is_not_what_the_files_say_is_noticed(
    change: Callable[[ImagePair], ImagePair], rig: Rig, plane: ProbingPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "image_pairs", changed(change))
    found = await probe(plane, make_adapter_folder(tmp_path / "changed", plane.base, ranks=5))
    assert (found.finite, found.num_samples) == (True, 4)
    assert found.max_error > found.tolerance


async def test_values_that_are_not_finite_are_told(
    rig: Rig, plane: ProbingPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "image_pairs", changed(lambda pair: replace(pair, scaling=1e38)))
    found = await probe(plane, make_adapter_folder(tmp_path / "broken", plane.base, ranks=5, scale=3.0))
    assert (found.fault, found.finite) == ("", False)
    assert await until_idle(rig)


async def test_an_activated_adapter_is_invoked(rig: Rig, plane: ProbingPlane, tmp_path: Path) -> None:
    plane.invocation = (7, 8)
    config = {"alora_invocation_tokens": [7, 8]}
    found = await probe(plane, make_adapter_folder(tmp_path / "activated", plane.base, config=config, scale=3.0))
    assert (found.finite, found.max_difference > 0.01, found.max_error <= found.tolerance) == (True, True, True)


async def test_an_adapter_without_effect_is_the_base(rig: Rig, plane: ProbingPlane, tmp_path: Path) -> None:
    def zero(tensors: Tensors) -> None:
        for name, (dtype, shape, data) in tensors.items():
            if "lora_B" in name:
                tensors[name] = (dtype, shape, bytes(len(data)))

    found = await probe(plane, make_adapter_folder(tmp_path / "zero", plane.base, edit=zero))
    assert (found.finite, found.max_difference, found.max_error, found.num_samples) == (True, 0.0, 0.0, 4)


async def test_a_version_that_cannot_be_loaded_is_told_and_one_of_another_node_is_not(
    rig: Rig, plane: ProbingPlane, tmp_path: Path
) -> None:
    folder = make_adapter_folder(tmp_path / "large", plane.base, ranks=5)
    plane.source.files["adapter_model.safetensors"] = b"\0" * 8
    plane.publish(folder)
    plane.orders = 0
    await until(lambda: plane.taken)
    assert not plane.reports
    plane.publish(folder)
    plane.source.files["adapter_model.safetensors"] = b"\0" * len(plane.source.files["adapter_model.safetensors"])
    await until(lambda: plane.reports)
    assert plane.reports[0].fault.startswith("FAILED_PRECONDITION")


async def test_a_probe_that_breaks_off_leaves_the_next_one_its_turn(
    rig: Rig, plane: ProbingPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[Any] = []

    def break_off(stored: Any) -> Any:
        chosen.append(stored)
        raise ValueError("a bug")

    with monkeypatch.context() as broken:
        broken.setattr(prober, "_choose", break_off)
        plane.publish(make_adapter_folder(tmp_path / "broken", plane.base, ranks=5))
        await until(lambda: chosen)
    found = await probe(plane, make_adapter_folder(tmp_path / "next", plane.base, ranks=3, seed=9))
    assert (found.finite, plane.reports) == (True, [])


async def test_a_version_that_the_limits_of_its_tenant_do_not_admit_is_told(
    rig: Rig, plane: ProbingPlane, tmp_path: Path
) -> None:
    plane.limits = tenants_pb2.TenantLimits(max_host_bytes=1)
    found = await probe(plane, make_adapter_folder(tmp_path / "large", plane.base, ranks=5))
    assert found.fault.startswith("FAILED_PRECONDITION")
    plane.limits = tenants_pb2.TenantLimits(max_rank_rows=1)
    found = await probe(plane, make_adapter_folder(tmp_path / "high", plane.base, ranks=5, seed=2))
    assert found.fault.startswith("FAILED_PRECONDITION")


async def test_a_probe_has_its_places_among_the_streams_of_its_tenant(rig: Rig, plane: ProbingPlane, tmp_path: Path) -> None:
    generator = rig.node.generator
    limit = generator._limits.max_streams_per_tenant
    seen: list[int] = []

    def sees(self: Any, order: Any) -> Any:
        seen.append(generator.num_streams)
        return measure(self, order)

    measure = prober.Prober._measure
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prober.Prober, "_measure", sees)
        with generator.place("acme", limit):
            plane.publish(make_adapter_folder(tmp_path / "beyond", plane.base, ranks=5))
            await until(lambda: rig.node.prober._asked.empty() and rig.node.feed._cursor == str(len(plane.changes)))
            assert not plane.taken  # another node may
        with generator.place("rival", limit):
            found = await probe(plane, make_adapter_folder(tmp_path / "within", plane.base, ranks=3, seed=9))
    assert (found.finite, seen) == (True, [limit + 3])
    await until(lambda: generator.num_streams == 0)


async def test_a_token_that_lost_all_probability_is_told_as_not_finite(
    rig: Rig, plane: ProbingPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prober, "_difference", lambda run, base: (3, float("inf")))
    found = await probe(plane, make_adapter_folder(tmp_path / "huge", plane.base, ranks=5))
    assert (found.fault, found.finite, found.max_difference) == ("", False, 0.0)


@pytest.mark.parametrize("logprob", [float("-inf"), float("nan")])
def test_a_difference_that_is_no_number_is_infinite_wherever_it_stands(logprob: float) -> None:
    good, bad = Logprobs(-1.0, ((1, -1.0),)), Logprobs(logprob, ((1, -1.0),))
    for prompt in ((good, bad), (bad, good)):
        assert prober._difference(prober._Run(prompt, good), prober._Run((good, good), good)) == (3, float("inf"))


async def test_nothing_is_said_while_the_store_is_away(rig: Rig, plane: ProbingPlane, tmp_path: Path) -> None:
    plane.store_is_away = True
    plane.publish(make_adapter_folder(tmp_path / "away", plane.base, ranks=5))
    await until(lambda: plane.taken)
    plane.store_is_away = False
    found = await probe(plane, make_adapter_folder(tmp_path / "next", plane.base, ranks=3, seed=9))
    assert (found.finite, plane.reports) == (True, [])


async def until_idle(rig: Rig) -> bool:
    async with asyncio.timeout(60):
        while not await rig.is_idle():  # noqa: ASYNC110  a caller can only ask
            await asyncio.sleep(0.01)
    return True
