"""Every family, every form of positions and of checkpoint: mixed batches against transformers and PEFT run alone."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane.model.architecture import Architecture
from dataplane.model.config import read_config
from tests.fixtures.families import FUSED, VOCAB, Tiny, make_setting, rope, save_model
from tests.fixtures.oracle import PAGE_SIZE, MixedBatches, Oracle, Row, Setting, compare, mixed_rows, random_rows
from veneer.artifact import describe_base

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:peft"),
]

LEAST_DECIDED = 0.98
TOLERANCE = 1e-4
LONGEST = 39  # tokens of a sequence at most
WINDOW = 11
SLIDES = "sliding_attention"
ORIGINAL: dict[str, Any] = {"original_max_position_embeddings": 16}
LLAMA3: dict[str, Any] = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL}
YARN: dict[str, Any] = {"beta_fast": 4.0, "beta_slow": 0.5, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}

MODELS = {
    "llama 2": Tiny("llama", "LlamaConfig"),
    "llama 3": Tiny("llama", "LlamaConfig", rope("llama3", **LLAMA3)),
    "llama linear": Tiny("llama", "LlamaConfig", rope("linear", factor=4.0)),
    "llama yarn": Tiny("llama", "LlamaConfig", rope("yarn", factor=4.0, **ORIGINAL)),
    "llama yarn, all fields": Tiny("llama", "LlamaConfig", rope("yarn", factor=4.0, **ORIGINAL, **YARN)),
    "llama dynamic": Tiny("llama", "LlamaConfig", rope("dynamic", factor=4.0) | {"max_position_embeddings": LONGEST}),
    "llama, tied, sharded, fp16": Tiny(
        "llama", "LlamaConfig", {"tie_word_embeddings": True}, dtype=torch.float16, shard_bytes=40_000
    ),
    "mistral": Tiny("mistral", "MistralConfig", {"sliding_window": WINDOW, "head_dim": 32}),
    "mistral, no window": Tiny("mistral", "MistralConfig", {"sliding_window": None}),
    "qwen2": Tiny("qwen2", "Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2, windows, yarn, sharded, bf16": Tiny(
        "qwen2",
        "Qwen2Config",
        rope("yarn", factor=4.0, **ORIGINAL)
        | {"max_position_embeddings": 16, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
        dtype=torch.bfloat16,
        shard_bytes=40_000,
    ),
    "qwen3": Tiny("qwen3", "Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3, windows": Tiny(
        "qwen3",
        "Qwen3Config",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": WINDOW, "layer_types": ["full_attention", SLIDES] * 2},
    ),
    "smollm3": Tiny("smollm3", "SmolLM3Config"),
    "smollm3, windows": Tiny(
        "smollm3",
        "SmolLM3Config",
        {"no_rope_layers": [1, 0, 0, 1], "use_sliding_window": True, "sliding_window": WINDOW, "tie_word_embeddings": False},
    ),
    "phi3": Tiny("phi3", "Phi3Config", {"sliding_window": WINDOW}, modules=FUSED),
    "phi3, longrope, part of the head": Tiny(
        "phi3",
        "Phi3Config",
        {
            "original_max_position_embeddings": LONGEST,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.1, 1.3, 2.0],
                "long_factor": [1.0, 2.0, 4.0, 8.0],
            },
        },
        modules=FUSED,
        dtype=torch.bfloat16,
    ),
    "gemma2": Tiny(
        "gemma2",
        "Gemma2Config",
        {
            "head_dim": 32,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": Tiny(
        "gemma3",
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "layer_types": [SLIDES, SLIDES, "full_attention", SLIDES],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                SLIDES: {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        dtype=torch.bfloat16,
    ),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A model with the rows that go through it and what the oracle says of them."""

    tiny: Tiny
    setting: Setting
    rows: list[Row]
    theirs: list[torch.Tensor]


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    tiny = MODELS[request.param]
    setting = make_setting(tiny, tmp_path_factory.mktemp("family"), tolerance=TOLERANCE)
    rows = mixed_rows(setting, seed=1)
    assert 2 * WINDOW < max(len(row.ids) for row in rows) <= LONGEST
    return Case(tiny, setting, rows, setting.theirs.logits(rows))


@pytest.mark.parametrize("chunk", [1, 7, PAGE_SIZE, 512])
def test_a_mixed_batch_equals_each_row_alone(case: Case, chunk: int) -> None:
    result = compare(case.setting.ours.logits(case.rows, chunk=chunk), case.theirs, tolerance=TOLERANCE)
    assert result.largest_error <= TOLERANCE
    assert result.decided >= LEAST_DECIDED
    assert result.wrong_tokens == 0


