"""A version that is deleted at any moment of its requests' lives: they finish on it, or there is no such adapter."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from tests.e2e.conftest import Connect, Publish, Secrets
from tests.e2e.driving import Answer, Stream, conserved, generate, until_not
from veneer.client import Client
from veneer.dataplane.v1 import generation_pb2 as pb
from veneer.errors import NotFoundError
from veneer.operator_client import OperatorClient

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

_TOKENS = 30
_SEED = 14
_FALLBACKS = [pb.FALLBACK_MODE_NONE, pb.FALLBACK_MODE_NOT_READY, pb.FALLBACK_MODE_PREVIOUS, pb.FALLBACK_MODE_ANY] * 3


def end_of(answer: Answer, base: str, version: str, fallback: pb.FallbackMode.ValueType) -> str:
    """What became of a request, which must be one of three."""
    if answer.error is not None:
        assert answer.error.status == "NOT_FOUND", f"{answer.error.status} {answer.error.message}"
        assert (answer.num_tokens, fallback == pb.FALLBACK_MODE_ANY) == (0, False)
        return "not found"
    assert answer.served is not None
    assert answer.num_tokens == _TOKENS
    if answer.served.version:
        assert (answer.served.version, answer.text) == (version, "A" * _TOKENS)
        return "whole"
    assert fallback == pb.FALLBACK_MODE_ANY
    assert (answer.served.fallback_reason, answer.text) == (pb.FALLBACK_REASON_NOT_FOUND, base)
    return "base"


async def _is_served(client: Client, adapter: str) -> bool:
    try:
        await generate(client, adapter, max_tokens=1)
    except NotFoundError:
        return False
    return True


async def test_requests_of_a_version_that_is_deleted_at_any_moment_finish_or_find_nothing(
    connect: Connect, secrets: Secrets, operator: OperatorClient, publish: Publish
) -> None:
    acme, chance = connect(secrets.acme), random.Random(_SEED)
    base = (await generate(acme, max_tokens=_TOKENS)).text
    ends: Counter[tuple[bool, str]] = Counter()
    async with conserved(operator):
        for turn in range(12):
            published = (await publish(acme, "A")).version
            adapter, version = published.adapter, published.digest
            is_warm = turn % 3 == 0  # its streams run when it is deleted; else between admission, load and first token
            streams = [Stream(acme, adapter, max_tokens=_TOKENS, fallback=fallback) for fallback in _FALLBACKS]
            if is_warm:
                await asyncio.gather(*(stream.read_tokens(chance.randrange(1, 8)) for stream in streams))
            readers = [asyncio.create_task(stream.read()) for stream in streams]
            if not is_warm:
                for _ in range(chance.randrange(60)):  # turns of the loop, during which requests and their load come on
                    await asyncio.sleep(0)
            await acme.delete_version(adapter, version, force=True)
            for answer, fallback in zip(await asyncio.gather(*readers), _FALLBACKS, strict=True):
                ends[is_warm, end_of(answer, base, version, fallback)] += 1
            await until_not(lambda: _is_served(acme, adapter))  # noqa: B023  it is awaited here
    assert ends[True, "whole"] == 4 * len(_FALLBACKS)
