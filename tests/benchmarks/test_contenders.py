"""Contenders as processes, on a tiny model with adapters."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.breakdown import prefill_parts
from benchmarks.contenders.process import Process, Setup
from benchmarks.models import adapter_bytes, write_random_llama
from benchmarks.random_adapters import write_adapter
from benchmarks.workload import AdapterKey, Run, Workload, agreement
from veneer.artifact import check, describe_base

VOCAB = 160
MIXED = Workload(6, 20, 8, VOCAB, adapters=3, rank=4)
OPTIONS = {"kv_bytes": 32 << 20, "arena_bytes": 8 << 20, "arena_unit_bytes": 4096, "max_step_tokens": 256}


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    model, adapters = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("adapters")
    write_random_llama(model, hidden=64, mlp=96, heads=4, layers=3, vocab=VOCAB)
    base = describe_base(model)
    for number in range(3):
        write_adapter(adapters, base, AdapterKey(number, 4, "all"))
    return Setup(str(model), str(adapters), streams=8, context=32, max_adapters=3, max_rank=4, options=OPTIONS)


@pytest.fixture(scope="module")
def veneer(setup: Setup) -> Iterator[Process]:
    with Process("veneer", setup) as process:
        yield process


@pytest.fixture(scope="module")
def ours(veneer: Process) -> Run:
    return veneer.run(MIXED)


def test_a_run_has_every_token_and_its_times(ours: Run) -> None:
    assert [len(ids) for ids in ours.ids] == [8] * 6
    assert len(ours.firsts_s) == 6
    assert len(ours.gaps_s) == 6 * 7
    assert 0 < ours.prefill_s < ours.seconds
    assert 0 < ours.extra["forward"] <= ours.extra["run"]


def test_a_second_run_computes_everything_anew_and_gives_the_same(veneer: Process, ours: Run) -> None:
    again = veneer.run(MIXED)
    assert again.ids == ours.ids
    assert again.extra["forward"] > 0


def test_adapters_change_what_is_generated(veneer: Process, ours: Run) -> None:
    base = veneer.run(Workload(6, 20, 8, VOCAB))
    assert agreement(base, ours) < 0.5


def test_a_contender_and_its_children_are_stopped_until_they_run(veneer: Process, ours: Run) -> None:
    process = psutil.Process(veneer._child.pid)
    family = [process, *process.children(recursive=True)]
    assert len(family) > 1, "the engine has a process of its own"
    assert {one.status() for one in family} == {psutil.STATUS_STOPPED}


def test_the_bare_loop_generates_what_the_engine_does(setup: Setup, ours: Run) -> None:
    with Process("bare", setup) as bare:
        assert agreement(bare.run(MIXED), ours) == 1.0


def test_a_profile_names_every_part_of_a_step(setup: Setup) -> None:
    with Process("profile", setup) as profile:
        parts = prefill_parts(profile, MIXED)
    for part in ("products", "head", "attention", "adapters", "norms, rotation, activation", "sample", "schedule"):
        assert parts[part] > 0, part
    assert parts["all"] == pytest.approx(sum(number for part, number in parts.items() if part != "all"))


def test_a_stopped_contender_ends_with_the_benchmark(setup: Setup) -> None:
    script = (
        "import json, os, signal, sys; from benchmarks.contenders.process import Process, Setup;"
        "process = Process('veneer', Setup(**json.loads(sys.argv[1]))); print(process._child.pid, flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(dataclasses.asdict(setup))], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(60)


def test_a_contender_that_fails_says_so(setup: Setup) -> None:
    with pytest.raises(RuntimeError, match="veneer ended with status"):
        Process("veneer", Setup("/nowhere"))


def test_a_made_adapter_can_be_published_and_has_the_bytes_that_are_counted(setup: Setup) -> None:
    base = describe_base(Path(setup.model))
    folder = Path(setup.adapters) / AdapterKey(0, 4, "all").name
    artifact = check((folder / "adapter_config.json").read_bytes(), folder / "adapter_model.safetensors", base)
    elements = sum(a.size + b.size for _, a, b in artifact.read(folder / "adapter_model.safetensors"))
    assert adapter_bytes(base, rank=4) == 2 * elements


@pytest.mark.oracle
def test_peft_generates_the_same_from_the_same_files(setup: Setup, ours: Run) -> None:
    with Process("transformers", setup) as peft:
        assert agreement(peft.run(MIXED), ours) > 0.7
        assert "peft" in peft.settings
