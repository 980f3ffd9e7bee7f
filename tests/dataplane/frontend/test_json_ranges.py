"""Bounds of numbers against the jsonschema library: what a mask lets through is valid, and valid bounds come through."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.engine.grammar import GrammarCompiler
from dataplane.frontend.grammar_texts import translate
from dataplane.frontend.json_ranges import with_exact_ranges
from veneer.errors import InvalidArgumentError


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory, byte_level_path: Path) -> GrammarCompiler:
    folder = tmp_path_factory.mktemp("ranges")
    (folder / "tokenizer.json").write_bytes(byte_level_path.read_bytes())
    return GrammarCompiler(folder, vocab_size=500, eos_ids=(0,))


def accepted(compiler: GrammarCompiler, schema: dict[str, Any], texts: list[str]) -> list[str]:
    """The texts that a schema's masks let through to their end."""
    start = compiler.compile(translate("json", json.dumps(schema)))
    assert compiler._tokenizer is not None
    through = []
    for text in texts:
        matcher, tokens = start.deep_copy(), compiler._tokenizer.tokenize_str(text)
        if matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting():
            through.append(text)
    return through


def is_valid(schema: dict[str, Any], text: str) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)))


NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.integers(-1500, 1500),
    st.integers(-300, 300).map(lambda n: n / 100),
    st.integers(-9999, 9999).map(lambda n: n / 10),
)
GAPS = st.sampled_from([0, 0.001, 0.01, 0.5, 0.597, 1, 1.5, 2, 10])


@st.composite
def schemas(draw: st.DrawFn) -> dict[str, Any]:
    low = draw(NUMBERS)
    high = low + draw(GAPS) if draw(st.booleans()) else draw(NUMBERS)
    high = round(high, 4) if isinstance(high, float) else high
    schema: dict[str, Any] = {"type": draw(st.sampled_from(["integer", "number"]))}
    sides = draw(st.sampled_from([("low",), ("high",), ("low", "high")]))
    for side, number, keys in (("low", low, ("minimum", "exclusiveMinimum")), ("high", high, ("maximum", "exclusiveMaximum"))):
        if side in sides:
            schema |= dict.fromkeys(draw(st.sampled_from([keys[:1], keys[1:], keys])), number)
    return schema


def near(schema: dict[str, Any]) -> list[str]:
    """Texts of numbers at and beside the bounds of a schema, with and without a fraction that says nothing."""
    texts = {"0", "-0", "0.0", "-0.0", "1e2", "-1E-1"}
    for key in schema.keys() - {"type"}:
        for step in (0, 1, -1, 0.1, -0.1, 0.01, -0.01, 0.001, -0.001, 0.5, -0.5, 10):
            number = round(schema[key] + step, 6)
            whole = str(int(number)) if number == int(number) else repr(float(number))
            texts |= {whole, whole + ("0" if "." in whole else ".0")}
    return sorted(texts)


@settings(max_examples=120, deadline=None)
@given(schema=schemas())
def test_every_number_that_comes_through_is_valid_and_whole_bounds_come_through(
    compiler: GrammarCompiler, schema: dict[str, Any]
) -> None:
    texts = near(schema)
    valid = [text for text in texts if is_valid(schema, text)]
    try:
        through = accepted(compiler, schema, texts)
    except InvalidArgumentError:
        low = max([schema[key] for key in ("minimum", "exclusiveMinimum") if key in schema], default=-math.inf)
        high = min([schema[key] for key in ("maximum", "exclusiveMaximum") if key in schema], default=math.inf)
        assert low >= high or (schema["type"] == "integer" and not any(is_valid(schema, text) for text in texts)), "it is empty"
        return
    assert set(through) <= set(valid)
    bounds = {str(schema[key]) for key in ("minimum", "maximum") if isinstance(schema.get(key), int)}
    assert bounds & set(valid) <= set(through)


@pytest.mark.parametrize(
    ("schema", "excluded", "included"),
    [
        ({"type": "integer", "minimum": 1, "exclusiveMaximum": 2}, ["2", "0"], ["1"]),
        ({"type": "integer", "exclusiveMinimum": 1, "maximum": 2}, ["1", "3"], ["2"]),
        ({"type": "integer", "minimum": 0.5, "exclusiveMaximum": 1.5}, ["0", "2"], ["1"]),
        ({"type": ["integer", "null"], "exclusiveMinimum": -1, "maximum": 0}, ["-1", "1"], ["0", "null"]),
        ({"type": "number", "exclusiveMinimum": 2, "maximum": 2.5}, ["2", "2.0", "2.6"], ["2.5", "2.001"]),
        ({"type": "number", "exclusiveMinimum": 106, "maximum": 106.1}, ["106", "106.0"], ["106.1", "106.05"]),
        ({"type": "number", "minimum": -2.5, "exclusiveMaximum": -2}, ["-2", "-2.0"], ["-2.5", "-2.1"]),
        ({"type": "number", "exclusiveMinimum": -0.3, "exclusiveMaximum": 0}, ["0", "-0", "-0.0", "-0.3"], ["-0.1"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0", "0.0", "-0"], ["0.5", "0.25"]),
        ({"type": "integer", "allOf": [{"minimum": 1}, {"exclusiveMaximum": 2}]}, ["0", "2"], ["1"]),
        ({"anyOf": [{"type": "integer", "exclusiveMinimum": 5, "maximum": 6}, {"type": "null"}]}, ["5"], ["6", "null"]),
        ({"type": "integer", "minimum": 9007199254740993}, ["9007199254740992"], ["9007199254740994"]),
        ({"type": "integer", "maximum": 18446744073709551615}, ["18446744073709551616"], ["9223372036854775807"]),
    ],
)
def test_what_a_bound_excludes_does_not_come_through(
    compiler: GrammarCompiler, schema: dict[str, Any], excluded: list[str], included: list[str]
) -> None:
    assert accepted(compiler, schema, [*excluded, *included]) == included
    assert [text for text in (*excluded, *included) if is_valid(schema, text)] == included


def test_only_bounds_are_written_anew() -> None:
    schema = {
        "type": "object",
        "properties": {"minimum": {"const": {"exclusiveMinimum": 1}}, "a": {"type": "integer", "exclusiveMinimum": 1}},
        "enum": [{"exclusiveMaximum": 2}],
        "x": {"type": "integer", "exclusiveMinimum": 1},
    }
    written = json.loads(with_exact_ranges(json.dumps(schema)))
    assert written["properties"].pop("a") == {"type": "integer", "minimum": 2}
    del schema["properties"]["a"]  # type: ignore[attr-defined]
    assert written == schema


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ('{"const": 9007199254740993}', r"\$\.const is an integer beyond 2\^53"),
        ('{"properties": {"id": {"enum": [1, -12345678901234567890123]}}}', r"\$\.properties\.id\.enum\[1\] is an integer"),
        ('{"const": {"a": [0.1234567890123456789]}}', r"\$\.const\.a\[0\] has more digits"),
        ('{"const": 1e999}', r"\$\.const has more digits"),
    ],
)
def test_a_number_that_would_be_written_as_another_is_refused_by_name(schema: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        with_exact_ranges(schema)


@pytest.mark.parametrize("number", ["9007199254740992", "-9007199254740992", "0.1", "1e-10", "1e25", "1.50"])
def test_a_number_that_a_float_holds_is_written(number: str) -> None:
    assert float(json.dumps(json.loads(with_exact_ranges(f'{{"const": {number}}}'))["const"])) == float(number)
