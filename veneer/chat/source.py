"""What a model folder says of conversations: template, the names that it may use, and the tokens that only it may write."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from veneer.chat.process import RenderProcess, describe_answer
from veneer.chat.wire import Order, pack_messages

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SAMPLE = (("user", "Hello"),)
"""Conversation with which a template is tried."""


@dataclass(frozen=True, slots=True)
class ChatSource:
    """A folder's chat template.

    Attributes:
        template: In jinja2's language; None: the folder has none.
        variables: Names and texts of the special tokens that tokenizer_config.json names.
        controls: Tokens that make up the form of a conversation: all special tokens, those that tokenizer_config.json names, and
            those that it lists as `chat_control_tokens` or, where it has no such list, every added token that stands in the
            template, spaces apart.
        fault: Why the template cannot be read; empty: it can, or there is none.
    """

    template: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    controls: tuple[str, ...] = ()
    fault: str = ""


def read_chat(folder: Path) -> ChatSource:
    """Reads a model folder; what is wrong with the template is told in the result."""
    try:
        config = _object(folder / "tokenizer_config.json")
        added = _object(folder / "tokenizer.json").get("added_tokens") or []
        path = folder / "chat_template.jinja"
        template = path.read_text("utf-8") if path.is_file() else config.get("chat_template")
        named = _object(folder / "special_tokens_map.json") | config
    except (OSError, ValueError) as error:
        return ChatSource(fault=f"{type(error).__name__}: {error}"[:200])
    if isinstance(template, list):
        templates = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        if "default" not in templates:
            return ChatSource(fault="the chat template is a list without one that is named `default`")
        template = templates["default"]
    if template is None:
        return ChatSource()
    if not isinstance(template, str):
        return ChatSource(fault="the chat template is neither a text nor a list of named ones")
    variables = {name: text for name in _NAMED_TOKENS if (text := _text(named.get(name))) is not None}
    return ChatSource(template, variables, _controls(template, added, config.get("chat_control_tokens"), variables))


def check_chat(folder: Path) -> str | None:
    """Renders a sample with a folder's template, within the limits of a data plane.

    Returns:
        Why conversations cannot be served; empty: they can. A folder without a template serves none either. None: it was not
        tried, since the package jinja2 is not installed.
    """
    if importlib.util.find_spec("jinja2") is None:
        return None
    source = read_chat(folder)
    if source.fault or source.template is None:
        return source.fault or "there is no chat template"
    order = Order(source.template, source.variables, source.controls)
    process = RenderProcess(order)
    try:
        answer = process.ask_once(process.greeting)
        if answer.kind == "ready":
            answer = process.ask_once(pack_messages(SAMPLE))
    except (OSError, ValueError):
        return process.fall() or "the process that rendered a sample was killed"
    finally:
        process.end()
    return "" if answer.kind in ("text", "refused") else describe_answer(answer, order)


def _controls(template: str, added: list[Any], listed: Any, variables: dict[str, str]) -> tuple[str, ...]:
    tokens = [one for one in added if isinstance(one, dict) and isinstance(one.get("content"), str) and one["content"].strip()]
    texts = set(variables.values())
    chosen = set(map(str, listed)) if isinstance(listed, list) else None
    return tuple(
        one["content"]
        for one in tokens
        if one.get("special") or one["content"] in texts or one["content"] in (template if chosen is None else chosen)
    )


def _text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text("utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is no JSON object")  # noqa: TRY004  one family of faults of the folder
    return value
