"""Every format that is served, in one batch and alone, against PEFT in float32; and every tensor of a file is accounted for."""

from __future__ import annotations

import copy
import itertools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fixtures.families import FUSED, MODELS, SEPARATE, VOCAB, save_model
from tests.fixtures.oracle import MixedBatches, Oracle, Row, compare, image_of, random_rows, save_peft_adapter
from veneer.artifact import BaseDescription, describe_base

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.timeout(300),  # PEFT writes an adapter of every format first
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:peft"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed"),
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings"),
    pytest.mark.filterwarnings("ignore:(PiSSA|OLoRA) changes the base weights"),
    pytest.mark.filterwarnings("ignore:Adapter .default.* have invalid shape"),  # PEFT says so of every bias inside a layer
]

TOLERANCE = 1e-4
FORMS = ("torch", "native")
# A model, and what it is there for.
BASES = {
    "plain": "llama 2",
    "with biases": "qwen2",
    "fused": "phi3",
    "four norms and capped logits": "gemma2",
}


def _plain(**config: Any) -> dict[str, Any]:
    return {"r": 8, "lora_alpha": 8, **config}


def _formats(modules: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Names of formats with the fields of LoraConfig that ask for them."""
    first, last, every = modules[0], modules[-1], list(modules)
    return {
        "lora": _plain(target_modules=every),
        "rank 1, one module": {"r": 1, "lora_alpha": 4.5, "target_modules": [first]},
        "rank 256": {"r": 256, "lora_alpha": 64, "target_modules": [last, "o_proj"]},
        "rslora": {"r": 64, "lora_alpha": 4.5, "use_rslora": True, "target_modules": every},
        "patterns": {
            "r": 16,
            "lora_alpha": 12.5,
            "target_modules": every,
            "rank_pattern": {last: 5, r"layers\.[02]\.self_attn\..*": 3},
            "alpha_pattern": {f"^model.layers.1.self_attn.{first}": 40.0, "o_proj": 2},
        },
        "all linear": {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"},
        "an expression": {"r": 4, "lora_alpha": 8, "target_modules": rf".*\.layers\.[13]\..*({first}|{last})"},
        "some layers": _plain(target_modules=every, layers=[2]),
        "dora": _plain(target_modules=every, use_dora=True),
        "dora, patterns, rslora": {
            "r": 33,
            "lora_alpha": 5,
            "use_rslora": True,
            "use_dora": True,
            "target_modules": [first, last],
            "rank_pattern": {last: 7},
            "layers": [0, 3],
        },
        "head": _plain(target_modules=["lm_head"]),
        "embedding": {"r": 3, "lora_alpha": 4.5, "target_modules": ["embed_tokens"]},
        "everything": {
            "r": 5,
            "lora_alpha": 5,
            "use_rslora": True,
            "target_modules": [*every, "embed_tokens", "lm_head"],
            "rank_pattern": {"lm_head": 20},
            "alpha_pattern": {"embed_tokens": 2},
        },
        "lora bias": _plain(target_modules=every, lora_bias=True),
        "bias all": _plain(target_modules=[first, "o_proj"], bias="all"),
        "bias lora_only": _plain(target_modules=every[:2], bias="lora_only"),
        "dora and bias": _plain(target_modules=[first, "o_proj"], bias="all", use_dora=True),
        "lora bias and bias": _plain(target_modules=[first, "o_proj"], bias="lora_only", lora_bias=True),
    }


@dataclass(frozen=True, slots=True)
class World:
    """A base and an adapter in every format."""

    model: Path
    base: BaseDescription
    adapters: dict[str, Path]
    rows: list[Row]
    theirs: list[torch.Tensor]


def _in_dtype(source: Path, folder: Path, dtype: torch.dtype) -> Path:
    """The same adapter with tensors of another type."""
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    weights = load_file(source / "adapter_model.safetensors")
    save_file({name: tensor.to(dtype) for name, tensor in weights.items()}, folder / "adapter_model.safetensors")
    return folder


def _converted(base: torch.nn.Module, folder: Path, start: str, modules: tuple[str, ...]) -> Path:
    """An adapter whose training began with a change of the base, as PEFT converts it to a plain LoRA."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(modules), init_lora_weights=start)
    model = get_peft_model(copy.deepcopy(base), config)
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(folder / "initial")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator) * parameter.abs().mean())
    model.peft_config["default"].init_lora_weights = start
    model.save_pretrained(folder, path_initial_model_for_weight_conversion=str(folder / "initial"))
    return folder


