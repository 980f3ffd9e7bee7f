"""What a model folder says of conversations, and whether its template can be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from veneer.chat.source import check_chat, read_chat


def write(
    folder: Path, *, template: Any = "{{ messages[0].content }}", added: list[dict[str, Any]] | None = None, **config: Any
) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **config}))
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added or []}))
    return folder


def token(content: str, *, special: bool = False) -> dict[str, Any]:
    return {"id": 1, "content": content, "special": special}


ADDED = [token("<s>", special=True), token("<think>"), token("<tool>"), token("  "), token("<end>")]


def test_control_tokens_are_special_ones_named_ones_and_those_of_the_template(tmp_path: Path) -> None:
    write(tmp_path, template="<think>  {{ eos_token }}", added=ADDED, eos_token={"content": "<end>"})
    source = read_chat(tmp_path)
    assert source.controls == ("<s>", "<think>", "<end>")
    assert source.variables == {"eos_token": "<end>"}


def test_a_list_of_control_tokens_takes_the_place_of_what_stands_in_the_template(tmp_path: Path) -> None:
    write(tmp_path, template="<think>", added=ADDED, chat_control_tokens=["<tool>"])
    assert read_chat(tmp_path).controls == ("<s>", "<tool>")


def test_a_file_beside_the_configuration_wins_and_of_a_list_the_default(tmp_path: Path) -> None:
    write(tmp_path, template=[{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}])
    assert read_chat(tmp_path).template == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert read_chat(tmp_path).template == "file"


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{{ messages[0].content }}", ""),
        ("{{ raise_exception('take turns') }}", ""),
        ("{% generation %}x{% endgeneration %}", ""),
        (None, "there is no chat template"),
        (7, "neither a text"),
        ([{"name": "rag", "template": "x"}], "named `default`"),
        ("{% trans %}x{% endtrans %}", "trans"),
        ("{% autoescape true %}x{% endautoescape %}", "autoescape"),
        ("{{ messages | nosuchfilter }}", "nosuchfilter"),
        ("{{ messages[0].content.nosuchmethod() }}", "nosuchmethod"),
        ("{{ 9 ** (9 ** 9) }}", "1 s of processor time"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "1 s of processor time"),
        ("{{ 'a' * 999999999 }}", "256 MiB of memory"),
    ],
)
def test_a_template_is_tried_within_the_limits_of_a_data_plane(tmp_path: Path, template: Any, fault: str) -> None:
    found = check_chat(write(tmp_path, template=template))
    assert (fault in found) if fault else (found == "")
