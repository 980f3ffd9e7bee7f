from __future__ import annotations

import pytest
import torch

from kernels.fp8 import factor_bytes
from kernels.gpu.device import probe
from kernels.gpu.paths import Path
from kernels.gpu.tiles import TILES
from kernels.gpu.trial import Trial
from tests.kernels.gpu.tape import Tape

LAYERS = 2


class Clocked:
    """Trials by a clock that counts launches beside the base product, and takes an extension for slow at the widest site."""

    def __init__(self, gpu_sites, monkeypatch):
        self.tape, self.runs, self.sites = Tape(monkeypatch, runs=False), [], gpu_sites
        self.weights = {site.name: [torch.randn(site.columns[-1][1], site.in_features)] * LAYERS for site in gpu_sites}

    def clock(self, run):
        self.tape.launches.clear()
        run()
        names = [launch.name for launch in self.tape.launches]
        self.runs.append(names)
        widest = any(launch.name == "extension" and launch.arguments[0].shape[1] == 320 for launch in self.tape.launches)
        return float(len(names) - names.count("extension") + 9 * widest)

    def trial(self, **options):
        return Trial(self.sites, self.weights, gpu=probe("cpu"), clock=self.clock, num_adapters=3, **options)


@pytest.fixture
def clocked(gpu_sites, monkeypatch):
    return Clocked(gpu_sites, monkeypatch)


def test_a_trial_runs_every_path_at_every_site_and_bucket_and_takes_the_fastest(clocked):
    paths = clocked.trial().paths(64)
    assert [paths.path(site, 16) for site in ("qkv", "o", "gate_up", "down")] == [
        Path.EXTENSION,
        Path.EXTENSION,
        Path.AFTER,
        Path.EXTENSION,
    ]
    assert paths.path("o", 64) is Path.EXTENSION
    assert paths.path("o", 128) is Path.AFTER
    assert len(clocked.runs) == 4 * 2 * 4 * 3


def test_a_time_is_that_of_one_layer(clocked):
    measured = clocked.trial()
    assert measured.time_us("o", 16, Path.AFTER) == 2
    assert clocked.runs == [["shrink", "expand"] * LAYERS]
    assert measured.time_us("o", 16, Path.EXTENSION) == 1


def test_the_bucket_of_long_steps_is_measured_at_the_most_rows_that_there_are(clocked):
    paths = clocked.trial().paths(300)
    assert paths.path("o", TILES[-1].max_rows) is Path.EXTENSION
    assert clocked.tape.launches[-1].arguments[0].shape[0] == 300


def test_a_trial_in_fp8_reads_bytes_behind_their_factors(clocked):
    measured = clocked.trial(is_fp8=True)
    assert measured.time_us("o", 16, Path.AFTER) == 2
    first = clocked.tape.launches[0]
    assert first.options["FP8"]
    table = measured._descriptors
    assert table.a_offset[0, 0, 0] == factor_bytes(16)
    assert table.b_offset[0, 0, 0] == factor_bytes(16) + 16 * 96
    assert int(table.b_offset.max()) + 16 * 96 <= measured._arena.numel()
    assert not ((table.a_offset | table.b_offset) % 128).any()
