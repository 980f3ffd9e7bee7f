"""Which form computes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dataplane.engine.forms
from dataplane.engine.config import EngineConfig
from dataplane.engine.engine import Engine
from dataplane.engine.forms import NoDeviceFormError, NoNativeFormError
from dataplane.engine.memory import plan_memory
from dataplane.engine.runner import Runner
from kernels.native import NativeFormError, load_native
from veneer.errors import InvalidArgumentError

Make = Callable[..., EngineConfig]


def runner_of(config: EngineConfig, plain: Any) -> Runner:
    return Runner(config, plain.config, plan_memory(config, plain.config))


def form_of(config: EngineConfig, plain: Any) -> str:
    return runner_of(config, plain).form


def without_compiler() -> None:
    raise NativeFormError("no C++ compiler")


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
def test_the_native_form_is_taken_where_it_can_be_had(tiny_config: Make, plain: Any) -> None:
    assert runner_of(tiny_config(), plain).slower == ""
    assert form_of(tiny_config(), plain).startswith("native, ")
    assert form_of(tiny_config(cpu_form="native"), plain).startswith("native, ")
    assert form_of(tiny_config(cpu_form="torch"), plain) == "torch"


@pytest.mark.parametrize("changes", [{"page_size": 4}, {"dtype": "float16"}])
def test_shapes_that_the_native_form_lacks_are_served_by_torch_unless_it_is_named(
    tiny_config: Make, plain: Any, changes: dict[str, object]
) -> None:
    assert form_of(tiny_config(**changes), plain) == "torch"
    with pytest.raises(NoNativeFormError, match="cpu_form = native cannot be had"):
        form_of(tiny_config(cpu_form="native", **changes), plain)


def test_a_machine_without_a_compiler_serves_with_torch_and_says_why(
    tiny_config: Make, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataplane.engine.forms, "load_native", without_compiler)
    for is_invariant in (False, True):
        runner = runner_of(tiny_config(batch_invariant=is_invariant), plain)
        assert runner.form.startswith("torch")
        assert runner.slower == "PyTorch's operations serve in place of the native CPU form: no C++ compiler"
    assert runner_of(tiny_config(cpu_form="torch"), plain).slower == "", "it is what the settings ask for"
    with pytest.raises(NoNativeFormError, match="no C\\+\\+ compiler"):
        form_of(tiny_config(cpu_form="native"), plain)


def test_what_the_library_says_of_a_lesser_instruction_set_reaches_the_first_event(
    tiny_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    lesser = replace(load_native(), slower="portable serves in place of AVX2")
    monkeypatch.setattr(dataplane.engine.forms, "load_native", lambda: lesser)
    assert Engine(tiny_config(), list).ready.slower == "portable serves in place of AVX2"


def test_an_unknown_form_is_refused(tiny_config: Make) -> None:
    with pytest.raises(InvalidArgumentError, match="cpu_form"):
        tiny_config(cpu_form="fast")


def test_a_device_that_is_not_there_is_refused_by_name_before_anything_is_loaded(tiny_config: Make) -> None:
    with pytest.raises(NoDeviceFormError, match="device = cuda cannot be had: there is no CUDA device"):
        Engine(tiny_config(device="cuda", model_dir="/nowhere"), list)


def test_without_triton_a_device_is_refused(tiny_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataplane.engine.forms, "find_spec", lambda _: None)
    with pytest.raises(NoDeviceFormError, match="triton is not installed"):
        Engine(tiny_config(device="cuda"), list)


def test_a_device_too_old_is_refused_with_its_name_and_the_limit(tiny_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(name="Old Card", major=7, minor=5, multi_processor_count=40)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: old)
    with pytest.raises(NoDeviceFormError, match=r"Old Card has compute capability 7\.5; 8\.0 is needed"):
        Engine(tiny_config(device="cuda"), list)


def test_a_device_has_no_batch_invariant_form(tiny_config: Make) -> None:
    with pytest.raises(NoDeviceFormError, match="no batch-invariant form"):
        Engine(tiny_config(device="cuda", batch_invariant=True), list)
