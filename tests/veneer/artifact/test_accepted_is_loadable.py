"""Accepted ⇔ loadable: what passes the check can be read to the last pair, and every sound adapter passes."""

from __future__ import annotations

import io
import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.adapters import AdapterFiles, describe_llama, make_adapter_folder
from veneer.artifact import ArtifactError, check

BASE = describe_llama()
NAMES = [module.name for module in BASE.modules]

_ADAPTERS = st.fixed_dictionaries(
    {
        "modules": st.lists(st.sampled_from(NAMES), min_size=1, max_size=7, unique=True),
        "layers": st.lists(st.sampled_from([0, 1]), min_size=1, max_size=2, unique=True),
        "ranks": st.dictionaries(st.sampled_from(NAMES), st.sampled_from([1, 2, 3, 8, 17])).map(
            lambda some: {name: some.get(name, 4) for name in NAMES}
        ),
        "dtype": st.sampled_from(["F32", "F16", "BF16"]),
        "alpha": st.sampled_from([1, 0.5, 16, 3.25, -2]),
        "adapter_name": st.sampled_from(["", "default", "lora"]),
        "seed": st.integers(0, 9),
        "config": st.fixed_dictionaries(
            {}, optional={"use_rslora": st.booleans(), "target_modules": st.sampled_from(["all-linear", None])}
        ),
    }
)


def _make(options: dict[str, Any]) -> tuple[bytes, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        files = AdapterFiles.of(make_adapter_folder(Path(folder), BASE, **options))
        return files.config, files.weights.read_bytes()


def _assert_loadable(config: bytes, weights: bytes) -> None:
    """Reads an accepted adapter, and asks the official reader about the same bytes."""
    artifact = check(config, io.BytesIO(weights), BASE)
    official = dict(safetensors.deserialize(weights))
    read = list(artifact.read(io.BytesIO(weights)))
    assert [pair for pair, _, _ in read] == list(artifact.pairs)
    assert {ref.name for pair in artifact.pairs for ref in (pair.a, pair.b)} == set(official)
    assert len({(pair.layer, pair.slice) for pair in artifact.pairs}) == len(artifact.pairs) == artifact.report.num_pairs
    for pair, a, b in read:
        module = BASE.modules[pair.slice]
        assert a.shape == (pair.rank, module.in_features)
        assert b.shape == (module.out_features, pair.rank)
        assert np.isfinite(a).all()
        assert np.isfinite(b).all()
        assert np.isfinite(pair.scaling)
        assert pair.scaling != 0
        for ref in (pair.a, pair.b):
            assert bytes(official[ref.name]["data"]) == weights[ref.offset : ref.offset + ref.size_bytes]
        with np.errstate(over="raise", invalid="raise"):
            np.float32(pair.scaling) * (b @ (a @ np.full(module.in_features, 65536, np.float32)))


@given(_ADAPTERS)
def test_every_sound_adapter_is_accepted(options: dict[str, Any]) -> None:
    _assert_loadable(*_make(options))


@given(_ADAPTERS, st.data())
def test_damaged_bytes_are_refused_or_still_loadable(options: dict[str, Any], data: st.DataObject) -> None:
    config, weights = _make(options)
    files = [bytearray(config), bytearray(weights)]
    for _ in range(data.draw(st.integers(1, 4))):
        damaged = files[data.draw(st.sampled_from([0, 1, 1]))]
        header = 8 + int.from_bytes(weights[:8], "little")
        position = data.draw(st.integers(0, min(len(damaged), header + 200) - 1))
        damaged[position] = data.draw(st.integers(0, 255))
    try:
        check(bytes(files[0]), io.BytesIO(bytes(files[1])), BASE)
    except ArtifactError:
        return
    _assert_loadable(bytes(files[0]), bytes(files[1]))


_SHAPES = st.sampled_from([[8, 16], [16, 8], [7, 16], [16, 7], [0, 16], [8], [8, 2, 8]])
_CONFIG_VALUES = st.sampled_from(
    [None, True, False, 0, 1, 8, 0.5, -1, "", "x", "q_proj", [], ["q_proj"], {}, {"q_proj": 8}, {"(": 1}]
)


@given(st.data())
def test_headers_and_configurations_put_together_at_random_are_refused_or_loadable(data: st.DataObject) -> None:
    header: dict[str, Any] = {}
    end = 0
    for layer in range(data.draw(st.integers(0, 2))):
        for part, usual in (("A", [8, 16]), ("B", [16, 8])):
            shape = data.draw(st.one_of(st.just(usual), st.just(usual), _SHAPES))
            size = 4 * int(np.prod(shape))
            entry = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
            header[f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{part}.weight"] = entry
            end += size
    text = json.dumps(header).encode()
    weights = struct.pack("<Q", len(text)) + text + bytes(end)
    fields: dict[str, Any] = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    names = [*fields, "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "bias", "modules_to_save", "unknown"]
    fields.update(data.draw(st.dictionaries(st.sampled_from(names), _CONFIG_VALUES, max_size=2)))
    config = json.dumps(fields).encode()
    try:
        check(config, io.BytesIO(weights), BASE)
    except ArtifactError:
        return
    _assert_loadable(config, weights)
