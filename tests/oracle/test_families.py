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
from dataplane.model.native_stack import NativeStack
from dataplane.model.stack import PieceStack
from tests.fixtures.families import LONGEST, MODELS, VOCAB, WINDOW, Tiny, make_setting, save_model
from tests.fixtures.oracle import PAGE_SIZE, MixedBatches, Oracle, Row, Setting, compare, mixed_rows, random_rows
from veneer.artifact import describe_base

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:peft"),
]

LEAST_DECIDED = 0.98
TOLERANCE = 1e-4


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


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("chunk", [1, 7])
def test_the_form_that_is_chosen_equals_each_row_alone(case: Case, chunk: int, invariant: bool) -> None:
    ours = MixedBatches(case.setting.model, case.setting.adapters, cpu_form="auto", batch_invariant=invariant)
    form = read_config(case.setting.model)
    has_native = form.head_dim % 16 == 0
    if any(map(shutil.which, ("c++", "g++", "clang++"))):
        assert ours.runner.form.startswith("native") == has_native
    result = compare(ours.logits(case.rows, chunk=chunk), case.theirs, tolerance=TOLERANCE)
    assert result.largest_error <= TOLERANCE
    assert result.wrong_tokens == 0


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="there is no compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_in_one_call_have_the_bits_of_layers_in_pieces(case: Case, dtype: str) -> None:
    if read_config(case.setting.model).head_dim % 16:
        return  # no native form
    ours = MixedBatches(
        case.setting.model, case.setting.adapters, cpu_form="native", batch_invariant=True, dtype=dtype
    )  # all products are native
    model = ours.runner._model
    assert isinstance(model.stack, NativeStack)
    whole = ours.logits(case.rows, chunk=7)
    stack = PieceStack(model.form, model.stack.layers, model.stack.rotaries, model.pieces)
    ours.runner._model = replace(model, stack=stack)
    assert all(map(torch.equal, whole, ours.logits(case.rows, chunk=7)))


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
