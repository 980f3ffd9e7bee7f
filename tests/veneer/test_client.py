import asyncio
import inspect
import logging
import re

import pytest

from tests.veneer.scripted import KEY, LAST, SERVED, Catalog, Generation, collect
from veneer.client import Client, Event
from veneer.controlplane.v1 import catalog_pb2, tenants_pb2
from veneer.dataplane.v1 import generation_pb2 as pb
from veneer.errors import (
    AbortedError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)


async def test_a_stream_is_served_then_chunks_then_finish(client: Client, generation: Generation) -> None:
    generation.scripts = [[SERVED, LAST]]
    events = await collect(
        client.stream_complete("hi", adapter="tone", alias="beta", sampling=pb.SamplingParams(max_tokens=2), priority=3)
    )
    assert events == [SERVED.served, SERVED.chunk, LAST.chunk, LAST.finish]
    [request] = generation.requests
    assert request.priority == 3
    assert (request.text, request.adapter.adapter, request.adapter.alias, request.sampling.max_tokens) == (
        "hi",
        "tone",
        "beta",
        2,
    )


async def test_prompts_may_be_ids_or_a_conversation(client: Client, generation: Generation) -> None:
    generation.scripts = [[SERVED, LAST], [SERVED, LAST]]
    await collect(client.generate([1, 2, 3]))
    await collect(client.generate([pb.ChatMessage(role="user", content="hi")]))
    assert list(generation.requests[0].tokens.ids) == [1, 2, 3]
    assert generation.requests[1].chat.messages[0].content == "hi"


async def test_a_stream_of_several_choices_is_whole_with_a_finish_for_each(client: Client, generation: Generation) -> None:
    echo = pb.GenerateResponse(echo=pb.Echo(text="a"))
    other = pb.GenerateResponse(finish=pb.Finish(choice=1))
    generation.scripts = [[SERVED, echo, LAST, other], [SERVED, LAST]]
    two = pb.SamplingParams(n=2, echo=True)
    events = [event async for event in client.stream_complete("hi", sampling=two)]
    assert events == [SERVED.served, SERVED.chunk, echo.echo, LAST.chunk, LAST.finish, other.finish]
    with pytest.raises(UnavailableError, match="without a finish"):
        _ = [event async for event in client.stream_complete("hi", sampling=two)]


async def test_a_stream_without_a_finish_is_an_error_after_its_tokens(client: Client, generation: Generation) -> None:
    generation.scripts = [[SERVED]]
    events: list[Event] = []
    with pytest.raises(UnavailableError, match="without a finish"):
        await collect(client.stream_complete("hi"), into=events)
    assert events == [SERVED.served, SERVED.chunk]


async def test_a_name_that_no_header_can_hold_is_refused_by_the_plane(client: Client, generation: Generation) -> None:
    with pytest.raises(InvalidArgumentError, match="does not match"):
        await collect(client.stream_complete("hi", adapter="töne\n"))
    assert generation.requests == []


async def test_unavailable_before_the_first_message_is_tried_again(client: Client, generation: Generation) -> None:
    generation.scripts = [[UnavailableError("starting")], [SERVED, LAST]]
    assert len(await collect(client.stream_complete("hi"))) == 4
    assert len(generation.requests) == 2


async def test_the_longest_prompt_is_tried_again_too(client: Client, generation: Generation) -> None:
    generation.scripts = [[UnavailableError("starting")], [SERVED, LAST]]
    assert len(await collect(client.generate([200_000] * (1 << 20)))) == 4  # as many ids as one may have: 3 MiB
    assert len(generation.requests) == 2


async def test_unavailable_after_the_first_message_is_not_tried_again(client: Client, generation: Generation) -> None:
    generation.scripts = [[SERVED, UnavailableError("gone")], [SERVED, LAST]]
    with pytest.raises(UnavailableError, match="gone"):
        await collect(client.stream_complete("hi"))
    assert len(generation.requests) == 1


async def test_other_errors_are_not_tried_again_and_carry_their_delay(client: Client, generation: Generation) -> None:
    generation.scripts = [[ResourceExhaustedError("full", retry_after_s=2.0)], [SERVED, LAST]]
    with pytest.raises(ResourceExhaustedError) as caught:
        await collect(client.stream_complete("hi"))
    assert caught.value.retry_after_s == 2.0
    assert len(generation.requests) == 1


async def test_closing_the_iterator_cancels_the_request(client: Client, generation: Generation) -> None:
    generation.scripts = [[SERVED, asyncio.Event()]]
    stream = client.stream_complete("hi")
    await anext(stream)
    await stream.aclose()
    await asyncio.wait_for(generation.ended.wait(), 60)


