"""Logs as JSON lines: a constant message, and the facts beside it."""

from __future__ import annotations

import datetime
import json
import logging
import sys

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a record: `time`, `level`, `logger`, `message`, and everything that was passed in `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line, without its end."""
        line: dict[str, object] = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _OWN}
        if record.exc_info and record.exc_info[0] is not None:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def configure(level: str = "INFO") -> None:
    """Sends all logs of this process to standard error as JSON lines. For `__main__` only.

    Raises:
        ValueError: There is no such level.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.setLevel(level.upper())
    root.handlers[:] = [handler]