@pytest.mark.parametrize("chunk", [1, 7])
def test_the_form_that_is_chosen_equals_each_row_alone(case: Case, chunk: int) -> None:
    ours = MixedBatches(case.setting.model, case.setting.adapters, cpu_form="auto")
    form = read_config(case.setting.model)
    has_native = form.head_dim % 16 == 0 and form.attention_softcap is None and all(layer.window is None for layer in form.layers)
    if any(map(shutil.which, ("c++", "g++", "clang++"))):
        assert ours.runner.form.startswith("native") == has_native
    result = compare(ours.logits(case.rows, chunk=chunk), case.theirs, tolerance=TOLERANCE)
    assert result.largest_error <= TOLERANCE
    assert result.wrong_tokens == 0


def test_catalogue_and_engine_read_the_same_of_a_model(case: Case) -> None:
    base, form = describe_base(case.setting.model), read_config(case.setting.model)
    assert base.family == form.family == case.tiny.family
    assert (base.num_layers, base.vocab_size, base.max_context) == (form.num_layers, form.vocab_size, form.max_context)
    assert [(module.path, module.site, module.in_features, module.out_features) for module in base.modules] == [
        ("model.layers.{layer}." + part.path, part.site, part.in_features, part.out_features) for part in form.projections
    ]


def test_every_adapter_changes_what_its_rows_say(case: Case) -> None:
    ids = case.rows[0].ids
    said = case.setting.ours.logits([Row(name, ids) for name in (None, *case.setting.adapters)], chunk=512)
    for one, other in itertools.combinations(said, 2):
        assert (one - other).abs().max() > 100 * TOLERANCE


def _each_layer(form: Architecture, **changes: Any) -> Architecture:
    return replace(form, layers=tuple(replace(layer, **changes) for layer in form.layers))


def _each_rope(form: Architecture, **changes: Any) -> Architecture:
    layers = (layer if layer.rope is None else replace(layer, rope=replace(layer.rope, **changes)) for layer in form.layers)
    return replace(form, layers=tuple(layers))


# A model, and what is planted in the record that is read from its configuration.
MUTANTS: dict[str, tuple[str, Callable[[Architecture], Architecture]]] = {
    "window left out": ("mistral", lambda form: _each_layer(form, window=None)),
    "window one longer": ("mistral", lambda form: _each_layer(form, window=WINDOW + 1)),
    "wrong layers slide": ("gemma2", lambda form: replace(form, layers=form.layers[::-1])),
    "scaling left out": ("llama 3", lambda form: _each_rope(form, scaling=None)),
    "magnitude left out": ("llama yarn", lambda form: _each_rope(form, magnitude=1.0)),
    "positions everywhere": ("smollm3", lambda form: replace(form, layers=form.layers[:1] * 4)),
    "positions over whole heads": (
        "phi3, longrope, part of the head",
        lambda form: _each_rope(form, width=16, scaling=None),
    ),
    "norms not offset": ("gemma3", lambda form: replace(form, norm_offset=0.0)),
    "embedding not scaled": ("gemma3", lambda form: replace(form, embedding_scale=1.0)),
    "usual attention scale": ("gemma3", lambda form: replace(form, attention_scale=form.head_dim**-0.5)),
    "one set of positions": ("gemma3", lambda form: _each_layer(form, rope=form.layers[2].rope)),
    "other activation": ("gemma2", lambda form: replace(form, activation="silu")),
    "scores not capped": ("gemma2", lambda form: replace(form, attention_softcap=None)),
    "logits not capped": ("gemma2", lambda form: replace(form, logit_softcap=None)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_difference_is_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plant = MUTANTS[name]
    save_model(MODELS[model], tmp_path)
    rows = random_rows([None] * 3, vocab=VOCAB, seed=2, lengths=(2 * WINDOW, LONGEST))
    theirs = Oracle(tmp_path, {}).logits(rows)
    assert compare(MixedBatches(tmp_path, {}).logits(rows, chunk=7), theirs, tolerance=TOLERANCE).largest_error <= TOLERANCE
    monkeypatch.setattr("tests.fixtures.oracle.read_config", lambda folder: plant(read_config(folder)))
    mutant = compare(MixedBatches(tmp_path, {}).logits(rows, chunk=7), theirs, tolerance=TOLERANCE)
    assert mutant.largest_error > 10 * TOLERANCE
