"""Veneer's engine in a thread of this process, with a stopwatch at every part of the forward pass."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from benchmarks.contenders.process import Setup
from benchmarks.contenders.veneer import Veneer
from dataplane.model.native_stack import NativeStack


class Profile(Veneer):
    """As `Veneer`; `extra` has also the parts of the forward pass.

    `NativeStack` counts by itself; around the pieces of `PieceStack` stand stopwatches, which cost some microseconds a layer.
    """

    _in_process = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        runner = self._client._link._engine._runner  # type: ignore[attr-defined]
        self._native: NativeStack | None = None
        model, stack = runner._model, runner._model.stack
        pieces = Timed(model.pieces, "norms, rotation, activation", self._seconds)
        if isinstance(stack, NativeStack):
            self._native = stack
        else:
            runner._attention = Timed(runner._attention, "attention", self._seconds)
            runner._low_rank = Timed(runner._low_rank, "adapters", self._seconds)
            stack = replace(stack, layers=tuple(map(self._timed_layer, stack.layers)), pieces=pieces)
        runner._model = replace(model, stack=stack, head=Timed(model.head, "head", self._seconds), pieces=pieces)

    def _timed_layer(self, layer: Any) -> Any:
        products = {field.name: getattr(layer, field.name) for field in fields(layer)}
        timed = {name: Timed(value, "products", self._seconds) for name, value in products.items() if callable(value)}
        return replace(layer, **timed)

    async def _parts(self) -> dict[str, float]:
        parts = Counter(self._seconds)
        parts.update(self._native.seconds if self._native else {})
        return {**await super()._parts(), **parts}


class Timed:
    """Stands for an object whose calls, and calls of whose methods, are timed.

    Args:
        inner: The object.
        part: What its time counts for.
        seconds: Where it is added up.
    """

    def __init__(self, inner: Any, part: str, seconds: defaultdict[str, float]) -> None:
        self._inner, self._part, self._timed_seconds = inner, part, seconds

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Calls the object itself."""
        return self._timed(self._inner)(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        return self._timed(value) if callable(value) else value

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self._timed_seconds[self._part] += time.perf_counter() - start

        return call
