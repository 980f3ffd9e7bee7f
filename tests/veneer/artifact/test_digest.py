from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veneer.artifact import version_digest
from veneer.artifact.digest import Manifest

A, B = "a" * 64, "b" * 64


def test_the_digest_of_a_version_is_fixed_for_ever() -> None:
    assert (
        version_digest("acme", A, {"adapter_config.json": A, "adapter_model.safetensors": B})
        == "bcf602cba34c1eb9ddaba4ddd88f7f866c98b3efa67868d7d49f7c8059839009"
    )


def test_each_part_of_the_identity_counts() -> None:
    files = {"adapter_config.json": A, "adapter_model.safetensors": B}
    swapped = {"adapter_config.json": B, "adapter_model.safetensors": A}
    digests = {
        version_digest("acme", A, files),
        version_digest("globex", A, files),
        version_digest("acme", B, files),
        version_digest("acme", A, swapped),
        version_digest("acme", A, {"adapter_config.json": A}),
    }
    assert len(digests) == 5
    assert version_digest("acme", A, dict(reversed(files.items()))) in digests


def test_what_is_no_digest_is_refused() -> None:
    for wrong in ("", "A" * 64, "a" * 63, "a" * 64 + "\n"):
        with pytest.raises(ValueError, match="is not a SHA-256"):
            version_digest("acme", wrong, {})


_PARTS = st.lists(st.tuples(st.sampled_from(["a", "ab", "b"]), st.binary(max_size=4)), max_size=4)


@given(_PARTS, _PARTS)
def test_different_parts_never_share_a_digest(left: list[tuple[str, bytes]], right: list[tuple[str, bytes]]) -> None:
    def digest(parts: list[tuple[str, bytes]]) -> str:
        manifest = Manifest("test")
        for tag, data in parts:
            manifest.add(tag, data)
        return manifest.hexdigest()

    assert (digest(left) == digest(right)) == (left == right)
