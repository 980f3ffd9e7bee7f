"""The whole engine in the form of a device, its kernels in Triton's interpreter, beside the torch form."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest

import dataplane.engine.device_forms
from dataplane.engine.batch import StepBuffers
from dataplane.engine.forms import model_sites
from dataplane.engine.memory import plan_memory
from dataplane.engine.runner import Runner
from dataplane.model.config import parse_config, read_config
from kernels.gpu.device import probe
from kernels.gpu.metadata import StepMetadata
from kernels.gpu.paths import Path, Paths
from tests.kernels.gpu.engines import FIELDS, answer, ask, config_of, edge_pairs, write_images, write_world
from tests.kernels.gpu.recorder import Recorder

MIXED = (
    ask("base", range(1, 6), max_tokens=14),
    ask("one", range(7, 27), "a1", max_tokens=6),
    ask("five", [40], "a5", max_tokens=10),
    ask("seventeen", range(30, 39), "a17", max_tokens=8),
)
"""A chunked prompt, a single token, adapters of three ranks and none; they end one by one, so graphs have rows to pad."""

SHAPED = (
    ask("drawn", range(1, 6), "a5", temperature=1.0, seed=3),
    ask("punished", range(7, 27), frequency_penalty=1.5, logprobs=2),
    ask("biased", [40], "a1", logit_bias=((7, 4.0),), temperature=0.7, top_k=5, seed=1),
)
"""Draws, penalties, bias and reports."""


pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("device")
    return SimpleNamespace(folder=folder, paths=write_world(folder))


@pytest.fixture(scope="module")
def expected(world):
    """What the torch form answers."""
    return answer(config_of(world.folder, cpu_form="torch"), world.paths, MIXED).tokens


def captured(world, monkeypatch, requests=MIXED, prepare=lambda _: None, **changes):
    """What an engine answers whose decode steps are replayed, and its recorder."""
    recorder = Recorder(monkeypatch)
    monkeypatch.setattr(dataplane.engine.device_forms, "capture_on", lambda *_: recorder)
    config = config_of(world.folder, cpu_form="triton", **changes)
    return answer(config, world.paths, requests, prepare=prepare), recorder


@pytest.fixture(scope="module")
def replayed(world):
    """What an engine answered whose decode steps were replayed, and its recorder."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return captured(world, monkeypatch)


def test_steps_that_are_replayed_choose_the_tokens_of_the_torch_form(expected, replayed):
    got, recorder = replayed
    assert got.tokens == expected
    assert len(set(recorder.replayed)) >= 3, "several buckets and variants"
    assert got.engine.ready.plan[-1].endswith("each planned while the one before runs")


def test_steps_that_are_not_captured_choose_them_too(world, expected):
    assert answer(config_of(world.folder, cpu_form="triton"), world.paths, MIXED).tokens == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", [path for path in Path if path is not Path.AFTER])
def test_every_path_around_the_base_product_chooses_them_too(world, expected, monkeypatch, path):
    monkeypatch.setattr(Paths, "path", lambda *_: path)
    assert captured(world, monkeypatch)[0].tokens == expected


@pytest.mark.slow
@pytest.mark.parametrize("adapter_dtype", ["model", "fp8"])
def test_at_start_every_path_is_tried_with_the_models_own_weights(world, monkeypatch, adapter_dtype):
    config = config_of(world.folder, cpu_form="triton", adapter_dtype=adapter_dtype)
    model = read_config(world.folder)
    runner = Runner(config, model, plan_memory(config, model))
    times = itertools.cycle([4.0, 3.0, 2.0, 1.0])

    def clock(run):
        run()
        return next(times)

    monkeypatch.setattr(dataplane.engine.device_forms, "device_clock", clock)
    paths = dataplane.engine.device_forms._measured(
        runner._model.stack, model_sites(model), gpu=probe("cpu"), most_rows=17, is_fp8=runner._low_rank.launches.is_fp8
    )
    fastest = list(Path)[3]
    assert {paths.path(site.name, rows) for site in model_sites(model) for rows in (16, 64)} == {fastest}
    assert paths.path("qkv", 128) is Path.AFTER
    runner._low_rank.use(paths)


def test_a_graph_without_adapters_launches_nothing_for_them(world, monkeypatch):
    recorder = Recorder(monkeypatch)
    monkeypatch.setattr(dataplane.engine.device_forms, "capture_on", lambda *_: recorder)
    config = config_of(world.folder, cpu_form="triton", max_sequences=1)
    model = read_config(world.folder)
    Runner(config, model, plan_memory(config, model))
    none, low_rank, epilogue = (recording.launched for recording in recorder.recordings)
    assert not {"shrink", "expand", "epilogue"} & set(none)
    assert [low_rank.count(name) for name in ("shrink", "expand", "epilogue")] == [4, 4, 0]
    assert [epilogue.count(name) for name in ("shrink", "expand", "epilogue")] == [4, 4, 4]


