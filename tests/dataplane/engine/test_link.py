"""What an engine's process inherits."""

from __future__ import annotations

import pytest

from dataplane.engine.link import child_environment


def test_the_child_gets_huge_pages_and_keeps_other_tunables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert child_environment()["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")
    assert child_environment()["GLIBC_TUNABLES"] == "glibc.malloc.check=1:glibc.malloc.hugetlb=1"
