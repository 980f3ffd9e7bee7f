"""A version of finite weights whose products overflow: it passes the check at publishing, and fails alone when it is used."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.conftest import Publish
from tests.e2e.driving import Stream, conserved, generate, until
from tests.fixtures.adapters import Tensors, encode, make_adapter_folder
from veneer.artifact import BaseDescription
from veneer.client import Client
from veneer.controlplane.v1 import catalog_pb2
from veneer.errors import FailedPreconditionError, InternalError, VeneerError
from veneer.operator_client import OperatorClient

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

_LONG = 600
_PROMPT = "a prompt of several pages, so that there is something that could be kept of it for others"


def write_overflowing(folder: Path, base: BaseDescription, *, seed: int = 0) -> Path:
    """Every element and every factor is within the limits, and so is every single product; gate times up times down is not."""

    def edit(tensors: Tensors) -> None:
        random = np.random.default_rng(seed)
        for name, (dtype, shape, _) in tensors.items():
            tensors[name] = (dtype, shape, encode(random.choice([-60_000.0, 60_000.0], shape), dtype))

    return make_adapter_folder(folder, base, modules=("gate_proj", "up_proj", "down_proj"), ranks=2, alpha=60_000, edit=edit)


async def test_its_request_ends_alone_nothing_of_it_is_kept_and_nobody_gets_it_again(
    acme: Client, operator: OperatorClient, publish: Publish, model_base: BaseDescription, tmp_path: Path
) -> None:
    good = (await publish(acme, "A")).version
    files = write_overflowing(tmp_path / "bad", model_base)
    bad = (await acme.publish(files, adapter="overflows", base=model_base.digest)).version
    assert bad.state == catalog_pb2.VERSION_STATE_READY, "every weight is finite"
    base_alone = (await generate(acme, max_tokens=_LONG)).text
    kept = (await operator.residency()).engine.kv_pages_kept

    async with conserved(operator):
        with pytest.raises(InternalError, match="not finite"):
            await generate(acme, bad.adapter, prompt=_PROMPT)
    assert (await operator.residency()).engine.kv_pages_kept == kept

    async def is_quarantined() -> bool:
        return (await acme.versions(bad.adapter))[0].state == catalog_pb2.VERSION_STATE_QUARANTINED

    await until(is_quarantined)

    async def is_refused() -> bool:
        with pytest.raises(VeneerError) as caught:
            await generate(acme, bad.adapter, prompt=_PROMPT)
        return isinstance(caught.value, FailedPreconditionError) and "quarantined" in caught.value.message

    await until(is_refused)
    assert all(held.version != bad.digest for held in (await operator.residency()).versions)
    assert (await generate(acme, good.adapter)).text == "A" * 8
    assert (await generate(acme, max_tokens=_LONG)).text == base_alone


async def test_its_neighbours_keep_their_tokens(
    acme: Client, operator: OperatorClient, publish: Publish, model_base: BaseDescription, tmp_path: Path
) -> None:
    good = (await publish(acme, "B")).version
    base_alone = (await generate(acme, max_tokens=_LONG)).text
    async with conserved(operator):
        neighbours = [Stream(acme, adapter, max_tokens=_LONG) for adapter in (good.adapter, "", good.adapter)]
        for stream in neighbours:
            await stream.first()
        for number in range(3):  # each of them can do it once
            files = write_overflowing(tmp_path / str(number), model_base, seed=number + 1)
            bad = (await acme.publish(files, adapter=f"overflows-{number}", base=model_base.digest)).version
            with pytest.raises(InternalError, match="not finite"):
                await generate(acme, bad.adapter, prompt=_PROMPT)
        answers = await asyncio.gather(*(stream.read() for stream in neighbours))
        assert [(answer.error, answer.text) for answer in answers] == [
            (None, "B" * _LONG), (None, base_alone), (None, "B" * _LONG),
        ]  # fmt: skip
