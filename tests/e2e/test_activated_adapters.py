"""Adapters that tokens of the prompt activate: what answers, what the first message says, and what is shared meanwhile."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.e2e.conftest import Connect, Publish, Secrets
from tests.e2e.driving import Stream, aside, blobs_unreadable, conserved, generate, until
from tests.e2e.markers import ANY_MARKER
from veneer.client import Client
from veneer.dataplane.v1 import generation_pb2 as pb
from veneer.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from veneer.local.stack import LocalStack
from veneer.operator_client import OperatorClient

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.usefixtures("without_hints")]

CALL = "<judge>"
CONTEXT = "the whole conversation of an agent, which many steps of its work begin with; " * 2


@pytest.fixture(scope="module")
def invocation(model_dir: Path) -> list[int]:
    """The tokens of `CALL`."""
    ids: list[int] = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(CALL, add_special_tokens=False).ids
    return ids


async def counter(stack: LocalStack, name: str, labels: str) -> float:
    page = await aside(lambda: urllib.request.urlopen(f"http://{stack.state.data_metrics}/metrics", timeout=60).read().decode())
    found = re.search(rf"^{re.escape(name)}{{[^}}]*{labels}[^}}]*}} (\S+)$", page, re.MULTILINE)
    return 0.0 if found is None else float(found[1])


async def test_the_adapter_answers_where_it_is_invoked_and_else_the_base_which_says_so(
    stack: LocalStack, acme: Client, connect: Connect, secrets: Secrets, publish: Publish, invocation: list[int]
) -> None:
    strict = connect(secrets.strict)
    before = await counter(stack, "veneer_fallbacks_total", 'reason="not_invoked"')
    for client in (acme, strict):
        version = (await publish(client, "A", invocation=invocation)).version
        assert list(version.report.invocation_tokens) == invocation
        for prompt in (CALL, f"hello {CALL}", f"{CALL} hello {CALL} again"):
            answer = await generate(client, version.adapter, prompt=prompt)
            assert (answer.text, answer.served.version, answer.served.fallback) == ("A" * 8, version.digest, False)
        plain = await generate(client, prompt="hello <judg")
        for mode in (pb.FALLBACK_MODE_NONE, pb.FALLBACK_MODE_ANY):
            answer = await generate(client, version.adapter, prompt="hello <judg", fallback=mode)
            served = answer.served
            assert (served.fallback, served.fallback_reason) == (True, pb.FALLBACK_REASON_NOT_INVOKED)
            assert (served.version, served.adapter, served.owner) == ("", "", "")
            assert answer.text == plain.text
            assert not ANY_MARKER.search(answer.text)
        chat = [pb.ChatMessage(role="user", content=f"what of this? {CALL}")]
        assert (await generate(client, version.adapter, prompt=chat)).text == "A" * 8
    assert await counter(stack, "veneer_fallbacks_total", 'reason="not_invoked"') == before + 4


async def test_who_may_not_use_a_version_is_refused_though_its_prompt_does_not_invoke_it(
    acme: Client, rival: Client, publish: Publish, invocation: list[int]
) -> None:
    first = (await publish(acme, "B", adapter="refused", invocation=invocation)).version
    await publish(acme, "B", adapter="refused", invocation=invocation, alias="stable")
    await acme.retire("refused", first.digest)
    with pytest.raises(FailedPreconditionError, match="retired"):
        await generate(acme, "refused", version=first.digest)
    with pytest.raises(NotFoundError):
        await generate(rival, "refused", owner="acme")


async def test_tokens_that_the_base_does_not_have_are_refused_at_publish(acme: Client, publish: Publish) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        await publish(acme, "C", invocation=[5, publish.base.vocab_size])
    assert "alora_invocation_tokens[1]" in str(refused.value)


async def test_what_stands_before_the_call_is_shared_with_the_base_and_never_with_other_tenants(
    acme: Client, rival: Client, operator: OperatorClient, publish: Publish, invocation: list[int]
) -> None:
    adapters = {client: (await publish(client, "D", invocation=invocation)).version.adapter for client in (acme, rival)}
    prompt = CONTEXT + CALL

    async def found(client: Client, adapter: str) -> int:
        before = (await operator.residency()).engine.prefix_hits
        await generate(client, adapter, prompt=prompt, max_tokens=4)
        return int((await operator.residency()).engine.prefix_hits - before)

    assert await found(acme, "") == 0
    assert await found(acme, adapters[acme]) >= len(CONTEXT) - 16
    assert await found(rival, adapters[rival]) == 0


async def test_the_context_is_computed_while_the_adapter_cannot_be_loaded(
    stack: LocalStack, acme: Client, operator: OperatorClient, publish: Publish, invocation: list[int]
) -> None:
    version = (await publish(acme, "E", invocation=invocation)).version
    async with conserved(operator):
        kept = (await operator.residency()).engine.kv_pages_kept
        with blobs_unreadable(stack, version.digest):
            stream = Stream(acme, version.adapter, max_tokens=8, prompt=f"{version.adapter}: {CONTEXT}{CALL}")
            reading = asyncio.create_task(stream.read())

            async def computed() -> bool:
                engine = (await operator.residency()).engine
                return engine.kv_pages_kept > kept and (engine.running, engine.waiting, engine.kv_pages_used) == (0, 1, 0)

            await until(computed)
            assert not reading.done()
        answer = await reading
        assert (answer.text, answer.error, answer.error and answer.error.__cause__) == ("E" * 8, None, None)
