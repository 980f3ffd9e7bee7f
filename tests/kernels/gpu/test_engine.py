"""The whole engine in the form of a device, its kernels in Triton's interpreter, beside the torch form."""

from __future__ import annotations

import pytest

from tests.kernels.gpu.engines import answer, ask, config_of, write_world


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("device")
    return folder, write_world(folder)


MIXED = (
    ask("base", range(1, 6)),
    ask("one", range(7, 27), "a1"),
    ask("five", [40], "a5"),
    ask("seventeen", range(30, 39), "a17"),
)
"""A chunked prompt, a single token, adapters of three ranks and none."""


def test_it_chooses_the_tokens_of_the_torch_form(world):
    folder, paths = world
    expected = answer(config_of(folder, cpu_form="torch"), paths, MIXED)
    got = answer(config_of(folder, cpu_form="triton"), paths, MIXED)
    assert got.tokens == expected.tokens
    assert all(len(tokens) == 6 for tokens in got.tokens.values())
    assert got.engine.ready.plan[-1].endswith("each planned while the one before runs")
