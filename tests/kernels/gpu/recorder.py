"""What stands in for CUDA graphs: tensor operations and kernel launches that ran, to run again on the very same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from triton.runtime.interpreter import InterpretedFunction

_WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.is_nonzero")


class Recording(TorchDispatchMode):
    """Runs everything once and keeps it: the operation, its arguments as they were, and the tensors that it made.

    A replay is faithful to a captured graph: no Python of the recorded function runs again, every argument that is no tensor has
    its old value, and every tensor its old address; only what lies in tensors may be new.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Callable[[], Any], list[Tensor]]] = []
        self.launched: list[str] = []
        self.made: set[int] = set()
        self.outside: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not str(func).startswith(_WAITS), f"{func} would wait for the device while it is captured"
        kwargs = kwargs or {}
        self._note(args, kwargs)
        result = func(*args, **kwargs)
        made = _tensors(result)
        self.made |= {_storage(tensor) for tensor in made} - set(self.outside)
        self.steps.append((lambda: func(*args, **kwargs), made))
        return result

    def launch(self, run, kernel, args, kwargs):
        """Takes a kernel's launch."""
        self.launched.append(kernel.fn.__name__)
        self._note(args, kwargs)

        def again():
            run(kernel, *args, **kwargs)

        self.steps.append((again, []))
        self.aside(again)

    def _note(self, args, kwargs):
        """Keeps the tensors that come from outside of the function."""
        for tensor in _tensors((args, kwargs)):
            if _storage(tensor) not in self.made:
                self.outside.setdefault(_storage(tensor), tensor)

    def aside(self, run):
        """Runs something that is not to be recorded."""
        with torch.utils._python_dispatch._disable_current_modes():
            run()


class Recorder:
    """A `Capture` without a device.

    Attributes:
        recordings: In the order in which they were made.
        replayed: Indexes of the recordings that were replayed, in order.
        changed: Addresses of what changed between replays, of all that recordings did not make themselves.
    """

    def __init__(self, monkeypatch) -> None:
        self.recordings: list[Recording] = []
        self.replayed: list[int] = []
        self.changed: set[int] = set()
        self._seen: dict[int, bytes] = {}
        self._now: Recording | None = None
        run = InterpretedFunction.run

        def launch(kernel, *args, **kwargs):
            if self._now is None:
                return run(kernel, *args, **kwargs)
            return self._now.launch(run, kernel, args, kwargs)

        monkeypatch.setattr(InterpretedFunction, "run", launch)

    def __call__(self, run):
        recording = self._now = Recording()
        index = len(self.recordings)
        self.recordings.append(recording)
        try:
            with recording:
                run()
        finally:
            self._now = None

        def replay():
            self.replayed.append(index)
            self._see(recording)
            for again, made in recording.steps:
                for old, new in zip(made, _tensors(again()), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return replay

    def _see(self, recording: Recording) -> None:
        """Notes what a recording reads or writes that is not what it was when a recording last saw it."""
        for storage, tensor in recording.outside.items():
            now = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().tobytes()
            if self._seen.setdefault(storage, now) != now:
                self.changed.add(storage)
            self._seen[storage] = now


def _tensors(values: Any) -> list[Tensor]:
    return [tensor for tensor in tree_flatten(values)[0] if isinstance(tensor, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
