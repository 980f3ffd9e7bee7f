"""Copies of a base's own embedding and head, which PEFT saves beside LoRA on them unless it is told not to.

A copy is what the training had in memory: the base's weights, cast once to the type that it ran in. So the base's description has
a digest of each for every type, and a copy that has it adds nothing to the base.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from veneer.artifact.description import BaseDescription, EdgeDigest
from veneer.artifact.faults import Faults, quote
from veneer.artifact.header import DTYPE_BYTES, TensorRef
from veneer.artifact.source import Source
from veneer.artifact.values import widen

if TYPE_CHECKING:
    from veneer.artifact.keys import Key

DTYPES: Final = ("F32", "F16", "BF16")
"""Types that a training may run in."""
_CHUNK_BYTES: Final = 8 << 20
_DROP: Final = "drop it: save with save_embedding_layers=False"


def digests_of(parts: Iterable[bytes], stored: str, site: str) -> list[EdgeDigest]:
    """Digests of a matrix as each type.

    Args:
        parts: The matrix's bytes in consecutive parts of whole elements.
        stored: Their type.
        site: Whose it is: `embed` or `head`.
    """
    hashes = {dtype: hashlib.sha256() for dtype in DTYPES}
    for part in parts:
        values = widen(part, stored)
        for dtype, found in hashes.items():
            found.update(part if dtype == stored else _cast(values, dtype))
    return [EdgeDigest(site, dtype, found.hexdigest()) for dtype, found in hashes.items()]


def check_copies(source: Source, copies: Sequence[tuple[Key, TensorRef]], base: BaseDescription, *, faults: Faults) -> list[str]:
    """Refuses copies that are not equal to what the base has.

    Args:
        source: The file.
        copies: Tensors in it that stand where the base has its embedding or head.
        base: The base.
        faults: Receives what is wrong with each.

    Returns:
        Names of the copies that are equal.
    """
    known = {(one.site, one.dtype): one.sha256 for one in base.edge_digests or ()}
    equal = []
    for key, tensor in copies:
        module = base.module_at(key.layer, key.slice)
        shape = (base.vocab_size, base.modules[0].in_features)
        what = f"is a full copy of {module.name}, and full copies of modules (modules_to_save) are not supported"
        if tensor.shape != shape:
            fault = (
                f"{what}; this one has shape {list(tensor.shape)}, and the base's {list(shape)}: train without added tokens, or, "
                f"if it was not trained, {_DROP}"
            )
        elif base.edge_digests is None:
            fault = (
                f"{what} unless they equal the base's own; this base was registered before that could be told: register it "
                f"again (veneer base add), or {_DROP}"
            )
        elif tensor.offset + tensor.size_bytes > source.size_bytes:
            continue  # the header's own check says so
        elif _digest(source, tensor) != known.get((module.site, tensor.dtype)):
            fault = (
                f"{what} unless they equal the base's own, from which this one differs as {tensor.dtype}; if it was not trained, "
                f"{_DROP}"
            )
        else:
            equal.append(tensor.name)
            continue
        faults.add(f"adapter_model.safetensors: {quote(tensor.name)}", fault)
    return equal


def _digest(source: Source, tensor: TensorRef) -> str:
    found = hashlib.sha256()
    for offset in range(0, tensor.size_bytes, _CHUNK_BYTES):
        found.update(source.read(tensor.offset + offset, min(_CHUNK_BYTES, tensor.size_bytes - offset)))
    return found.hexdigest()


def _cast(values: npt.NDArray[np.float32], dtype: str) -> bytes:
    """The little-endian bytes of values rounded to the nearest of a type, ties to even, as every framework rounds."""
    if dtype == "F32":
        return values.astype("<f4", copy=False).tobytes()
    if dtype == "F16":
        with np.errstate(over="ignore"):  # to infinity, as frameworks do
            return values.astype("<f2").tobytes()
    assert dtype == "BF16"
    assert DTYPE_BYTES[dtype] == 2
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype("<u2").tobytes()