async def test_a_closed_client_is_closed(client: Client, generation: Generation) -> None:
    generation.scripts = [[SERVED, LAST]]
    await collect(client.stream_complete("hi"))
    for _ in range(2):
        await client.close()
        with pytest.raises(FailedPreconditionError, match="was closed"):
            await collect(client.stream_complete("hi"))
        with pytest.raises(FailedPreconditionError, match="was closed"):
            await client.keys()
    assert len(generation.requests) == 1


async def test_a_stream_has_a_deadline(client: Client, generation: Generation) -> None:
    generation.scripts = [[asyncio.Event()]]
    with pytest.raises(DeadlineExceededError):
        await collect(client.stream_complete("hi", timeout_s=0.1))


async def test_every_other_call_has_a_deadline_too(client: Client) -> None:
    client._timeout_s = 0.1
    with pytest.raises(DeadlineExceededError):
        await client.versions("tone")


async def test_bad_requests_carry_every_violation(client: Client) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await collect(client.generate([], sampling=pb.SamplingParams(max_tokens=0, top_k=1)))
    assert {violation.field for violation in caught.value.violations} == {"tokens.ids", "sampling.max_tokens"}


async def test_an_alias_and_a_version_at_once_are_refused(client: Client) -> None:
    with pytest.raises(InvalidArgumentError, match="not both"):
        await collect(client.stream_complete("hi", adapter="tone", alias="a", version="0" * 64))


async def test_lists_go_through_all_pages(client: Client) -> None:
    names = [adapter.name for adapter in await client.adapters()]
    assert names == [f"adapter-{page}-{index}" for page in range(3) for index in range(2)]


async def test_a_split_and_the_expected_generation_travel(client: Client) -> None:
    alias = await client.set_alias("tone", {"a" * 64: 9, "b" * 64: 1}, alias="beta", expected_generation=0)
    assert (alias.name, alias.generation, [arm.weight for arm in alias.arms]) == ("beta", 1, [9, 1])
    assert (await client.set_alias("tone", {"a" * 64: 1})).generation == 99


def test_whatever_a_write_of_the_catalogue_offers_its_method_offers() -> None:
    shared = {"dry_run", "expected_generation", "request_id", "force"}
    for rpc in catalog_pb2.DESCRIPTOR.services_by_name["CatalogService"].methods:
        offered = shared & set(rpc.input_type.fields_by_name)
        name = {"RetireVersion": "retire", "FreezeAlias": "freeze"}.get(
            rpc.name, re.sub(r"(?<!^)(?=[A-Z])", "_", rpc.name).lower()
        )
        assert not offered or offered <= set(inspect.signature(getattr(Client, name)).parameters), rpc.name


@pytest.mark.parametrize("call", ["adapter", "rollback"])
async def test_reads_are_tried_again_and_so_are_writes_under_their_identifier(
    client: Client, catalog: Catalog, call: str
) -> None:
    catalog.error = UnavailableError("restarting")
    with pytest.raises(UnavailableError):
        await getattr(client, call)("tone")
    assert catalog.calls == [{"adapter": "GetAdapter", "rollback": "Rollback"}[call]] * 3
    assert len(set(catalog.request_ids)) == (1 if call == "rollback" else 0)
    assert "" not in catalog.request_ids


async def test_a_lost_compare_and_swap_is_an_aborted_error(client: Client, catalog: Catalog) -> None:
    catalog.error = AbortedError("moved")
    with pytest.raises(AbortedError, match="moved"):
        await client.rollback("tone")


async def test_roles_are_named_in_words(client: Client) -> None:
    response = await client.create_key(roles=["caller", "owner"], label="ci", lifetime_s=60)
    assert list(response.key.roles) == [tenants_pb2.ROLE_CALLER, tenants_pb2.ROLE_OWNER]
    with pytest.raises(InvalidArgumentError, match="`admin` is no role; there are auditor, caller, owner, publisher"):
        await client.create_key(roles=["admin"])


async def test_a_plane_without_an_address_is_named() -> None:
    async with Client(data="127.0.0.1:1", key=KEY) as client:
        with pytest.raises(FailedPreconditionError, match="no address of the control plane"):
            await client.adapters()


async def test_nobody_listens_is_unavailable_and_names_no_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with Client(control="127.0.0.1:1", key=KEY, timeout_s=5) as client:
        with pytest.raises(UnavailableError) as caught:
            await client.adapters()
    assert KEY not in str(caught.value) + caplog.text
