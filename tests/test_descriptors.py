"""Every open descriptor has one owner: constructions that give it two stay out of both planes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TWO_OWNERS = {
    "connect_read_pipe": "uvloop's transport closes the number, and the file object closes it again",
    "connect_write_pipe": "uvloop's transport closes the number, and the file object closes it again",
    "fdopen": "until it returns the number has no owner: open with `opener=`, or `io.FileIO`",
    "mkstemp": "the number has no owner: `tempfile.NamedTemporaryFile`",
    "detach": "of a socket or file: nobody closes the number then",
}
NOT_OF_FILES = {("veneer/loop_thread.py", "detach"), ("veneer/sync_client.py", "detach")}  # finalizers


def _called(source: str) -> set[str]:
    """Names of the functions and methods that code calls or refers to."""
    return {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("plane", ["controlplane", "dataplane", "veneer", "kernels"])
def test_no_descriptor_is_given_a_second_owner(plane: str) -> None:
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in (ROOT / plane).rglob("*.py")
        for name in _called(path.read_text(encoding="utf-8")) & TWO_OWNERS.keys()
    }
    assert {place: TWO_OWNERS[place[1]] for place in found - NOT_OF_FILES} == {}


def test_each_construction_would_be_seen() -> None:
    for name in TWO_OWNERS:
        assert _called(f"loop.{name}(file)") & TWO_OWNERS.keys() == {name}
