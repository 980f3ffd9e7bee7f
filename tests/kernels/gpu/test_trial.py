from __future__ import annotations

import pytest
import torch

from kernels.gpu.device import probe
from kernels.gpu.paths import Path
from kernels.gpu.tiles import TILES
from kernels.gpu.trial import Trial
from tests.kernels.gpu.tape import Tape

LAYERS = 2


@pytest.fixture
def trial(gpu_sites, monkeypatch):
    """A trial whose clock counts launches beside the base product, and takes an extension for slow at the widest site."""
    tape = Tape(monkeypatch, runs=False)
    weights = {site.name: [torch.randn(site.columns[-1][1], site.in_features)] * LAYERS for site in gpu_sites}

    def clock(run):
        tape.launches.clear()
        run()
        names = [launch.name for launch in tape.launches]
        tape.runs.append(names)
        widest = any(launch.name == "extension" and launch.arguments[0].shape[1] == 320 for launch in tape.launches)
        return float(len(names) - names.count("extension") + 9 * widest)

    tape.runs = []
    return Trial(gpu_sites, weights, gpu=probe("cpu"), clock=clock, num_adapters=3), tape


def test_a_trial_runs_every_path_at_every_site_and_bucket_and_takes_the_fastest(trial):
    measured, tape = trial
    paths = measured.paths(64)
    assert [paths.path(site, 16) for site in ("qkv", "o", "gate_up", "down")] == [
        Path.EXTENSION,
        Path.EXTENSION,
        Path.AFTER,
        Path.EXTENSION,
    ]
    assert paths.path("o", 64) is Path.EXTENSION
    assert paths.path("o", 128) is Path.AFTER
    assert len(tape.runs) == 4 * 2 * 4 * 3


def test_a_time_is_that_of_one_layer(trial):
    measured, tape = trial
    assert measured.time_us("o", 16, Path.AFTER) == 2
    assert tape.runs == [["shrink", "expand"] * LAYERS]
    assert measured.time_us("o", 16, Path.EXTENSION) == 1


def test_the_bucket_of_long_steps_is_measured_at_the_most_rows_that_there_are(trial):
    measured, tape = trial
    paths = measured.paths(300)
    assert paths.path("o", TILES[-1].max_rows) is Path.EXTENSION
    assert tape.launches[-1].arguments[0].shape[0] == 300
