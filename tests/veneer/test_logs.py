from __future__ import annotations

import json
import logging
import sys

import pytest

from veneer.logs import JsonFormatter, configure


def record(message: str = "listening", **extra: object) -> logging.LogRecord:
    return logging.getLogger("veneer.test").makeRecord("veneer.test", logging.INFO, __file__, 1, message, (), None, extra=extra)


def test_a_record_is_one_line_of_json_with_its_facts() -> None:
    line = JsonFormatter().format(record(callers="127.0.0.1:7600", text="two\nlines"))
    assert "\n" not in line
    parsed = json.loads(line)
    assert parsed.pop("time").endswith("+00:00")
    assert parsed == {
        "level": "INFO",
        "logger": "veneer.test",
        "message": "listening",
        "callers": "127.0.0.1:7600",
        "text": "two\nlines",
    }


def test_facts_of_any_type_are_written() -> None:
    assert json.loads(JsonFormatter().format(record(digest=b"x", where=Ellipsis)))["where"] == "Ellipsis"


def test_a_traceback_is_written_where_one_was_asked_for() -> None:
    try:
        int("wrong")
    except ValueError:
        one = record()
        one.exc_info = sys.exc_info()
    assert "ValueError: invalid literal" in json.loads(JsonFormatter().format(one))["traceback"]


def test_a_level_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", logging.getLogger().handlers[:])
    with pytest.raises(ValueError, match="LOUD"):
        configure("loud")


def test_a_failure_that_wants_no_traceback_is_a_line_too() -> None:
    line = record()
    line.exc_info = False  # type: ignore[assignment]  # as `exc_info=False` of a call leaves it
    assert "traceback" not in json.loads(JsonFormatter().format(line))
