"""Adapters of embedding and head as PEFT saves them, with copies of the base's weights: taken as what they are, or refused."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fixtures.families import MODELS, VOCAB, save_model
from tests.fixtures.oracle import MixedBatches, Oracle, compare, random_rows
from veneer.artifact import ArtifactError, BaseDescription, check, describe_base

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:peft"),
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings"),
    pytest.mark.filterwarnings("ignore:.*tied"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
    pytest.mark.filterwarnings("ignore:.*ensure_weight_tying"),
]
TOLERANCE = 1e-4
TARGETS = {
    "embedding": ["embed_tokens"],
    "head": ["lm_head"],
    "both and more": ["embed_tokens", "lm_head", "q_proj"],
}
SAVED: dict[str, Any] = {"by default": "auto", "with": True, "without": False}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclasses.dataclass(frozen=True, slots=True)
class World:
    """A base, whose weights are of one type, and its model."""

    folder: Path
    base: BaseDescription
    model: torch.nn.Module


@pytest.fixture(scope="module", params=["untied", "tied"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("copies") / "model"
    tiny = MODELS["gemma2" if request.param == "tied" else "llama 2"]
    model = save_model(tiny, folder)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == (request.param == "tied")
    return World(folder, describe_base(folder), model)


def saved(world: World, folder: Path, *, targets: list[str], how: Any, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """An adapter that was trained on the base in a type, as PEFT saves it."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=4, target_modules=targets)
    model = get_peft_model(copy.deepcopy(world.model).to(dtype), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder, save_embedding_layers=how)
    return folder


def checked(folder: Path, base: BaseDescription) -> Any:
    return check((folder / "adapter_config.json").read_bytes(), folder / "adapter_model.safetensors", base)


def copies(folder: Path) -> list[str]:
    return [name for name in load_file(folder / "adapter_model.safetensors") if "lora_" not in name]


@pytest.mark.parametrize("how", SAVED)
@pytest.mark.parametrize("target", TARGETS)
def test_what_peft_saves_of_embeddings_and_heads_is_taken_and_equals_it(
    world: World, tmp_path: Path, target: str, how: str
) -> None:
    folder = saved(world, tmp_path / "adapter", targets=TARGETS[target], how=SAVED[how])
    found = checked(folder, world.base)
    beside = copies(folder)
    assert bool(beside) == (how != "without")
    told = [warning for warning in found.report.warnings if "copy of the base's own weights" in warning]
    assert len(told) == len(beside)
    plain = saved(world, tmp_path / "plain", targets=TARGETS[target], how=False)
    assert found.report.num_pairs == checked(plain, world.base).report.num_pairs
    rows = random_rows(["adapter", None], vocab=VOCAB, seed=1)
    theirs = Oracle(world.folder, {"adapter": folder}).logits(rows)
    ours = MixedBatches(world.folder, {"adapter": folder}, max_rows=2048).logits(rows, chunk=7)
    assert compare(ours, theirs, tolerance=TOLERANCE).largest_error <= TOLERANCE


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_a_copy_is_known_in_whatever_type_the_base_is_stored_and_the_training_ran(
    world: World, tmp_path: Path, stored: str, dtype: str
) -> None:
    model = copy.deepcopy(world.model).to(DTYPES[stored])
    model.save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (world.folder / name).exists():
            (tmp_path / "model" / name).write_bytes((world.folder / name).read_bytes())
    base = describe_base(tmp_path / "model")
    of_type = World(tmp_path / "model", base, model)
    folder = saved(of_type, tmp_path / "adapter", targets=TARGETS["both and more"], how="auto", dtype=DTYPES[dtype])
    assert copies(folder)
    assert checked(folder, base).report.num_pairs


@pytest.mark.parametrize("how", ["changed", "cast twice", "cut", "of more tokens", "of no known base"])
def test_a_copy_that_is_not_the_bases_is_refused_with_what_to_drop(world: World, tmp_path: Path, how: str) -> None:
    folder = saved(world, tmp_path / "adapter", targets=["embed_tokens"], how="auto")
    path, base = folder / "adapter_model.safetensors", world.base
    tensors = load_file(path)
    name = copies(folder)[0]
    if how == "changed":
        tensors[name][-1, -1] += 1e-3
    elif how == "cast twice":
        tensors[name] = tensors[name].to(torch.bfloat16).to(torch.float32)
    elif how == "cut":
        tensors[name] = tensors[name][:-1].clone()
    elif how == "of more tokens":
        tensors[name] = torch.cat([tensors[name], tensors[name][:1]])
    else:
        base = dataclasses.replace(base, edge_digests=None)
    save_file(tensors, path)
    with pytest.raises(ArtifactError) as refused:
        checked(folder, base)
    assert len(refused.value.violations) == (len(copies(folder)) if how == "of no known base" else 1)
    assert refused.value.violations[0].field == f"adapter_model.safetensors: {name!r}"
    said = refused.value.message
    assert "modules_to_save" in said
    assert ("save_embedding_layers=False" if how in ("changed", "cast twice", "of no known base") else "added tokens") in said


def test_the_digests_of_a_base_survive_json(world: World) -> None:
    assert BaseDescription.from_json(world.base.to_json()) == world.base
    digests = {(one.site, one.dtype): one.sha256 for one in world.base.edge_digests or ()}
    assert len(digests) == 6
    tied = world.model.get_output_embeddings().weight is world.model.get_input_embeddings().weight
    assert (digests["embed", "F32"] == digests["head", "F32"]) == tied


@pytest.mark.parametrize(
    ("targets", "is_refused"), [(["q_proj"], False), (["embed_tokens"], True), (["q_proj", "lm_head"], True)]
)
def test_a_tie_of_embeddings_counts_only_where_one_is_adapted(
    world: World, tmp_path: Path, targets: list[str], is_refused: bool
) -> None:
    folder = saved(world, tmp_path / "adapter", targets=targets, how=False)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "ensure_weight_tying": True}))
    if not is_refused:
        assert checked(folder, world.base).report.num_pairs
        return
    with pytest.raises(ArtifactError, match="ensure_weight_tying: is not supported together with LoRA on embedding or head"):
        checked(folder, world.base)


def test_a_node_loads_what_was_published_without_comparing_again_and_applies_no_copy(world: World, tmp_path: Path) -> None:
    folder = saved(world, tmp_path / "adapter", targets=["lm_head", "embed_tokens"], how="auto")
    base = describe_base(world.folder, edges=False)
    assert (base.digest, base.edge_digests) == (world.base.digest, None)
    config, weights = (folder / "adapter_config.json").read_bytes(), folder / "adapter_model.safetensors"
    found = check(config, weights, base, compares_copies=False)
    applied = {ref.name for pair in found.pairs for ref in (pair.a, pair.b)}
    assert applied.isdisjoint(copies(folder))
    assert len(applied) + len(copies(folder)) == len(load_file(weights))
