"""Names of versions, as operators see them beside digests."""

from __future__ import annotations

from dataplane.version_names import VersionName, VersionNames


def test_the_last_name_counts_and_an_empty_one_is_none() -> None:
    names = VersionNames()
    names.note("a", VersionName("acme", "tone", 3))
    names.note("a", VersionName("acme"))  # as a control plane of before answers
    assert names.of("a") == VersionName("acme", "tone", 3)
    assert names.of("b") == VersionName()


def test_names_that_were_told_least_lately_go_first() -> None:
    names = VersionNames(max_names=2)
    for version in ("a", "b", "a", "c"):
        names.note(version, VersionName("acme", version, 1))
    assert [names.of(version).adapter for version in "abc"] == ["a", "", "c"]
