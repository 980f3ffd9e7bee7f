"""The whole engine with adapters in fp8, in the interpreter, beside the torch form with the very numbers that fp8 holds."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import dataplane.engine.device_forms
from dataplane.lora.image_file import open_image
from dataplane.model.config import parse_config
from kernels.fp8 import from_fp8, to_fp8
from kernels.gpu.paths import Path, Paths
from tests.kernels.gpu.engines import FIELDS, adapters, answer, ask, config_of, write_images, write_world
from tests.kernels.gpu.recorder import Recorder

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")

MIXED = (
    ask("base", range(1, 6), max_tokens=4),
    ask("one", range(7, 27), "a1", max_tokens=4),
    ask("five", [40], "a5", max_tokens=6),
    ask("seventeen", range(30, 39), "a17", max_tokens=6),
)
FEW = {"max_sequences": 2}


def held(pair, *, rolled=0):
    """Returns the pair that an image in fp8 stands for, or would if factors were `rolled` by so many rank rows."""
    coded = to_fp8(pair.a, pair.b)
    a, b = from_fp8(replace(coded, factors=np.roll(coded.factors, rolled)))
    return replace(pair, a=a.astype(np.float32), b=b.astype(np.float32))


def uneven(pair):
    """Returns a pair whose rank rows differ in size, and so in their factors."""
    sizes = 2.0 ** np.random.default_rng(pair.slice).uniform(-2, 1, len(pair.a))
    return replace(pair, a=pair.a * sizes[:, None].astype(np.float32))


def with_vectors(pair):
    """Gives a pair a gain and a shift."""
    numbers = np.random.default_rng(pair.slice)
    width = len(pair.b)
    gain, shift = numbers.uniform(0.5, 1.5, width), numbers.uniform(-0.3, 0.3, width)
    return replace(pair, gain=gain.astype(np.float32), shift=shift.astype(np.float32))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model, its adapters in fp8, one of them with gains and shifts, and float32 images of the same numbers."""
    folder = tmp_path_factory.mktemp("fp8")
    write_world(folder)
    pairs = {version: list(map(uneven, of)) for version, of in adapters(parse_config(FIELDS)).items()}
    pairs["a17"] = [with_vectors(pair) for pair in pairs["a17"]]
    return SimpleNamespace(
        folder=folder,
        pairs=pairs,
        fp8=write_images(folder, pairs, dtype="fp8"),
        wide=write_images(folder, {version: list(map(held, of)) for version, of in pairs.items()}),
    )


def expected(world, requests=MIXED, **changes):
    """What the torch form answers with the numbers that fp8 holds."""
    return answer(config_of(world.folder, cpu_form="torch", **changes), world.wide, requests).tokens


def replayed(world, monkeypatch, requests=MIXED, **changes):
    """What an engine answers that holds adapters in fp8 and replays its decode steps, and its recorder."""
    recorder = Recorder(monkeypatch)
    monkeypatch.setattr(dataplane.engine.device_forms, "capture_on", lambda *_: recorder)
    config = config_of(world.folder, cpu_form="triton", adapter_dtype="fp8", **changes)
    return answer(config, world.fp8, requests), recorder


def test_it_chooses_the_tokens_of_the_torch_form_tells_what_is_lost_and_takes_a_byte_an_element(world, monkeypatch):
    got, recorder = replayed(world, monkeypatch, **FEW)
    assert got.tokens == expected(world, **FEW)
    assert recorder.replayed
    assert got.engine._runner.arena.tensor.dtype is torch.uint8
    for holding in got.engine._state(0).holdings:
        image = open_image(world.fp8[holding.version])
        assert (holding.place, holding.size_bytes) == ("device", image.num_bytes)
        assert holding.loss == image.loss.error > 0.01
        layer, path = holding.loss_at.removeprefix("layers.").split(".", 1)
        assert (int(layer), path) == (image.loss.layer, got.engine._projections[image.loss.slice].path)


def test_factors_of_neighbouring_rank_rows_would_be_seen_in_the_tokens(world, tmp_path):
    rolled = {version: [held(pair, rolled=1) for pair in of] for version, of in world.pairs.items()}
    tokens = answer(config_of(world.folder, cpu_form="torch", **FEW), write_images(tmp_path, rolled), MIXED).tokens
    right = expected(world, **FEW)
    assert {name for name in right if tokens[name] != right[name]} == {"five", "seventeen"}, "the others have one factor or none"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", list(Path))
def test_every_path_around_the_base_product_chooses_them_too(world, monkeypatch, path):
    monkeypatch.setattr(Paths, "path", lambda *_: path)
    assert replayed(world, monkeypatch)[0].tokens == expected(world)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "changes", [{"num_pages": 5}, {"max_step_tokens": 4}, {"max_sequences": 2, "max_slots": 1}, {"arena_bytes": 1 << 14}], ids=str
)
def test_preemption_small_chunks_and_changing_adapters_make_no_difference(world, monkeypatch, changes):
    requests = [
        ask(f"{version or 'base'}-{i}", range(1 + i, 1 + i + length), version, max_tokens=16)
        for i, (version, length) in enumerate(itertools.product((None, "a1", "a17"), (3, 18)))
    ]
    got, recorder = replayed(world, monkeypatch, requests=requests, **changes)
    assert got.tokens == expected(world, requests, **{key: of for key, of in changes.items() if key != "arena_bytes"})
    assert recorder.replayed
