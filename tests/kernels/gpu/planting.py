"""Faults planted in the kernels, one at a time, each of which a trial has to see."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

COUNTS = "planted faults"
"""Property of a test's report that says how many were caught; `conftest.py` prints it, whichever process ran the test."""

Trial = Callable[[pytest.MonkeyPatch], None]
"""Comparisons that raise AssertionError where the kernels are wrong."""


@dataclass(frozen=True)
class Mutant:
    """A fault in the text of one file of kernels.gpu: `old`, there once, becomes `new`."""

    name: str
    file: str
    old: str
    new: str

    @property
    def original(self):
        return importlib.import_module(f"kernels.gpu.{self.file}")

    def text(self) -> str:
        """Returns the text with the fault."""
        text = inspect.getsource(self.original)
        assert text.count(self.old) == 1, f"{self.name}: found {text.count(self.old)} times"
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Fault:
    """What to plant, and the trial that has to see it."""

    name: str
    plant: Callable[[pytest.MonkeyPatch], None]
    trial: Trial


def faults_of(mutants: Iterable[Mutant], folder: Path, trial: Trial) -> list[Fault]:
    """Returns one fault a mutant, all for one trial."""
    return [Fault(mutant.name, lambda patch, mutant=mutant: plant(mutant, folder, patch), trial) for mutant in mutants]


def plant(mutant: Mutant, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts what the mutated file defines wherever that of the original is used.

    It has to be a file, since the interpreter reads the source.
    """
    path = folder / f"mutated_{mutant.file}.py"
    path.write_text(mutant.text(), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    for name, value in list(vars(mutant.original).items()):
        if getattr(getattr(value, "fn", value), "__module__", None) == mutant.original.__name__:
            for user in [module for name, module in sys.modules.items() if name.startswith("kernels.gpu.")]:
                if vars(user).get(name) is value:
                    monkeypatch.setattr(user, name, getattr(module, name))


def stale_metadata(kind: type, trial: Trial) -> Fault:
    """Returns the fault that every step gets the metadata of the one before."""

    def plant_stale(monkeypatch: pytest.MonkeyPatch) -> None:
        fill, steps = kind.fill, []

        def fill_with_the_last(self, *step):
            steps.append(step)
            fill(self, *steps[-2:][0])

        monkeypatch.setattr(kind, "fill", fill_with_the_last)

    return Fault("stale metadata at replay", plant_stale, trial)


def all_are_caught(family: str, faults: list[Fault], record_property: Callable[[str, object], None]) -> None:
    """Plants every fault and reports how many were seen; raises AssertionError with the names of the others."""
    for trial in {fault.trial: None for fault in faults}:
        with pytest.MonkeyPatch.context() as monkeypatch:
            trial(monkeypatch)
    escaped = []
    for fault in faults:
        with pytest.MonkeyPatch.context() as monkeypatch:
            fault.plant(monkeypatch)
            try:
                fault.trial(monkeypatch)
            except AssertionError:
                continue
            escaped.append(fault.name)
    record_property(COUNTS, f"{family}: {len(faults) - len(escaped)} of {len(faults)} planted faults caught")
    assert not escaped, f"not seen: {', '.join(escaped)}"
