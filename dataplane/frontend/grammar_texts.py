"""What callers write as a constraint, as llguidance reads it. Lark and GBNF are told apart by how they define rules."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from dataplane.engine.messages import MAX_GRAMMAR_BYTES
from dataplane.frontend.json_ranges import with_exact_ranges

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_JSON: JsonCompileOptions = {"whitespace_pattern": r"[ \t\r\n]{0,32}", "lenient": False}
"""White space between the parts of a JSON text: any, but not without end, which some models write. No keyword is passed over."""
_LARK_RULE = re.compile(
    r"^[ \t]*(?:%[a-z]|[?!]{0,2}[A-Za-z_][\w-]*[ \t]*(?:\.-?\d+)?[ \t]*(?:\{[^}\n]*\}|\[[^\]\n]*\]|::_)?[ \t]*:(?!:))",
    re.MULTILINE,
)
_GBNF_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
_GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z_][\w-]*[ \t]*::=", re.MULTILINE)


def translate(kind: str, text: str) -> str:
    """Returns a constraint as llguidance reads it.

    Args:
        kind: `json`, `regex` or `grammar`.
        text: The constraint.

    Raises:
        ValueError: It is none.
    """
    import llguidance

    if kind == "json":
        schema = "{}" if text.strip() == "true" else with_exact_ranges(text)  # options are kept in an object
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_JSON)
    elif kind == "regex":
        grammar = llguidance.LLMatcher.grammar_from_regex(text)
    elif is_lark(text):
        grammar = llguidance.LLMatcher.grammar_from_lark(text)
    else:
        grammar = llguidance.LLMatcher.grammar_from_lark(_from_gbnf(text))
    if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
        raise ValueError(f"comes to more than {MAX_GRAMMAR_BYTES} bytes")
    return grammar


def is_lark(text: str) -> bool:
    """Whether a grammar is Lark (`start: …`, also `?start:`, `!start:`, `start.2:`), and not GBNF (`root ::= …`).

    Raises:
        ValueError: It defines rules in both manners, or none.
    """
    lark, gbnf = _LARK_RULE.search(text), _GBNF_RULE.search(text)
    if lark and gbnf:
        raise ValueError(f"defines rules both as Lark ({_shown(lark)}) and as GBNF ({_shown(gbnf)}); it must be one of them")
    if not lark and not gbnf:
        raise ValueError("is neither Lark (rules like `start: …`) nor GBNF (rules like `root ::= …`): it defines no rule")
    return lark is not None


def reading_of(kind: str, text: str) -> str:
    """Returns how a constraint was read, for what is said of it; empty where there is only one way."""
    if kind != "grammar":
        return ""
    try:
        return "read as Lark: " if is_lark(text) else "read as GBNF: "
    except ValueError:
        return ""


def _shown(match: re.Match[str]) -> str:
    return f"`{match[0].strip()[:40]}`"


def _from_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        converted: str = gbnf_to_lark(_GBNF_ESCAPE.sub(_unescaped, text))
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except Exception as error:  # noqa: BLE001 - the library raises bare exceptions for faults of the text
        raise ValueError(str(error)) from None
    return converted


def _unescaped(match: re.Match[str]) -> str:
    """Returns the letter or sign that an escape names, which the library's conversion spells wrongly; another escape stays."""
    digits = match[1] or match[2] or match[3]
    code = int(digits, 16) if digits else 0
    is_character = 0 < code <= sys.maxunicode and not 0xD800 <= code <= 0xDFFF
    character = chr(code) if is_character else ""
    return character if character.isalnum() or (code > 0xA0 and character.isprintable()) else match[0]
