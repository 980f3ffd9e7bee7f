"""The header of a safetensors file: eight bytes of length, a JSON table of tensors, then their bytes without gap or overlap.

Source: format description at https://huggingface.co/docs/safetensors; the reading is our own and stricter.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from veneer.artifact.faults import Faults, quote
from veneer.artifact.source import Source
from veneer.artifact.strict_json import parse_object

DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""Bytes an element, by the format's own names."""

FLOAT_DTYPES = frozenset({"F32", "F16", "BF16"})
"""Types that adapters and bases may have."""

_LENGTH_BYTES = 8
_ENTRY_KEYS = frozenset({"dtype", "shape", "data_offsets"})
_FOREIGN = (
    (b"PK\x03\x04", "a zip archive, as torch.save writes"),
    (b"PK\x05\x06", "a zip archive"),
    (b"\x80\x02", "a Python pickle"),
    (b"\x80\x03", "a Python pickle"),
    (b"\x80\x04", "a Python pickle"),
    (b"\x80\x05", "a Python pickle"),
    (b"GGUF", "a GGUF file"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x89HDF", "an HDF5 file"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself"),
)


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Where a tensor lies in its file.

    Attributes:
        name: Its name in the file.
        dtype: Element type by the format's name, e.g. `BF16`.
        shape: Its dimensions.
        offset: Position of its first byte, from the start of the file.
        size_bytes: Its length.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class HeaderLimits:
    """What a header may hold; bounds are inclusive.

    Attributes:
        max_header_bytes: Length of the JSON.
        max_tensors: Entries in it.
        max_name_chars: Characters in a name.
        max_dimension: Each dimension.
        dtypes: Element types allowed.
    """

    max_header_bytes: int
    max_tensors: int
    max_name_chars: int
    max_dimension: int
    dtypes: frozenset[str]


def sniff(data: bytes) -> str | None:
    """Names the format of bytes that are certainly not safetensors or JSON, whatever the file is called.

    Args:
        data: The first 32 bytes.
    """
    if data[3:_LENGTH_BYTES] == bytes(5) and data[_LENGTH_BYTES : _LENGTH_BYTES + 1] == b"{":
        return None  # a safetensors header below 16 MiB; its length may begin like another format's magic
    return next((name for magic, name in _FOREIGN if data.startswith(magic)), None)


def read_header(source: Source, where: str, *, limits: HeaderLimits, faults: Faults) -> list[TensorRef]:
    """Reads and checks the table of tensors.

    Args:
        source: The file.
        where: Its name for messages.
        limits: What is allowed.
        faults: Receives everything that is wrong.

    Returns:
        The sound tensors in order of their bytes; all of them when no fault was noted.
    """
    foreign = sniff(source.read(0, min(32, source.size_bytes)))
    if foreign is not None:
        faults.add(where, f"is {foreign}; only safetensors files are read")
        return []
    if source.size_bytes < _LENGTH_BYTES + 2:
        faults.add(where, f"has {source.size_bytes} bytes, too few for a safetensors file")
        return []
    length = int.from_bytes(source.read(0, _LENGTH_BYTES), "little")
    if length > limits.max_header_bytes:
        faults.add(where, f"header of {length} bytes; at most {limits.max_header_bytes} are allowed")
        return []
    start = _LENGTH_BYTES + length
    if start > source.size_bytes:
        faults.add(where, f"is truncated: the header needs {start} bytes, the file has {source.size_bytes}")
        return []
    text = source.read(_LENGTH_BYTES, length)
    if not text.startswith(b"{"):
        faults.add(where, "header does not begin with `{`; this is not a safetensors file")
        return []
    table = parse_object(text, f"{where} header", max_depth=3, faults=faults)
    if table is None:
        return []
    _check_metadata(table.pop("__metadata__", None), where, faults=faults)
    if len(table) > limits.max_tensors:
        faults.add(where, f"{len(table)} tensors; at most {limits.max_tensors} are allowed")
        return []
    entries = (_read_entry(name, entry, where, start, limits=limits, faults=faults) for name, entry in table.items())
    tensors = sorted((tensor for tensor in entries if tensor is not None), key=lambda tensor: (tensor.offset, tensor.name))
    if len(tensors) == len(table):
        _check_coverage(tensors, where, start, source.size_bytes, faults=faults)
    return tensors


def _check_metadata(metadata: Any, where: str, *, faults: Faults) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        faults.add(where, "__metadata__ must map strings to strings")


def _read_entry(name: str, entry: Any, where: str, start: int, *, limits: HeaderLimits, faults: Faults) -> TensorRef | None:
    field = f"{where}: {quote(name)}"
    if not 0 < len(name) <= limits.max_name_chars or not name.isascii() or not name.isprintable():
        faults.add(field, f"a tensor name is 1 to {limits.max_name_chars} printable ASCII characters")
        return None
    if not isinstance(entry, dict) or entry.keys() != _ENTRY_KEYS:
        faults.add(field, "must have exactly dtype, shape and data_offsets")
        return None
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in limits.dtypes:
        faults.add(field, f"element type {quote(dtype)} is not supported; use {', '.join(sorted(limits.dtypes))}")
        return None
    if not _is_whole_numbers(shape) or len(shape) > 8:
        faults.add(field, f"shape {quote(shape)} must be a list of at most 8 whole numbers")
        return None
    if 0 in shape:
        faults.add(field, f"shape {shape} has a dimension of 0; the tensor is empty (was only one shard of the model saved?)")
        return None
    if any(dimension > limits.max_dimension for dimension in shape):
        faults.add(field, f"shape {quote(shape)} has a dimension above {limits.max_dimension}")
        return None
    if not _is_whole_numbers(offsets) or len(offsets) != 2:
        faults.add(field, f"data_offsets {quote(offsets)} must be two whole numbers")
        return None
    size_bytes = prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != size_bytes:
        faults.add(field, f"data_offsets {quote(offsets)} do not span the {size_bytes} bytes of {dtype} {shape}")
        return None
    return TensorRef(name=name, dtype=dtype, shape=tuple(shape), offset=start + offsets[0], size_bytes=size_bytes)


def _is_whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_coverage(tensors: list[TensorRef], where: str, start: int, size_bytes: int, *, faults: Faults) -> None:
    end = start
    for tensor in tensors:
        if tensor.offset < end:
            faults.add(
                f"{where}: {quote(tensor.name)}",
                f"begins at byte {tensor.offset}, inside the tensor before it, which ends at {end}",
            )
        elif tensor.offset > end:
            faults.add(f"{where}: {quote(tensor.name)}", f"leaves {tensor.offset - end} bytes before it that belong to no tensor")
        end = max(end, tensor.offset + tensor.size_bytes)
    if end > size_bytes:
        faults.add(where, f"is truncated: the tensors need {end} bytes, the file has {size_bytes}")
    elif end < size_bytes:
        faults.add(where, f"has {size_bytes - end} bytes after the last tensor")
