"""Weights of a base model, read from its folder a part at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from veneer.artifact.base_model import read_shards
from veneer.artifact.faults import Faults
from veneer.artifact.header import DTYPE_BYTES, TensorRef
from veneer.artifact.source import opened
from veneer.artifact.values import read_matrix, widen

_PART_ELEMENTS = 1 << 22


class BaseWeights:
    """Finds tensors of a Hugging Face folder by name. Reads nothing until asked; the headers then once.

    Any thread may use it.

    Args:
        folder: Holds the safetensors files; it was described before, so they are sound.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _tensors(self) -> dict[str, tuple[Path, TensorRef]]:
        faults = Faults(64)
        shards = read_shards(self._folder, faults=faults)
        faults.raise_if_any()
        return {tensor.name: (shard.path, tensor) for shard in shards for tensor in shard.tensors}

    def rows(self, name: str) -> Iterator[npt.NDArray[np.float32]]:
        """Reads a matrix, [out, in], in parts of consecutive whole rows; each part is float32, the caller's to change.

        Raises:
            KeyError: There is no tensor of this name.
            DataLossError: The file was changed or cut.
        """
        path, tensor = self._tensors[name]
        num_rows, width = tensor.shape
        row_bytes, step = width * DTYPE_BYTES[tensor.dtype], max(1, _PART_ELEMENTS // width)
        with opened(path) as source:
            for first in range(0, num_rows, step):
                count = min(step, num_rows - first)
                part = widen(source.read(tensor.offset + first * row_bytes, count * row_bytes), tensor.dtype)
                yield (part if part.flags.writeable else part.copy()).reshape(count, width)

    def vector(self, name: str) -> npt.NDArray[np.float32] | None:
        """Reads a vector as float32; None when there is none of this name."""
        if name not in self._tensors:
            return None
        path, tensor = self._tensors[name]
        with opened(path) as source:
            return read_matrix(source, tensor)
