"""The image holds the native libraries where the planes look for them, and not the compiler."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

import kernels.native

ROOT = Path(__file__).resolve().parents[2]


def stages() -> dict[str, str]:
    """The instructions of each stage of the image's build."""
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    return dict(re.findall(r"^FROM \S+ AS (\w+)\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL))


def test_the_libraries_are_built_where_the_interpreter_of_the_image_looks_for_them() -> None:
    (out,) = re.findall(r"python -m kernels\.native build --out (\S+)", stages()["native"])
    (prefix,) = re.findall(r"ENV PATH=(\S+)/bin:\$PATH", stages()["runtime"])
    where = kernels.native.PREBUILT.relative_to(kernels.native.sys.prefix)
    assert PurePosixPath(out) == PurePosixPath(prefix) / where.as_posix()
    assert f"COPY --from=native {prefix} {prefix}" in stages()["service"]


def test_the_compiler_stays_out_of_the_image_that_serves() -> None:
    assert "g++" in stages()["native"]
    assert "g++" not in stages()["service"] + stages()["runtime"]
