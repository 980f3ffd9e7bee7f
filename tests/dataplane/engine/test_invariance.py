"""What a row's bits depend on, with `batch_invariant` and without."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataplane.engine.client import EngineClient
from dataplane.engine.config import EngineConfig
from dataplane.engine.messages import Sampling, Submit
from dataplane.lora.image import ImagePair, build_image
from dataplane.lora.image_file import write_image
from dataplane.model.config import read_config
from tests.fixtures.oracle import MixedBatches, Row

FORMS = [("native", "bfloat16"), ("native", "float32"), ("torch", "bfloat16"), ("torch", "float32")]
SIZES = (2, 17, 65)
VOCAB = 160
ADAPTERS = (None, "r1", "r8", None, "r16", "r40")
Make = Callable[..., MixedBatches]


def random_adapter(model: Path, rank: int) -> list[ImagePair]:
    """An adapter on all seven modules of both layers; that of rank 8 lacks some."""
    rng = np.random.default_rng(rank)
    shapes = [(part.in_features, part.out_features) for part in read_config(model).projections]
    return [
        ImagePair(
            layer, index, 0.7,
            rng.standard_normal((rank, width)).astype(np.float32) * 0.2,
            rng.standard_normal((out, rank)).astype(np.float32) * 0.2,
        )
        for layer in range(2) for index, (width, out) in enumerate(shapes) if rank != 8 or (layer + index) % 3
    ]  # fmt: skip


@pytest.fixture(scope="module")
def model_dir(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("with-tokenizer") / "model"
    shutil.copytree(tiny_dir, folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(params=FORMS, ids="-".join)
def make(request: pytest.FixtureRequest, model_dir: Path) -> Make:
    form, dtype = request.param
    if form == "native" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("needs a C++ compiler")

    def build(*, invariant: bool) -> MixedBatches:
        adapters = {name: random_adapter(model_dir, int(name[1:])) for name in ADAPTERS if name}
        return MixedBatches(model_dir, adapters, max_rows=4096, cpu_form=form, dtype=dtype, batch_invariant=invariant)

    return build


def rows_of(count: int, *, most: int = 24, least: int = 1) -> list[Row]:
    """Rows of several lengths: the base, and every adapter."""
    rng = random.Random(count)
    return [
        Row(ADAPTERS[i % len(ADAPTERS)], tuple(rng.randrange(VOCAB) for _ in range(rng.randint(least, most))))
        for i in range(count)
    ]


@pytest.mark.parametrize("chunk", [1, 12])
def test_neighbours_and_their_order_change_no_bit_in_one_step_form(make: Make, chunk: int) -> None:
    ours, rows = make(invariant=False), rows_of(60, least=12, most=12)
    kept, others = rows[:8], rows[8:]
    moved = [
        Row(other.adapter, tuple((token + 31) % VOCAB for token in row.ids))
        for row, other in zip(others, others[1:] + others[:1], strict=True)
    ]
    first = ours.logits(kept + others, chunk=chunk)[:8]
    second = ours.logits(moved[:30] + kept[::-1] + moved[30:], chunk=chunk)[30:38]
    for one, other in zip(first, second[::-1], strict=True):
        assert torch.equal(one, other)


def test_across_step_forms_logits_are_close_and_decided_tokens_equal(make: Make) -> None:
    ours, rows = make(invariant=False), rows_of(9)
    together = {chunk: ours.logits(rows, chunk=chunk) for chunk in (7, 512)}
    num_decided = 0
    for i, row in enumerate(rows):
        (alone,) = ours.logits([row], chunk=1)
        bound = (1e-5 if ours.dtype == torch.float32 else 0.05) * float(alone.abs().max())
        best = alone.topk(2, dim=-1).values
        decided = best[:, 0] - best[:, 1] > 2 * bound
        num_decided += int(decided.sum())
        for logits in together.values():
            assert (logits[i] - alone).abs().max() <= bound
            assert torch.equal(logits[i].argmax(-1)[decided], alone.argmax(-1)[decided])
    assert num_decided > 20


@pytest.mark.parametrize("chunk", [1, 7, 16, 512])
def test_batch_invariant_bits_depend_on_neither_row_counts_nor_chunks(make: Make, chunk: int) -> None:
    ours, rows = make(invariant=True), rows_of(65)
    alone = [ours.logits([row], chunk=1)[0] for row in rows[:6]]
    for size in SIZES:
        for want, got in zip(alone, ours.logits(rows[:size], chunk=chunk, first_page=3), strict=False):
            assert torch.equal(want, got), size


def test_the_tests_can_fail_since_torch_adds_up_by_row_count(model_dir: Path) -> None:
    ours = MixedBatches(model_dir, {}, max_rows=4096, cpu_form="torch")
    rows = [Row(None, row.ids) for row in rows_of(64)]
    assert any(
        not torch.equal(ours.logits([row], chunk=1)[0], together)
        for row, together in zip(rows, ours.logits(rows, chunk=512), strict=True)
    )


async def answers(
    config: EngineConfig, images: dict[str, Path], requests: list[Submit], *, together: bool
) -> list[tuple[object, ...]]:
    """Runs requests on one engine, each alone or all at once; returns tokens and log-probabilities."""
    client = await EngineClient.start(config, in_process=True)
    try:
        for version, path in images.items():
            client.stage(version, path)

        async def answer(request: Submit) -> tuple[object, ...]:
            deltas = [delta async for delta in client.submit(request)]
            return tuple(token for delta in deltas for token in delta.ids), tuple(
                one for delta in deltas for one in delta.logprobs
            )

        if together:
            return await asyncio.gather(*map(answer, requests))
        return [await answer(request) for request in requests]
    finally:
        await client.stop()


@pytest.mark.parametrize(("form", "dtype"), FORMS)
async def test_batch_invariant_answers_are_equal_cold_or_cached_alone_or_preempted(
    model_dir: Path, tmp_path: Path, form: str, dtype: str
) -> None:
    images = {}
    for name in filter(None, dict.fromkeys(ADAPTERS)):
        image = build_image(
            random_adapter(model_dir, int(name[1:])), version=name, base_digest="base", dtype=dtype, num_layers=2, num_slices=7
        )
        images[name] = tmp_path / name
        write_image(images[name], image)
    beginning = tuple(random.Random(0).choices(range(VOCAB), k=40))
    requests = [
        Submit(
            request_id=str(i), tenant="t", prompt=(*beginning, *row.ids),
            sampling=Sampling(
                max_tokens=12, temperature=1.0 * (i % 2), top_p=0.9, seed=i, logprobs=2, frequency_penalty=0.5 * (i % 3)
            ),
            version=row.adapter, cache_salt="5a17",
        )
        for i, row in enumerate(rows_of(10))
    ]  # fmt: skip
    common: dict[str, Any] = {
        "model_dir": str(model_dir), "dtype": dtype, "cpu_form": form, "batch_invariant": True, "base_digest": "base",
        "arena_bytes": 4 << 20, "arena_unit_bytes": 4096, "max_step_rank_rows": 256, "max_context": 96,
    }  # fmt: skip
    page_bytes = 2 * 2 * 16 * 32 * (2 if dtype == "bfloat16" else 4)
    alone = EngineConfig(**common, max_sequences=1, max_step_tokens=1, kv_bytes=100 * page_bytes)
    crowded = EngineConfig(**common, max_sequences=10, max_step_tokens=33, kv_bytes=20 * page_bytes)
    first = await answers(alone, images, requests, together=False)
    again = await answers(
        crowded, images, requests + [replace(one, request_id=f"{one.request_id}+") for one in requests], together=True
    )
    assert again == first * 2
