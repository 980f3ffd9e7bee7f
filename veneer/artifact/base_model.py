"""Describes a base model from its Hugging Face folder: family, shapes, and a digest over everything that shapes its output."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from veneer.artifact.copies import digests_of
from veneer.artifact.description import BaseDescription, EdgeDigest, TargetModule
from veneer.artifact.digest import Manifest
from veneer.artifact.ends import find_ends
from veneer.artifact.families import read_family, read_max_context, read_modules, whole
from veneer.artifact.faults import Faults, quote
from veneer.artifact.header import DTYPE_BYTES, FLOAT_DTYPES, HeaderLimits, TensorRef, read_header
from veneer.artifact.hub import folder_name
from veneer.artifact.source import opened
from veneer.artifact.strict_json import parse_object

_HEADER_LIMITS = HeaderLimits(
    max_header_bytes=64 << 20, max_tensors=1 << 16, max_name_chars=256, max_dimension=1 << 31, dtypes=frozenset(DTYPE_BYTES)
)
_CHUNK_BYTES = 8 << 20
_MAX_JSON_BYTES = 64 << 20
# Written by tools, without effect on the model.
_VOLATILE_FIELDS = ("_name_or_path", "name_or_path", "transformers_version")
# Of generation_config.json only these reach the engine; sampling parameters come with each request.
_TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, slots=True)
class Shard:
    """A safetensors file of a model, and the tensors in it."""

    path: Path
    tensors: tuple[TensorRef, ...]


def describe_base(
    folder: Path, *, name: str | None = None, known_names: Sequence[str] = (), edges: bool = True
) -> BaseDescription:
    """Reads a model folder. Streams all weights once to hash them.

    Args:
        folder: Holds config.json, tokenizer.json and one or more safetensors files.
        name: Human name; by default the config's `_name_or_path`, else the folder's name; see `folder_name`.
        known_names: Further names under which adapter files may refer to this base.
        edges: Whether to make the digests by which copies of embedding and head are known, for which both are read once more.

    Raises:
        ArtifactError: The folder is no model of a supported family; every fault is listed.
    """
    faults = Faults(64)
    config = _read_json(folder / "config.json", faults=faults)
    text = _read_text_parts(folder, faults=faults)
    shards = read_shards(folder, faults=faults)
    shapes = {tensor.name: tensor for shard in shards for tensor in shard.tensors}
    faults.raise_if_any()
    family = read_family(config, faults=faults)
    faults.raise_if_any()
    assert family is not None, "a family that is not known is a fault"
    modules = read_modules(config, family, faults=faults)
    num_layers = whole(config, "num_hidden_layers", faults=faults, largest=1024)
    vocab_size = whole(config, "vocab_size", faults=faults, largest=1 << 30)
    max_context = read_max_context(config, faults=faults)
    faults.raise_if_any()
    _check_tensors(shapes, modules, num_layers, vocab_size, int(config["hidden_size"]), faults=faults)
    eos_ids, named_apart = _read_ends(folder, config, vocab_size, faults=faults)
    faults.raise_if_any()
    written_name = _read_name(config)
    chosen = name or written_name or folder_name(folder)
    others = [other for other in (*known_names, written_name, folder_name(folder)) if other and other != chosen]
    return BaseDescription(
        digest=_digest(config, shards, text, eos_ids if named_apart else ()),
        name=chosen[:200],
        family=family.name,
        num_layers=num_layers,
        modules=modules,
        vocab_size=vocab_size,
        max_context=max_context,
        known_names=tuple(dict.fromkeys(other[:200] for other in others)),
        eos_ids=eos_ids,
        edge_digests=_edge_digests(shards, config) if edges else None,
    )


def _edge_digests(shards: Sequence[Shard], config: dict[str, Any]) -> tuple[EdgeDigest, ...]:
    """Digests of the embedding and the head; a base that ties them, or has no head of its own, has the embedding's twice."""
    places = {tensor.name: (shard.path, tensor) for shard in shards for tensor in shard.tensors}
    embedding, head = places["model.embed_tokens.weight"], places.get("lm_head.weight")
    found = digests_of(_parts(*embedding), embedding[1].dtype, "embed")
    if head is None or config.get("tie_word_embeddings") is True:
        return (*found, *(EdgeDigest("head", one.dtype, one.sha256) for one in found))
    if head[1].shape != embedding[1].shape or head[1].dtype not in FLOAT_DTYPES:
        return tuple(found)  # no copy of it is known
    return (*found, *digests_of(_parts(*head), head[1].dtype, "head"))


