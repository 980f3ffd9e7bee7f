"""A traced text is the text, and its twin says what came from contents."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veneer.chat.traced import BLANK, Traced, join, twin_of

OPERATIONS: dict[str, Callable[[str], object]] = {
    "strip": lambda text: text.strip(" T"),
    "split": lambda text: text.split("b"),
    "split at spaces": lambda text: text.split(),
    "splitlines": lambda text: text.splitlines(keepends=True),
    "partition": lambda text: text.partition("b"),
    "replace": lambda text: text.replace("a", "TT"),
    "upper": lambda text: text.upper(),
    "title": lambda text: text.title(),
    "slice": lambda text: text[1:-1],
    "backwards": lambda text: text[::-1],
    "product": lambda text: 2 * text + text * 2,
    "sum": lambda text: "T<" + text + ">T",
    "percent": lambda text: text % () if "%" not in text else text,
    "center": lambda text: text.center(20, "T"),
    "join": lambda text: Traced("T", "T").join([text, "T"]),
    "join characters": lambda text: join([Traced("T", "T"), *text]),
    "remove": lambda text: text.removeprefix("a").removesuffix("b"),
    "zfill": lambda text: text.zfill(9),
    "translate": lambda text: text.translate({97: "TT"}),
    "expandtabs": lambda text: text.expandtabs(),
}


def plain(value: object) -> object:
    return [*map(plain, value)] if isinstance(value, list | tuple) else str.__str__(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OPERATIONS)
@given(text=st.text(st.sampled_from("abß ǆ\n\t%<é\0"), max_size=8))
def test_an_operation_gives_the_text_that_a_plain_str_gives(name: str, text: str) -> None:
    assert plain(OPERATIONS[name](Traced(text))) == plain(OPERATIONS[name](text))


@pytest.mark.parametrize("name", OPERATIONS)
@given(text=st.text(st.sampled_from("abß ǆ\n\t%<é"), max_size=8))
def test_no_character_of_a_content_counts_as_the_templates(name: str, text: str) -> None:
    results = OPERATIONS[name](Traced(text))
    for result in results if isinstance(results, list | tuple) else [results]:
        assert isinstance(result, Traced)
        twin = twin_of(result)
        assert len(twin) == len(result)
        own = {character for character in twin if character != BLANK and not character.isspace()}
        assert own <= set("T<>0"), "only what the operation itself wrote"


def test_the_text_of_the_template_around_a_content_is_its_own() -> None:
    assert twin_of("<s>" + Traced("<s> a").strip() + "</s>") == f"<s>{BLANK * 3} {BLANK}</s>"
    assert twin_of(("[" + Traced("ab") + "]").center(8)) == f"  [{BLANK * 2}]  "
    assert twin_of(join(["<s>", Traced("a"), "<s>"])) == f"<s>{BLANK}<s>"


def test_a_result_whose_trace_cannot_be_followed_is_content() -> None:
    assert twin_of(("T" + Traced("ab")).replace("a", "ccc")) == BLANK * 5
