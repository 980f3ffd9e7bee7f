"""Bases over the wire."""

from __future__ import annotations

import dataclasses

import grpc
import pytest

from tests.fixtures.controlplane import BASE_DIGEST, World, refused, tiny_base
from veneer.artifact import EdgeDigest
from veneer.controlplane.v1 import bases_pb2


async def test_a_base_comes_back_as_it_was_registered(world: World) -> None:
    await world.base(dataclasses.replace(tiny_base(), known_names=("small", "tiny-v1")))
    tenant = await world.tenant("acme")
    for client in (world.operator, tenant, await world.node()):
        listed = (await client.bases.ListBases(bases_pb2.ListBasesRequest())).bases
        assert [(one.digest, one.name, one.known_names) for one in listed] == [(BASE_DIGEST, "tiny", ["small", "tiny-v1"])]
        assert [module.path for module in listed[0].modules] == ["model.layers.{layer}.self_attn.q_proj"]
        assert (listed[0].vocab_size, listed[0].max_context, listed[0].num_layers) == (32, 64, 1)


async def test_registering_a_digest_again_gives_the_stored_row(world: World) -> None:
    await world.base()
    await world.base(dataclasses.replace(tiny_base(), name="another name"))
    listed = (await world.operator.bases.ListBases(bases_pb2.ListBasesRequest())).bases
    assert [one.name for one in listed] == ["tiny"]


async def ends(world: World) -> list[tuple[int, ...] | None]:
    listed = (await world.operator.bases.ListBases(bases_pb2.ListBasesRequest())).bases
    return [tuple(one.ends.token_ids) if one.HasField("ends") else None for one in listed]


@pytest.mark.parametrize("eos_ids", [(), (2,), (31, 0)])
async def test_the_ends_of_sequences_are_kept_and_added_to_a_base_that_lacks_them(world: World, eos_ids: tuple[int, ...]) -> None:
    await world.base()
    assert await ends(world) == [None]
    await world.base(dataclasses.replace(tiny_base(), eos_ids=eos_ids))
    assert await ends(world) == [eos_ids]
    await world.base()
    await world.base(dataclasses.replace(tiny_base(), eos_ids=(7,)))
    assert await ends(world) == [eos_ids]


async def test_digests_of_embedding_and_head_are_kept_and_added_to_a_base_that_lacks_them(world: World) -> None:
    async def kept() -> list[tuple[str, str, str]] | None:
        (one,) = (await world.operator.bases.ListBases(bases_pb2.ListBasesRequest())).bases
        return [(edge.site, edge.dtype, edge.sha256) for edge in one.edges.digests] if one.HasField("edges") else None

    first, other = (EdgeDigest("embed", "F32", letter * 64) for letter in "ab")
    await world.base()
    assert await kept() is None
    await world.base(dataclasses.replace(tiny_base(), edge_digests=(first,)))
    await world.base(dataclasses.replace(tiny_base(), edge_digests=(other,)))
    await world.base()
    assert await kept() == [("embed", "F32", "a" * 64)]


async def chat(world: World) -> tuple[str, str | None]:
    (one,) = (await world.operator.bases.ListBases(bases_pb2.ListBasesRequest())).bases
    name = bases_pb2.ChatContents.Name(one.chat_contents).removeprefix("CHAT_CONTENTS_").lower()
    return name, one.chat_fault if one.HasField("chat_fault") else None


async def test_what_is_said_of_conversations_is_replaced_and_kept_where_nothing_is_said(world: World) -> None:
    await world.base()
    assert await chat(world) == ("text", None), "the default, and nothing was tried"
    await world.base(dataclasses.replace(tiny_base(), chat_contents="tokens", chat_fault="an unknown tag"))
    assert await chat(world) == ("tokens", "an unknown tag")
    await world.base()
    assert await chat(world) == ("tokens", "an unknown tag")
    await world.base(dataclasses.replace(tiny_base(), chat_contents="text", chat_fault=""))
    assert await chat(world) == ("text", "")


async def test_a_base_may_be_registered_with_its_setting_at_once(world: World) -> None:
    await world.base(dataclasses.replace(tiny_base(), chat_contents="tokens"))
    assert (await chat(world))[0] == "tokens"


async def test_an_end_beyond_the_vocabulary_is_refused(world: World) -> None:
    code, message = await refused(world.base(dataclasses.replace(tiny_base(), eos_ids=(31, 32))))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "ends.token_ids[1]" in message
    assert "32" in message


async def test_a_name_belongs_to_one_base(world: World) -> None:
    await world.base()
    assert (await refused(world.base(tiny_base("f" * 64))))[0] == grpc.StatusCode.ALREADY_EXISTS


async def test_bases_are_listed_newest_first(world: World) -> None:
    for number in range(3):
        await world.base(tiny_base(f"{number}" * 64, f"base-{number}"))
    listed = (await world.operator.bases.ListBases(bases_pb2.ListBasesRequest())).bases
    assert [one.name for one in listed] == ["base-2", "base-1", "base-0"]


async def test_bases_come_in_pages(world: World) -> None:
    for number in range(5):
        await world.base(tiny_base(f"{number}" * 64, f"base-{number}"))
    names, token = list[list[str]](), ""
    while True:
        page = await world.operator.bases.ListBases(bases_pb2.ListBasesRequest(page_size=2, page_token=token))
        names.append([one.name for one in page.bases])
        token = page.next_page_token
        if not token:
            break
    assert names == [["base-4", "base-3"], ["base-2", "base-1"], ["base-0"]]
    wrong = bases_pb2.ListBasesRequest(page_token="bm9uZQ==")
    assert (await refused(world.operator.bases.ListBases(wrong)))[0] == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_vocabulary_beyond_an_integer_of_postgres_is_kept(world: World) -> None:
    await world.base(dataclasses.replace(tiny_base(), vocab_size=2**32 - 1, max_context=2**32 - 1))
    (listed,) = (await world.operator.bases.ListBases(bases_pb2.ListBasesRequest())).bases
    assert listed.vocab_size == listed.max_context == 2**32 - 1