def test_between_replays_nothing_changes_but_what_a_step_writes(replayed):
    got, recorder = replayed
    runner = got.engine._runner
    paged, launches = runner._attention._paged, runner._low_rank.launches
    steps = {
        "step": runner._buffers._device,
        "attention": paged._metadata._device,
        "adapters": launches.metadata._device,
        "logits": runner._graphs._logits,
        "cache": runner.kv.data,
    }
    scratch = (launches.h, launches.entries, launches.planes, launches.arrived, paged._parts, paged._best, paged._totals)
    table = (*runner.arena.descriptors.tensors, *runner.arena.descriptors.epilogue_tensors, runner.arena.tensor)
    names = {tensor.untyped_storage().data_ptr(): name for name, tensor in steps.items()}
    allowed = {tensor.untyped_storage().data_ptr() for tensor in (*scratch, paged._arrived, *table)}
    changed = recorder.changed - allowed
    assert {names.get(storage, "something else") for storage in changed} == set(steps)


def test_rows_that_pad_write_to_a_page_of_their_own(replayed):
    got, _ = replayed
    cache = got.engine._runner.kv.data
    assert bool(cache[-1].any())
    assert not cache[0].any(), "page 0 stays zero"
    assert got.engine._pool.num_pages == len(cache) - 2, "neither is ever handed out"


def test_pairs_on_embedding_and_head_are_computed_in_steps_that_are_not_replayed(world, monkeypatch):
    paths = world.paths | write_images(world.folder, {"edges": edge_pairs(parse_config(FIELDS))})
    requests = (*MIXED[:2], ask("edges", range(3, 8), "edges", max_tokens=5))
    plain = (*MIXED[:2], ask("edges", range(3, 8), max_tokens=5))
    wanted, without = (answer(config_of(world.folder, cpu_form="torch"), paths, asked).tokens for asked in (requests, plain))
    assert wanted["edges"] != without["edges"]
    assert wanted["base"] == without["base"]

    steps = []
    decide = Runner._captured_rows

    def noted(runner, plan):
        num_rows = decide(runner, plan)
        steps.append((runner._edges.is_needed(plan.decodes.slots), num_rows is not None))
        return num_rows

    monkeypatch.setattr(Runner, "_captured_rows", noted)
    got, _ = captured(SimpleNamespace(folder=world.folder, paths=paths), monkeypatch, requests)
    assert got.tokens == wanted
    assert {(True, False), (False, True)} <= set(steps)
    assert (True, True) not in steps


def stale_list(monkeypatch):
    """Nothing but the first step's list of adapters comes to the kernels."""
    monkeypatch.setattr(StepMetadata, "fill", lambda *_: None)


def moved_ids(monkeypatch):
    """Tokens are written to an address that no graph reads."""
    fill = StepBuffers.fill_decodes

    def moved(self, *args, **kwargs):
        step = fill(self, *args, **kwargs)
        return replace(step, batch=replace(step.batch, ids=step.batch.ids.clone()))

    monkeypatch.setattr(StepBuffers, "fill_decodes", moved)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", [stale_list, moved_ids])
def test_a_step_that_does_not_reach_its_graph_changes_the_answer(world, expected, monkeypatch, mutant):
    got, _ = captured(world, monkeypatch, prepare=lambda _: mutant(monkeypatch))
    assert got.tokens != expected


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("changes", [{"num_pages": 5}, {"max_step_tokens": 4}, {"max_sequences": 2, "max_slots": 1}], ids=str)
def test_preemption_small_chunks_and_changing_adapters_make_no_difference(world, monkeypatch, changes):
    requests = [
        ask(f"{version or 'base'}-{i}", range(1 + i, 1 + i + length), version, max_tokens=20)
        for i, (version, length) in enumerate(itertools.product((None, "a1", "a17"), (3, 18)))
    ]
    torch_form = answer(config_of(world.folder, cpu_form="torch", **changes), world.paths, requests)
    got, recorder = captured(world, monkeypatch, requests=requests, **changes)
    assert got.tokens == torch_form.tokens
    assert recorder.replayed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_draws_penalties_and_reports_follow_the_torch_form(world, monkeypatch):
    torch_form = answer(config_of(world.folder, cpu_form="torch"), world.paths, SHAPED)
    got, _ = captured(world, monkeypatch, requests=SHAPED)
    assert got.tokens == torch_form.tokens
