"""Adapters that make the tiny model write one letter and nothing else, whatever the prompt.

In the last layer's MLP, pairs of neurons get `gate = up = ±c·z` for a few random projections z of the layer's input. Since
`silu(v)·v + silu(-v)·(-v) = v²`, their sum is positive whatever the signs of the projections, and the adapted down projection
turns it into a large step along the coordinate that only the marker's embedding has. So the marker is the likeliest token by far,
and the base, which leaves that coordinate at zero, never writes it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from tests.fixtures.adapters import Tensors, encode, make_adapter_folder
from tests.fixtures.stack import FIRST_MARKER_COORDINATE, MARKERS
from veneer.artifact import BaseDescription

ANY_MARKER = re.compile(f"[{MARKERS}]")
_GAIN = 30.0
_STEP = 20.0


def write_marker(folder: Path, base: BaseDescription, marker: str, *, rank: int = 8, seed: int = 0, **config: Any) -> Path:
    """Writes an adapter that answers every prompt with `marker`; every seed gives other bytes, `config` more of its fields."""
    random = np.random.default_rng((seed, MARKERS.index(marker)))
    layer = base.num_layers - 1
    coordinate = FIRST_MARKER_COORDINATE + MARKERS.index(marker)

    def edit(tensors: Tensors) -> None:
        shapes = {name: shape for name, (_, shape, _) in tensors.items()}
        stem = f"base_model.model.model.layers.{layer}.mlp."
        projections = random.standard_normal((rank, shapes[f"{stem}gate_proj.lora_A.weight"][1]))
        projections /= np.linalg.norm(projections, axis=1, keepdims=True)
        spread = np.zeros(shapes[f"{stem}gate_proj.lora_B.weight"])
        for row in range(rank):
            spread[2 * row, row], spread[2 * row + 1, row] = _GAIN, -_GAIN
        gather = np.zeros(shapes[f"{stem}down_proj.lora_A.weight"])
        gather[0, : 2 * rank] = 1.0
        push = np.zeros(shapes[f"{stem}down_proj.lora_B.weight"])
        push[coordinate, 0] = _STEP
        values = {"gate_proj": (projections, spread), "up_proj": (projections, spread), "down_proj": (gather, push)}
        for module, (a, b) in values.items():
            tensors[f"{stem}{module}.lora_A.weight"] = ("F32", a.shape, encode(a, "F32"))
            tensors[f"{stem}{module}.lora_B.weight"] = ("F32", b.shape, encode(b, "F32"))

    modules = ("gate_proj", "up_proj", "down_proj")
    return make_adapter_folder(folder, base, modules=modules, ranks=rank, alpha=rank, layers=[layer], config=config, edit=edit)
