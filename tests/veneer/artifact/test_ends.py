"""A sequence ends at every token that a model's files name as its end, whichever file that is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.veneer.artifact.conftest import MakeBase
from veneer.artifact import ArtifactError, BaseDescription, describe_base, read_eos_ids

TOKENIZER = {
    "added_tokens": [{"id": 9, "content": "<|end|>", "special": True}, {"id": 40, "content": "<|far|>", "special": True}],
    "model": {"type": "BPE", "vocab": {"a": 3, "</s>": 7, "<|end|>": 4}},
}
UNIGRAM = {"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["a", -1.0], ["</s>", 0.0]]}}
FILES = ("generation_config", "config", "tokenizer_config", "special_tokens_map", "tokenizer")


def write(folder: Path, make_base: MakeBase, **files: dict[str, Any]) -> Path:
    make_base(folder, config=files.pop("config", {}))
    for name, content in {"tokenizer": TOKENIZER, "tokenizer_config": {}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, ()),
        ({"generation_config": {"eos_token_id": 2}}, (2,)),
        ({"generation_config": {"eos_token_id": [3, 4]}, "config": {"eos_token_id": 7}}, (3, 4, 7)),
        ({"config": {"eos_token_id": [7, 7]}}, (7,)),
        ({"tokenizer_config": {"eos_token": "<|end|>"}}, (9,)),
        ({"tokenizer_config": {"eos_token": {"content": "</s>", "__type": "AddedToken"}}}, (7,)),
        ({"tokenizer_config": {"eos_token": "</s>"}, "tokenizer": UNIGRAM}, (2,)),
        ({"special_tokens_map": {"eos_token": "<|end|>"}}, (9,)),
        ({"special_tokens_map": {"eos_token": {"content": "</s>"}}}, (7,)),
        ({"special_tokens_map": {"eos_token": "<|end|>"}, "tokenizer_config": {"eos_token": "</s>"}}, (7,)),
        ({"generation_config": {"eos_token_id": 2}, "tokenizer_config": {"eos_token": "<|end|>"}}, (2, 9)),
        ({"generation_config": {"eos_token_id": 9}, "tokenizer_config": {"eos_token": "<|end|>"}}, (9,)),
        ({"tokenizer_config": {"eos_token": "<|x|>", "added_tokens_decoder": {"5": {"content": "<|x|>"}}}}, (5,)),
        # what cannot be generated
        ({"generation_config": {"eos_token_id": [-1, 32, 31]}}, (31,)),
        ({"tokenizer_config": {"eos_token": "<|unknown|>"}}, ()),
        ({"tokenizer_config": {"eos_token": "<|far|>"}}, ()),
        ({"generation_config": {"eos_token_id": None}, "tokenizer_config": {"eos_token": None}}, ()),
    ],
)
def test_a_sequence_ends_where_any_file_says_so(
    files: dict[str, Any], ends: tuple[int, ...], tmp_path: Path, make_base: MakeBase
) -> None:
    folder = write(tmp_path / "f", make_base, **files)
    base = describe_base(folder)
    assert base.eos_ids == read_eos_ids(folder, vocab_size=32) == ends
    assert BaseDescription.from_json(base.to_json()) == base


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"generation_config": {"eos_token_id": "2"}}, r"generation_config\.json eos_token_id: must be a token id or a list"),
        ({"config": {"eos_token_id": [1, True]}}, r"config\.json eos_token_id: must be a token id or a list"),
        ({"generation_config": {"eos_token_id": 2.0}}, r"generation_config\.json eos_token_id"),
        ({"tokenizer_config": {"eos_token": 2}}, r"tokenizer_config\.json eos_token: must be a text"),
        ({"special_tokens_map": {"eos_token": ["</s>"]}}, r"special_tokens_map\.json eos_token: must be a text"),
    ],
)
def test_an_end_that_is_no_token_is_refused_by_the_name_of_its_file(
    files: dict[str, Any], words: str, tmp_path: Path, make_base: MakeBase
) -> None:
    folder = write(tmp_path / "f", make_base, **files)
    for read in (describe_base, lambda at: read_eos_ids(at, vocab_size=32)):
        with pytest.raises(ArtifactError, match=words):
            read(folder)


def test_only_an_end_that_no_other_file_names_makes_another_base(tmp_path: Path, make_base: MakeBase) -> None:
    named = {"tokenizer_config": {}, "generation_config": {"eos_token_id": 9}}
    plain = describe_base(write(tmp_path / "a", make_base, **named)).digest
    assert describe_base(write(tmp_path / "b", make_base, **named, special_tokens_map={"eos_token": "<|end|>"})).digest == plain
    assert describe_base(write(tmp_path / "c", make_base, **named, special_tokens_map={"eos_token": "<|far|>"})).digest == plain
    assert describe_base(write(tmp_path / "d", make_base, **named, special_tokens_map={"eos_token": "</s>"})).digest != plain


def test_bases_keep_the_digests_that_they_had(tmp_path: Path, make_base: MakeBase) -> None:
    folder = write(tmp_path / "f", make_base, generation_config={"eos_token_id": 2}, tokenizer_config={"eos_token": "<|end|>"})
    assert describe_base(folder).digest == "eb84a9e47513a5efe7448527c7bcc87d42856ce182efb99d9eb7a46f557ce998"
