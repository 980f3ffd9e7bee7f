from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.adapters import Tensors, describe_llama
from tests.veneer.artifact.conftest import MakeBase
from veneer.artifact import ArtifactError, BaseDescription, describe_base, folder_name


def test_a_llama_folder_is_described(tmp_path: Path, make_base: MakeBase) -> None:
    base = describe_base(make_base(tmp_path / "little", config={"_name_or_path": "org/little"}), known_names=["nick"])
    assert base.modules == describe_llama().modules
    assert [module.name for module in base.modules] == [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ]
    assert [module.site for module in base.modules] == ["qkv", "qkv", "qkv", "o", "gate_up", "gate_up", "down"]
    assert (base.name, base.known_names, base.family) == ("org/little", ("nick", "little"), "llama")
    assert (base.num_layers, base.vocab_size, base.max_context, len(base.digest)) == (2, 32, 128, 64)
    assert BaseDescription.from_json(base.to_json()) == base


def _fuse(tensors: Tensors) -> None:
    for layer in range(2):
        for fused, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
            stem = f"model.layers.{layer}.{fused.partition('.')[0]}."
            held = [tensors.pop(f"{stem}{part}_proj.weight") for part in parts]
            shape = (sum(tensor[1][0] for tensor in held), held[0][1][1])
            tensors[f"model.layers.{layer}.{fused}.weight"] = (held[0][0], shape, b"".join(tensor[2] for tensor in held))


def test_a_base_of_fused_tensors_has_a_module_for_each(tmp_path: Path, make_base: MakeBase) -> None:
    base = describe_base(make_base(tmp_path / "f", config={"architectures": ["Phi3ForCausalLM"]}, edit=_fuse))
    assert base.family == "phi3"
    assert [(module.name, module.site, module.in_features, module.out_features) for module in base.modules] == [
        ("qkv_proj", "qkv", 16, 32),
        ("o_proj", "o", 16, 16),
        ("gate_up_proj", "gate_up", 16, 48),
        ("down_proj", "down", 24, 16),
    ]
    with pytest.raises(ArtifactError, match=r"qkv_proj\.weight: is missing"):
        describe_base(make_base(tmp_path / "g", config={"architectures": ["Phi3ForCausalLM"]}))


def test_a_head_has_the_width_that_its_family_has_where_nothing_is_said(tmp_path: Path, make_base: MakeBase) -> None:
    with pytest.raises(ArtifactError, match=r"q_proj\.weight: has shape \[16, 16\]; config\.json gives \[512, 16\]"):
        describe_base(make_base(tmp_path / "f", config={"architectures": ["Qwen3ForCausalLM"]}))
    written = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 4}
    assert describe_base(make_base(tmp_path / "g", config=written)).family == "qwen3"


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        (None, 128),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "yarn", "factor": 4.0}, 128),
        ({"rope_type": "longrope", "original_max_position_embeddings": 64}, 64),
        ({"type": "su", "original_max_position_embeddings": 64}, 64),
        ({"rope_type": "dynamic", "factor": 4.0}, 128),
        ({"rope_type": "yarn", "factor": "4", "original_max_position_embeddings": -1}, 128),
        ({"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {}}, 128),
        ("nonsense", 128),
    ],
)
def test_the_context_is_the_one_that_is_served(rope: Any, context: int, tmp_path: Path, make_base: MakeBase) -> None:
    for name in ("rope_scaling", "rope_parameters"):
        assert describe_base(make_base(tmp_path / name, config={name: rope})).max_context == context


def test_a_snapshot_of_the_hub_is_named_by_its_repository(tmp_path: Path, make_base: MakeBase) -> None:
    snapshots = tmp_path / "models--Org--little.v2" / "snapshots"
    snapshot = make_base(snapshots / ("0f" * 20))
    base = describe_base(snapshot)
    assert (base.name, base.known_names) == ("Org/little.v2", ())
    (tmp_path / "current").symlink_to(snapshot)
    assert folder_name(tmp_path / "current") == "Org/little.v2"
    assert folder_name(tmp_path / "models--gpt" / "snapshots" / ("a" * 40)) == "gpt"
    for other in ("snapshots/" + "a" * 40, "models--o--n/snapshots/main", "models--o--n/refs/" + "a" * 40, "a" * 40):
        assert folder_name(tmp_path / other) == other.rpartition("/")[2]


def test_a_name_that_is_somebodys_path_is_shortened(tmp_path: Path, make_base: MakeBase) -> None:
    assert describe_base(make_base(tmp_path / "f", config={"_name_or_path": "/home/someone/model"})).name == "model"
    assert describe_base(make_base(tmp_path / "f")).name == "f"
    assert describe_base(make_base(tmp_path / "f"), name="chosen").name == "chosen"


def test_the_digest_does_not_depend_on_how_tensors_are_spread_or_ordered(tmp_path: Path, make_base: MakeBase) -> None:
    def turn(tensors: Tensors) -> None:
        for name in reversed(list(tensors)):
            tensors[name] = tensors.pop(name)

    whole = describe_base(make_base(tmp_path / "whole"))
    assert describe_base(make_base(tmp_path / "sharded", shards=3)).digest == whole.digest
    assert describe_base(make_base(tmp_path / "turned", edit=turn)).digest == whole.digest
    assert (
        describe_base(make_base(tmp_path / "named", config={"_name_or_path": "x", "transformers_version": "9"})).digest
        == whole.digest
    )


