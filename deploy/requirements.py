"""Prints what the image installs beside Veneer itself: `python requirements.py PYPROJECT EXTRA … [--without NAME …]`.

The list depends on `pyproject.toml` alone, so that the layer that holds these packages stays when only code changes.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_OWN_EXTRA = re.compile(r"veneer\[([^\]]+)\]")
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def requirements(project: dict[str, Any], extras: Iterable[str]) -> Iterator[str]:
    """The requirements of the project and of extras, where an extra may name other extras of the project."""
    yield from project["dependencies"]
    for extra in extras:
        yield from _of_extra(project, extra)


def _of_extra(project: dict[str, Any], extra: str) -> Iterator[str]:
    for line in project["optional-dependencies"][extra]:
        own = _OWN_EXTRA.fullmatch(line)
        if own is None:
            yield line
        else:
            for name in own.group(1).split(","):
                yield from _of_extra(project, name.strip())


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Prints the requirements of some extras of a project.")
    parser.add_argument("pyproject", type=Path)
    parser.add_argument("extras", nargs="*", metavar="EXTRA")
    parser.add_argument("--without", action="append", default=[], metavar="NAME", help="leaves a package out")
    arguments = parser.parse_args()
    project = tomllib.loads(arguments.pyproject.read_text(encoding="utf-8"))["project"]
    for line in dict.fromkeys(requirements(project, arguments.extras)):
        name = _NAME.match(line)
        if name is not None and name.group() not in arguments.without:
            print(line)


if __name__ == "__main__":
    main()
