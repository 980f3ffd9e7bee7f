from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veneer.artifact.config import PatternValue
from veneer.artifact.pairs import _Values
from veneer.artifact.patterns import Names, Pattern, PatternError

PATHS = [
    f"model.layers.{layer}.{module}" for layer in (0, 1, 10) for module in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")
]

REAL = [
    "q_proj",
    "^q_proj",
    "self_attn.q_proj",
    "model.layers.1.self_attn.q_proj",
    "^model.layers.1.self_attn.q_proj",
    r"layers\.1\..*",
    r".*\.(q|v)_proj",
    r"model\.layers\.(0|1)\..*(q_proj|up_proj)$",
    r"(?:.*?(?:self_attn|mlp).*?(?:q_proj|v_proj|up_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|v_proj)))",
    r".*layers\.[0-9]+\.[^.]+\.[a-z_]{1,8}",
    r"roj",
    r"_proj",
    r".*_proj",
    r"layers\.\d\.\w+\.q_proj",
    r"(?P<name>up)_proj",
    r"[^\W]+",
    r"x{,}q_proj",
    r"q{1_proj",
    r"a{}b",
    "",
]


@pytest.mark.parametrize("text", REAL)
def test_expressions_that_people_write_match_as_in_python(text: str) -> None:
    for path in PATHS:
        assert Pattern(text).matches_whole(path) == bool(re.fullmatch(text, path))
        assert Pattern(text).matches_tail(path) == bool(re.match(rf"(.*\.)?({text})$", path))


_SEGMENTS = st.lists(st.text("ab1", min_size=1, max_size=2), min_size=1, max_size=4)


@given(st.lists(st.text("ab1.", min_size=1, max_size=8), max_size=8, unique=True), _SEGMENTS)
def test_names_that_are_looked_up_are_those_that_match_one_by_one(texts: list[str], segments: list[str]) -> None:
    path, patterns = ".".join(segments), [Pattern(text) for text in [*texts, "a|b"]]
    wanted = [place for place, text in enumerate(texts) if re.match(rf"(.*\.)?({text})$", path)]
    assert sorted(Names(patterns).matching_tail(path)) == wanted
    for place, pattern in enumerate(patterns[:-1]):
        assert pattern.matches_tail(path) == (place in wanted)
        assert pattern.matches_whole(path) == bool(re.fullmatch(pattern.text, path))


@given(st.lists(st.sampled_from(["a", "b", "b.a", "a|b", ".*", "(b)", "1.a", "^a"]), max_size=6, unique=True), _SEGMENTS)
def test_the_first_entry_decides_whether_it_is_a_name_or_an_expression(texts: list[str], segments: list[str]) -> None:
    path = ".".join(segments)
    values = _Values([PatternValue(Pattern(text), place) for place, text in enumerate(texts)], -1.0)
    matching = [place for place, text in enumerate(texts) if re.match(rf"(.*\.)?({text})$", path)]
    assert values.of(path) == min(matching, default=-1.0)
    assert [entry.value for entry in values.unused([path])] == [place for place in range(len(texts)) if place not in matching]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("(a", "not closed"),
        ("a)", "unbalanced"),
        ("a)|(b", "unbalanced"),
        ("[a", "ends too early"),
        ("a\\", "ends too early"),
        ("*a", "nothing to repeat"),
        ("^*", "nothing to repeat"),
        ("a**", "multiple repeat"),
        ("a{2}{3}", "multiple repeat"),
        ("a{3,2}", "least count is above"),
        ("a{1001}", "above 1000"),
        ("[z-a]", "range is wrong"),
        (r"(a)\1", "escape \\1"),
        (r"\p", "escape \\p"),
        ("(?!a)b", "look-around"),
        ("(?<=a)b", "look-around"),
        ("(?i)a", "look-around"),
        ("(?#a)", "look-around"),
        ("a++", "possessive"),
        ("{2}", "nothing to repeat"),
        ("(|{1,}a)", "nothing to repeat"),
        ("{,}", "nothing to repeat"),
        ("(?>a)", "look-around"),
        ("((((a*)*)*)*)*", "nested deeper than 3"),
        ("(" * 40 + ")" * 40, "nested deeper than 32"),
    ],
)
def test_other_expressions_are_refused_by_name(text: str, fault: str) -> None:
    with pytest.raises(PatternError, match=re.escape(fault)):
        Pattern(text)


_ATOMS = st.sampled_from(["a", "b", ".", r"\.", "[ab]", "[^a]", r"\w", r"\d", r"\W", "^", "$", r"\b", r"\B", "[a-c.]", "", "_"])
_SUFFIXES = st.sampled_from(["", "", "*", "+", "?", "*?", "{2}", "{1,2}", "{,2}", "{0,}", "+?"])


def _combine(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: "(" + "|".join(parts) + ")"),
        st.tuples(inner, _SUFFIXES).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    )


@given(
    st.recursive(st.tuples(_ATOMS, _SUFFIXES).map("".join), _combine, max_leaves=6), st.text("ab._1\n", min_size=1, max_size=7)
)
def test_random_expressions_match_as_in_python(text: str, path: str) -> None:  # no path is empty: Pythons differ on \B there
    try:
        pattern = Pattern(text)
    except PatternError:
        return
    assert pattern.matches_whole(path) == bool(re.fullmatch(text, path))
    if "\n" not in path:
        assert pattern.matches_tail(path) == bool(re.match(rf"(.*\.)?({text})$", path))


@pytest.mark.parametrize(
    "text", ["(a|a)*b", "(a*)*b", "(a+)+$b", "(.*.*)*x", ".*.*.*.*.*.*.*.*.*.*x", "((a?){1000}){1000}b", "(?:(?:a|b)*.)*x"]
)
def test_hostile_expressions_take_little_time(text: str) -> None:
    started = time.process_time()
    assert not Pattern(text).matches_whole("a" * 60)
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    ("text", "num_steps"), [("q_proj", 0), ("q|v", 2), ("(ab)*", 129), ("(a|b){2}c?", 7), ("(a*)*", 4161), ("a{0}", 1)]
)
def test_an_expression_knows_how_many_steps_a_match_may_take(text: str, num_steps: int) -> None:
    assert Pattern(text).num_steps == num_steps
