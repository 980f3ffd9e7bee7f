"""Base model folders of a tiny Llama, made without transformers."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fixtures.adapters import Tensors, describe_llama, encode, write_safetensors
from veneer.artifact import BaseDescription, TensorRef
from veneer.artifact.faults import Faults
from veneer.artifact.header import HeaderLimits, read_header
from veneer.artifact.source import opened

MakeBase = Callable[..., Path]
WriteRaw = Callable[..., Path]
ReadFaults = Callable[[Path], tuple[list[TensorRef], list[str]]]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 32,
    "max_position_embeddings": 128,
}


def _tensors(base: BaseDescription, seed: int) -> Tensors:
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (base.vocab_size, 16), "model.norm.weight": (16,)}
    for layer in range(base.num_layers):
        for module in base.modules:
            shapes[module.path.format(layer=layer) + ".weight"] = (module.out_features, module.in_features)
    return {name: ("BF16", shape, encode(random.standard_normal(shape), "BF16")) for name, shape in shapes.items()}


@pytest.fixture
def make_base() -> MakeBase:
    """Writes a model folder; `config` replaces fields, `edit` changes tensors, `shards` spreads them over files."""

    def make(
        folder: Path,
        *,
        config: Mapping[str, Any] | None = None,
        edit: Callable[[Tensors], None] | None = None,
        shards: int = 1,
        seed: int = 0,
        template: str = "{{ messages }}",
    ) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        fields = {name: value for name, value in {**CONFIG, **(config or {})}.items() if value is not ...}
        (folder / "config.json").write_text(json.dumps(fields))
        (folder / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        tensors = _tensors(describe_llama(), seed)
        if edit is not None:
            edit(tensors)
        if shards == 1:
            write_safetensors(folder / "model.safetensors", tensors)
            return folder
        weight_map = {}
        for shard in range(shards):
            name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            part = {tensor: value for number, (tensor, value) in enumerate(tensors.items()) if number % shards == shard}
            write_safetensors(folder / name, part)
            weight_map.update(dict.fromkeys(part, name))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return folder

    return make


@pytest.fixture
def write_raw(tmp_path: Path) -> WriteRaw:
    """Writes a safetensors file from header text and data as they are."""

    def write(header: str | bytes, data: bytes = b"", *, length: int | None = None) -> Path:
        text = header.encode() if isinstance(header, str) else header
        path = tmp_path / "raw.safetensors"
        path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
        return path

    return write


@pytest.fixture
def read_faults() -> ReadFaults:
    """Reads a header with small limits; gives the tensors and the faults as text."""
    limits = HeaderLimits(
        max_header_bytes=4096, max_tensors=8, max_name_chars=16, max_dimension=100, dtypes=frozenset({"F32", "BF16"})
    )

    def read(path: Path) -> tuple[list[TensorRef], list[str]]:
        faults = Faults(64)
        with opened(path) as source:
            tensors = read_header(source, "file", limits=limits, faults=faults)
        return tensors, [str(violation) for violation in faults.violations]

    return read