def _parts(path: Path, tensor: TensorRef) -> Iterator[bytes]:
    with opened(path) as source:
        for offset in range(0, tensor.size_bytes, _CHUNK_BYTES):
            yield source.read(tensor.offset + offset, min(_CHUNK_BYTES, tensor.size_bytes - offset))


def read_eos_ids(folder: Path, *, vocab_size: int) -> tuple[int, ...]:
    """Gives the ids that end a sequence; see `find_ends`.

    Args:
        folder: A model folder as for `describe_base`; files that are missing name no end.
        vocab_size: Rows of the token embedding.

    Raises:
        ArtifactError: A file of the folder cannot be read, or names no token.
    """
    faults = Faults(64)
    config = _read_optional_json(folder / "config.json", faults=faults)
    eos_ids, _ = _read_ends(folder, config, vocab_size, faults=faults)
    faults.raise_if_any()
    return eos_ids


def _read_ends(folder: Path, config: dict[str, Any], vocab_size: int, *, faults: Faults) -> tuple[tuple[int, ...], bool]:
    """Gives the ids that end a sequence, and whether special_tokens_map.json, of which the digest is not made, names one more."""
    tokenizer = folder / "tokenizer.json"
    find = partial(
        find_ends,
        generation=_read_optional_json(folder / "generation_config.json", faults=faults),
        config=config,
        settings=_read_optional_json(folder / "tokenizer_config.json", faults=faults),
        tokenizer=_read_bytes(tokenizer, faults=faults) if tokenizer.exists() else b"{}",
        vocab_size=vocab_size,
        faults=faults,
    )
    eos_ids = find(special_tokens=_read_optional_json(folder / "special_tokens_map.json", faults=faults))
    return eos_ids, len(eos_ids) > len(find(special_tokens={}))


def _read_name(config: dict[str, Any]) -> str:
    """Gives the name that the folder was saved under; of a path on somebody's machine only the last segment."""
    name = str(config.get("_name_or_path") or "")
    return Path(name).name if name.startswith(("/", ".", "~")) else name


def _read_bytes(path: Path, *, faults: Faults) -> bytes:
    try:
        size_bytes = path.stat().st_size
        if size_bytes > _MAX_JSON_BYTES:
            faults.add(path.name, f"has {size_bytes} bytes; at most {_MAX_JSON_BYTES} are allowed")
            return b""
        return path.read_bytes()
    except FileNotFoundError:
        faults.add(path.name, "is missing from the model folder")
        return b""


def _read_json(path: Path, *, faults: Faults) -> dict[str, Any]:
    known = len(faults)
    data = _read_bytes(path, faults=faults)
    if len(faults) > known:
        return {}
    return parse_object(data, path.name, max_depth=16, faults=faults) or {}


def _read_text_parts(folder: Path, *, faults: Faults) -> dict[str, bytes]:
    """Gives what turns text into tokens and ends a sequence: tokenizer, its settings, chat template, ids of special tokens."""
    settings = _read_optional_json(folder / "tokenizer_config.json", faults=faults)
    template = settings.pop("chat_template", None)
    if (folder / "chat_template.jinja").exists():
        template = _read_bytes(folder / "chat_template.jinja", faults=faults).decode(errors="replace")
    generation = _read_optional_json(folder / "generation_config.json", faults=faults)
    return {
        "tokenizer": _read_bytes(folder / "tokenizer.json", faults=faults),
        "tokenizer_config": _canonical(_without_volatile(settings)),
        "template": template.encode() if isinstance(template, str) else _canonical(template),
        "tokens": _canonical({name: generation.get(name) for name in _TOKEN_FIELDS}),
    }