def _flip(tensors: Tensors) -> None:
    dtype, shape, data = tensors["model.norm.weight"]
    tensors["model.norm.weight"] = (dtype, shape, bytes([data[0] ^ 1]) + data[1:])


def _retype(tensors: Tensors) -> None:
    _, shape, data = tensors["model.norm.weight"]
    tensors["model.norm.weight"] = ("F16", shape, data)


def _add(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    "change",
    [{"edit": _flip}, {"edit": _retype}, {"edit": _add}, {"seed": 1}, {"config": {"rope_theta": 5.0}}, {"template": "other"}],
)
def test_whatever_shapes_the_output_changes_the_digest(change: dict[str, Any], tmp_path: Path, make_base: MakeBase) -> None:
    assert describe_base(make_base(tmp_path / "a", **change)).digest != describe_base(make_base(tmp_path / "b")).digest


def test_every_file_that_shapes_tokens_changes_the_digest(tmp_path: Path, make_base: MakeBase) -> None:
    folder = make_base(tmp_path / "a")
    digests = [describe_base(folder).digest]
    for name, text in (
        ("tokenizer.json", "{}"),
        ("chat_template.jinja", "{{ messages }}!"),
        ("tokenizer_config.json", '{"eos_token": "</s>"}'),
        ("generation_config.json", '{"eos_token_id": [1, 2]}'),
    ):
        (folder / name).write_text(text)
        digests.append(describe_base(folder).digest)
    assert len(set(digests)) == 5


def test_what_only_tells_of_tools_or_defaults_does_not(tmp_path: Path, make_base: MakeBase) -> None:
    folder = make_base(tmp_path / "a")
    before = describe_base(folder).digest
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "name_or_path": "/somewhere"}, indent=4))
    (folder / "generation_config.json").write_text('{"transformers_version": "9", "temperature": 0.2}')
    assert describe_base(folder).digest == before


def test_a_template_counts_the_same_in_either_file(tmp_path: Path, make_base: MakeBase) -> None:
    inside, beside = make_base(tmp_path / "a", template="{{ x }}"), make_base(tmp_path / "b", template="")
    (beside / "chat_template.jinja").write_text("{{ x }}")
    assert describe_base(inside).digest == describe_base(beside).digest


def _cut(tensors: Tensors) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = ("F32", (2, 2), bytes(16))


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        (
            {"config": {"architectures": ["MixtralForCausalLM"]}},
            ["['MixtralForCausalLM'] (model_type 'llama') is not supported; LlamaForCausalLM, MistralForCausalLM, "],
        ),
        ({"config": {"architectures": ...}}, ["is not supported"]),
        ({"config": {"architectures": ["LlamaForCausalLM", "X"]}}, ["is not supported"]),
        ({"config": {"quantization_config": {"bits": 4}}}, ["quantised bases are not supported"]),
        ({"config": {"hidden_size": "16", "vocab_size": 0}}, ["hidden_size: must be a whole number", "vocab_size"]),
        ({"config": {"num_hidden_layers": 10**9}}, ["from 1 to 1024"]),
        ({"config": {"num_key_value_heads": 4}}, ["k_proj.weight: has shape [8, 16]; config.json gives [16, 16]"]),
        ({"edit": _cut}, ["layers.1.mlp.up_proj.weight: is missing", "has shape [2, 2]; config.json gives [24, 16]"]),
    ],
)
def test_what_cannot_be_served_is_refused_with_every_fault(
    change: dict[str, Any], faults: list[str], tmp_path: Path, make_base: MakeBase
) -> None:
    with pytest.raises(ArtifactError) as error:
        describe_base(make_base(tmp_path / "f", **change))
    for fault in faults:
        assert fault in error.value.message


def test_missing_files_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as error:
        describe_base(tmp_path)
    assert [violation.field for violation in error.value.violations] == ["config.json", "tokenizer.json", "model.safetensors"]


def _escape(index: dict[str, Any]) -> None:
    index["weight_map"]["x"] = "../../etc/passwd.safetensors"


def _forget(index: dict[str, Any]) -> None:
    del index["weight_map"]["model.norm.weight"]


def _promise(index: dict[str, Any]) -> None:
    index["weight_map"]["absent"] = next(iter(index["weight_map"].values()))


@pytest.mark.parametrize(
    ("edit", "fault"), [(_escape, "a file name in the folder"), (_forget, "is not listed"), (_promise, "'absent' is in no file")]
)
def test_a_wrong_index_is_refused(
    edit: Callable[[dict[str, Any]], None], fault: str, tmp_path: Path, make_base: MakeBase
) -> None:
    path = make_base(tmp_path / "f", shards=2) / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index)
    path.write_text(json.dumps(index))
    with pytest.raises(ArtifactError, match=fault):
        describe_base(path.parent)