@pytest.fixture(scope="module", params=BASES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    tiny, folder = MODELS[BASES[request.param]], tmp_path_factory.mktemp("formats")
    base = save_model(tiny, folder / "model")
    adapters = {
        name: save_peft_adapter(base, folder / name, seed=seed, strength=0.5, **fields)
        for seed, (name, fields) in enumerate(_formats(tiny.modules).items())
    }
    adapters["fp16 file"] = _in_dtype(adapters["lora"], folder / "fp16", torch.float16)
    adapters["bf16 file, dora"] = _in_dtype(adapters["dora"], folder / "bf16", torch.bfloat16)
    for start in ("pissa", "olora"):
        adapters[f"{start}, converted"] = _converted(base, folder / start, start, tiny.modules)
    names = [name for name in adapters for _ in range(1 + (len(name) % 3 == 0))]
    rows = random_rows([*names, None, None], vocab=VOCAB, seed=1)
    return World(
        folder / "model", describe_base(folder / "model"), adapters, rows, Oracle(folder / "model", adapters).logits(rows)
    )


@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize("form", FORMS)
def test_every_format_in_one_batch_equals_peft(world: World, form: str, chunk: int) -> None:
    ours = MixedBatches(world.model, world.adapters, max_rows=2048, cpu_form=form)
    result = compare(ours.logits(world.rows, chunk=chunk), world.theirs, tolerance=TOLERANCE)
    assert result.largest_error <= TOLERANCE
    assert result.wrong_tokens == 0


@pytest.mark.parametrize("form", FORMS)
def test_every_format_alone_equals_peft(world: World, form: str) -> None:
    ours = MixedBatches(world.model, world.adapters, max_rows=2048, cpu_form=form)
    alone = [ours.logits([row], chunk=16)[0] for row in world.rows]
    assert compare(alone, world.theirs, tolerance=TOLERANCE).largest_error <= TOLERANCE


@pytest.mark.parametrize("form", FORMS)
def test_batch_invariant_forms_have_every_format_too(world: World, form: str) -> None:
    ours = MixedBatches(world.model, world.adapters, max_rows=2048, cpu_form=form, batch_invariant=True)
    mixed = ours.logits(world.rows, chunk=7)
    assert compare(mixed, world.theirs, tolerance=TOLERANCE).largest_error <= TOLERANCE
    assert all(torch.equal(ours.logits([row], chunk=16)[0], logits) for row, logits in zip(world.rows, mixed, strict=True))


def test_every_format_changes_what_its_rows_say(world: World) -> None:
    ids = world.rows[0].ids
    ours = MixedBatches(world.model, world.adapters, max_rows=2048, cpu_form="native")
    rows = [Row(name, ids) for name in (None, *world.adapters)]
    said = dict(zip((row.adapter for row in rows), ours.logits(rows, chunk=512), strict=True))
    for one, other in itertools.combinations(said, 2):
        same = {one, other} in ({"lora", "fp16 file"}, {"dora", "bf16 file, dora"})
        assert same or (said[one] - said[other]).abs().max() > 20 * TOLERANCE, (one, other)


def test_what_is_in_the_file_is_what_is_applied_site_by_site(world: World) -> None:
    """Counts tensors in the file, and live places of the descriptor table, by module and kind."""
    ours = MixedBatches(world.model, world.adapters, max_rows=2048)
    table = ours.runner.arena.descriptors
    paths = {module.path.format(layer=layer): module for module in world.base.modules for layer in range(world.base.num_layers)}
    for name, folder in world.adapters.items():
        written, slot = _tensors(folder), ours.slots[name]
        applied: Counter[tuple[str, str]] = Counter()
        for layer in range(world.base.num_layers):
            for index, module in enumerate(world.base.modules):
                path = module.path.format(layer=layer)
                rank = int(table.rank[slot, layer, index])
                assert rank == written.get((path, "lora_A"), rank and 0), (name, path)
                applied += Counter({(module.site, "pair"): int(rank > 0)})
                applied += Counter({(module.site, "gain"): int(table.gain_offset[slot, layer, index] >= 0)})
                applied += Counter({(module.site, "shift"): int(table.shift_offset[slot, layer, index] >= 0)})
        for index, edge in ours.runner.arena.edges.get(slot, {}).items():
            module = world.base.edges[index]
            assert edge.rank == written[module.path, "lora_A"]
            applied[module.site, "pair"] += 1
        wanted: Counter[tuple[str, str]] = Counter()
        for path, module in (paths | {module.path: module for module in world.base.edges}).items():
            has = {kind for where, kind in written if where == path}
            biased = world.base.family == "qwen2" and module.site == "qkv"
            wanted[module.site, "pair"] += {"lora_A", "lora_B"} <= has
            wanted[module.site, "gain"] += "lora_magnitude_vector" in has
            wanted[module.site, "shift"] += bool({"lora_bias", "bias"} & has) or (biased and "lora_magnitude_vector" in has)
        assert applied == +wanted, name
        assert len(written) == sum({"pair": 2, "gain": 1}.get(kind, 0) * count for (_, kind), count in wanted.items()) + sum(
            kind in ("lora_bias", "bias") for _, kind in written
        ), "no tensor of the file is left over"


def _tensors(folder: Path) -> dict[tuple[str, str], int]:
    """Gives (module path, kind) of every tensor in a file, with its first dimension."""
    found = {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        path = name.removeprefix("base_model.model.")
        for ending, kind in (
            (".lora_A.weight", "lora_A"),
            (".lora_B.weight", "lora_B"),
            (".lora_embedding_A", "lora_A"),
            (".lora_embedding_B", "lora_B"),
            (".lora_B.bias", "lora_bias"),
            (".lora_magnitude_vector", "lora_magnitude_vector"),
            (".base_layer.bias", "bias"),
            (".bias", "bias"),
        ):
            if path.endswith(ending):
                found[path.removesuffix(ending), kind] = tensor.shape[0]
                break
        else:
            raise AssertionError(name)
    return found


def _named(name: str) -> str:
    """A key as older versions of PEFT, and other trainers, write it: with the adapter's own name."""
    named = name.replace(".weight", ".mine.weight").replace("lora_B.bias", "lora_B.mine.bias")
    return named.replace("lora_magnitude_vector", "lora_magnitude_vector.mine.weight")


RENAMED: dict[str, Callable[[str], str]] = {
    "as of the bare model": lambda name: name.replace("base_model.model.model.", "base_model.model."),
    "with the adapter's name": _named,
    "magnitudes as parameters of a module": lambda name: name.replace("_vector", "_vector.weight"),
}


@pytest.mark.parametrize("how", RENAMED)
@pytest.mark.parametrize("name", ["lora", "dora", "lora bias and bias"])
def test_keys_under_other_known_names_make_the_same_image(world: World, tmp_path: Path, name: str, how: str) -> None:
    source = world.adapters[name]
    (tmp_path / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    renamed = {RENAMED[how](key): tensor for key, tensor in load_file(source / "adapter_model.safetensors").items()}
    save_file(renamed, tmp_path / "adapter_model.safetensors")
    one, other = (image_of("v", folder, base=world.base, model=world.model) for folder in (source, tmp_path))
    assert one.blocks == other.blocks
    assert one.payload.tobytes() == other.payload.tobytes()


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong in how gains and shifts are made."""

    name: str
    target: str
    value: Any


FAULTS = (
    Fault("magnitudes dropped", "dataplane.folding._norms", lambda weights, name, scaling, a, b: np.ones(len(b), np.float32)),
    Fault("norms of the base alone", "dataplane.folding._norms", lambda weights, name, scaling, a, b: _base_norms(weights, name)),
    Fault(
        "biases dropped",
        "dataplane.folding.fold",
        lambda *, gain, scaled, old, new: None if scaled is new else _zeros(scaled, new),
    ),
    Fault("gain on the base's bias", "dataplane.folding.BaseWeights.vector", lambda self, name: None),
)


def _zeros(*vectors: Any) -> Any:
    return next(0 * vector for vector in vectors if vector is not None)


def _base_norms(weights: Any, name: str) -> Any:
    return torch.cat([torch.from_numpy(part).norm(dim=1) for part in weights.rows(name)]).numpy()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_seen(world: World, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    if "base's bias" in fault.name and world.base.family != "qwen2":
        return
    monkeypatch.setattr(fault.target, fault.value)
    ours = MixedBatches(world.model, world.adapters, max_rows=2048)
    result = compare(ours.logits(world.rows, chunk=512), world.theirs, tolerance=TOLERANCE)
    assert result.largest_error > 10 * TOLERANCE


def test_the_formats_are_what_they_say(world: World) -> None:
    """A file of each format asks for it: no two configurations are alike in what matters."""
    asked = {name: json.loads((folder / "adapter_config.json").read_text()) for name, folder in world.adapters.items()}
    assert [name for name, fields in asked.items() if fields["use_dora"]] == [name for name in asked if "dora" in name]
    assert {fields["bias"] for fields in asked.values()} == {"none", "all", "lora_only"}
    modules = FUSED if world.base.family == "phi3" else SEPARATE
    assert {name.rpartition(".")[2] for name in asked["all linear"]["target_modules"]} == set(modules)
