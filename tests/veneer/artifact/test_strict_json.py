from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veneer.artifact.faults import Faults
from veneer.artifact.strict_json import parse_object


def _parse(data: bytes, *, max_depth: int = 5) -> tuple[object, list[str]]:
    faults = Faults(64)
    value = parse_object(data, "file", max_depth=max_depth, faults=faults)
    return value, [violation.description for violation in faults.violations]


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "is not JSON"),
        (b"[1]", "must be a JSON object, not list"),
        (b"\xef\xbb\xbf{}", "is not JSON"),
        (b'{"a": NaN}', "has NaN"),
        (b'{"a": -Infinity}', "has -Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "a number of 5001 digits"),
        (b'{"a": 0.' + b"1" * 5000 + b"}", "a number of 5002 characters"),
        (b'{"a": {"b": {"c": {"d": {"e": {}}}}}}', "nested deeper than 5"),
        (b"[" * 1_000_000, "nested deeper than 5"),
        (b'{"a":' * 200_000, "nested deeper than 5"),
        (b'{"a": "\xc3\x28"}', "is not UTF-8"),
    ],
)
def test_what_no_sound_file_holds_is_refused(data: bytes, fault: str) -> None:
    value, faults = _parse(data)
    assert value is None
    assert len(faults) == 1
    assert fault in faults[0]


def test_every_duplicate_key_is_listed() -> None:
    _, faults = _parse(b'{"a": 1, "a": 2, "b": {"c": 1, "c": 2}}')
    assert faults == ["has the key 'c' twice", "has the key 'a' twice"]


def test_brackets_inside_strings_do_not_count() -> None:
    assert _parse(rb'{"a": "[[[[[[[[\"[[[[\\"}') == ({"a": '[[[[[[[["[[[[\\'}, [])


@pytest.mark.parametrize("data", [b'"' + rb"\"" * 500_000, rb'"\\' * 300_000, b'"' * 1_000_001, b"{" + b'"a":[],' * 100_000])
def test_hostile_strings_take_linear_time(data: bytes) -> None:
    started = time.thread_time()
    assert _parse(data)[0] is None
    assert time.thread_time() - started < 20, "it takes half a second, or hours if its time grows with the square"


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), _VALUES))
def test_sound_objects_are_read_as_json_does(value: dict[str, object]) -> None:
    assert _parse(json.dumps(value).encode(), max_depth=100) == (value, [])