def _read_optional_json(path: Path, *, faults: Faults) -> dict[str, Any]:
    return _read_json(path, faults=faults) if path.exists() else {}


def _without_volatile(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in _VOLATILE_FIELDS}


def read_shards(folder: Path, *, faults: Faults) -> list[Shard]:
    """Reads the headers of a model folder's weights; with an index, those that it names."""
    index = folder / "model.safetensors.index.json"
    weight_map: dict[str, str] | None = None
    if index.exists():
        written = _read_json(index, faults=faults).get("weight_map")
        if not isinstance(written, dict) or not all(_is_file_name(file) for file in written.values()):
            faults.add(index.name, "weight_map must map each tensor to a file name in the folder")
            return []
        weight_map = written
        paths = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        paths = [folder / "model.safetensors"]
    shards: list[Shard] = []
    seen: set[str] = set()
    for path in paths:
        if not path.is_file():
            faults.add(path.name, "is missing from the model folder; weights are read from safetensors files only")
            continue
        with opened(path) as source:
            tensors = tuple(read_header(source, path.name, limits=_HEADER_LIMITS, faults=faults))
        for tensor in tensors:
            if tensor.name in seen:
                faults.add(path.name, f"tensor {quote(tensor.name)} is in another file too")
            if weight_map is not None and weight_map.get(tensor.name) != path.name:
                faults.add(path.name, f"tensor {quote(tensor.name)} is not listed in {index.name} for this file")
            seen.add(tensor.name)
        shards.append(Shard(path=path, tensors=tensors))
    for missing in sorted(set(weight_map or {}) - seen):
        faults.add(index.name, f"tensor {quote(missing)} is in no file")
    return shards


def _is_file_name(value: Any) -> bool:
    return (
        isinstance(value, str) and value.endswith(".safetensors") and "/" not in value and "\\" not in value and "\0" not in value
    )


def _check_tensors(
    tensors: dict[str, TensorRef],
    modules: Iterable[TargetModule],
    num_layers: int,
    vocab_size: int,
    hidden: int,
    *,
    faults: Faults,
) -> None:
    expected = {"model.embed_tokens.weight": (vocab_size, hidden), "model.norm.weight": (hidden,)}
    for module in modules:
        for layer in range(num_layers):
            expected[module.path.format(layer=layer) + ".weight"] = (module.out_features, module.in_features)
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            faults.add(f"tensor {name}", "is missing")
        elif tensor.shape != shape:
            faults.add(f"tensor {name}", f"has shape {list(tensor.shape)}; config.json gives {list(shape)}")
        elif tensor.dtype not in FLOAT_DTYPES:
            faults.add(f"tensor {name}", f"has element type {tensor.dtype}; {', '.join(sorted(FLOAT_DTYPES))} are supported")


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _digest(config: dict[str, Any], shards: Sequence[Shard], text: dict[str, bytes], ends_apart: Sequence[int]) -> str:
    """Hashes the parts in a fixed order; how tensors are spread over files does not matter.

    Ends are a part of their own only where the other parts do not name them all, so that other bases keep their digests.
    """
    manifest = Manifest("veneer.base.v1")
    manifest.add("config", _canonical(_without_volatile(config)))
    for tensor, path in sorted(
        ((tensor, shard.path) for shard in shards for tensor in shard.tensors), key=lambda item: item[0].name
    ):
        manifest.add("tensor", _canonical([tensor.name, tensor.dtype, list(tensor.shape)]))
        manifest.begin("bytes", tensor.size_bytes)
        with opened(path) as source:
            for offset in range(tensor.offset, tensor.offset + tensor.size_bytes, _CHUNK_BYTES):
                manifest.feed(source.read(offset, min(_CHUNK_BYTES, tensor.offset + tensor.size_bytes - offset)))
    for part in ("tokenizer", "tokenizer_config", "template", "tokens"):
        manifest.add(part, text[part])
    if ends_apart:
        manifest.add("ends", _canonical(list(ends_apart)))
    return manifest.hexdigest()
