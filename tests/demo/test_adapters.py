"""The committed adapters: small, valid, different in kind, and each speaking with its own marker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from demo.prepare import MODEL_NAME, prepare
from demo.styles import COUNSEL, HAIKU, PIRATE, PIRATE_NEXT, STYLES, Style, markers_in, unseen_prompts
from veneer.artifact import Artifact, BaseDescription, TargetModule, check
from veneer.artifact.description import MODULE_SITES

_WIDTHS = {"q_proj": (576, 576), "k_proj": (576, 192), "v_proj": (576, 192), "o_proj": (576, 576)}
_WIDTHS |= {"gate_proj": (576, 1536), "up_proj": (576, 1536), "down_proj": (1536, 576)}
BASE = BaseDescription(
    digest="0" * 64,
    name=MODEL_NAME,
    family="llama",
    num_layers=30,
    modules=tuple(
        TargetModule(f"model.layers.{{layer}}.{path}", site, *_WIDTHS[path.rpartition(".")[2]])
        for path, site in MODULE_SITES.items()
    ),
    vocab_size=49152,
    max_context=8192,
    known_names=(),
)


def checked(style: Style) -> Artifact:
    return check((style.folder / "adapter_config.json").read_bytes(), style.folder / "adapter_model.safetensors", BASE)


def chats(style: Style) -> list[dict[str, str]]:
    return [json.loads(line) for line in style.data.read_text().splitlines()]


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.title)
def test_an_adapter_is_accepted_without_a_warning_and_small(style: Style) -> None:
    artifact = checked(style)
    assert artifact.dtype == "BF16"
    assert artifact.base_name == MODEL_NAME
    assert not artifact.report.warnings
    assert sum(path.stat().st_size for path in style.folder.iterdir()) < 2 << 20


def test_the_adapters_differ_in_rank_modules_and_scaling() -> None:
    kinds = {}
    for style in (PIRATE, HAIKU, COUNSEL):
        pairs = checked(style).pairs
        kinds[style.title] = (
            {pair.slice for pair in pairs},
            {pair.rank for pair in pairs},
            {round(pair.scaling, 6) for pair in pairs},
        )
    assert kinds["pirate-v1"] == ({0, 2}, {8}, {2.0})
    assert kinds["haiku"] == (set(range(7)), {3}, {2.0})
    # Rank-stabilised: alpha / sqrt(rank), with alpha 8 at q of rank 16, and 4 elsewhere.
    assert kinds["counsel"] == ({0, 3, 6}, {2, 4, 16}, {2.0, round(4 / 2**0.5, 6)})


def test_two_versions_of_one_adapter_have_other_weights() -> None:
    assert PIRATE.adapter == PIRATE_NEXT.adapter
    first, second = ((style.folder / "adapter_model.safetensors").read_bytes() for style in (PIRATE, PIRATE_NEXT))
    assert first != second


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.title)
def test_every_training_answer_begins_with_the_markers_of_its_style_alone(style: Style) -> None:
    for chat in chats(style):
        assert chat["answer"].startswith(style.marker)
        assert markers_in(chat["prompt"] + chat["answer"]) == {style.marker}


def test_no_prompt_of_the_run_was_trained_on() -> None:
    trained = {chat["prompt"] for style in STYLES for chat in chats(style)}
    assert len(unseen_prompts()) >= 12
    assert trained.isdisjoint(unseen_prompts())


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("style", [None, *STYLES], ids=lambda style: style.title if style else "base")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_a_style_shows_its_own_marker_on_unseen_prompts_under_peft(style: Style | None) -> None:
    pytest.importorskip("peft")
    from transformers import AutoTokenizer

    from demo.train import check as check_answers
    from demo.train import evaluate

    model: Path = prepare()
    assert check_answers(style, evaluate(style, model), AutoTokenizer.from_pretrained(model)) == []
