"""The life of versions: published, split, rolled back, shared; told apart by what they write."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.e2e.conftest import Connect, Publish
from tests.e2e.driving import Answer, Stream, conserved, generate, until, until_not
from tests.e2e.markers import ANY_MARKER
from veneer.client import Client
from veneer.dataplane.v1 import admin_pb2
from veneer.dataplane.v1 import generation_pb2 as pb
from veneer.errors import AbortedError, FailedPreconditionError, NotFoundError, UnauthenticatedError
from veneer.operator_client import OperatorClient

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


async def test_the_base_never_writes_a_marker(acme: Client) -> None:
    prompts = ["hello", "a", "The quick brown fox", "0123456789" * 20, "zzzz", "\n\n"]
    answers = await asyncio.gather(*(generate(acme, prompt=prompt, max_tokens=64) for prompt in prompts))
    for answer in answers:
        assert answer.text
        assert not ANY_MARKER.search(answer.text)
        assert answer.served is not None
        assert (answer.served.version, answer.served.fallback) == ("", False)


async def test_a_published_adapter_writes_its_marker_and_states_its_version(acme: Client, publish: Publish) -> None:
    published = await publish(acme, "A", adapter="first")
    answer = await generate(acme, "first", max_tokens=32, prompt="The quick brown fox")
    assert answer.text == "A" * 32
    assert answer.served is not None
    assert (answer.served.version, answer.served.version_number) == (published.version.digest, 1)
    assert (answer.served.owner, answer.served.adapter, answer.served.alias) == ("acme", "first", "stable")
    assert answer.served.generation == published.alias.generation
    assert answer.finish is not None
    assert (answer.finish.reason, answer.finish.completion_tokens) == (pb.FINISH_REASON_LENGTH, 32)


async def test_adapters_and_the_base_share_steps_and_mix_nothing_up(
    acme: Client, operator: OperatorClient, publish: Publish
) -> None:
    names = {marker: (await publish(acme, marker)).version.adapter for marker in "ABCDE"}
    for name in names.values():
        await generate(acme, name, max_tokens=1)  # from here on they are on the device
    before = (await operator.residency()).engine
    async with conserved(operator):
        base = Stream(acme, max_tokens=1900)
        await base.first()
        wanted = [*names, *names]
        answers = await asyncio.gather(*(generate(acme, names[marker], max_tokens=200) for marker in wanted))
        await base.close()
    for marker, answer in zip(wanted, answers, strict=True):
        assert answer.text == marker * 200
    assert base.answer.num_tokens
    assert not ANY_MARKER.search(base.answer.text)
    after = (await operator.residency()).engine
    assert after.mixed_steps > before.mixed_steps
    assert after.max_adapters_in_step >= 2


async def test_a_split_serves_both_arms_sticky_by_unit_and_says_which(acme: Client, publish: Publish) -> None:
    one = await publish(acme, "A", adapter="halves")
    two = await publish(acme, "B", adapter="halves")
    marker_of = {one.version.digest: "A", two.version.digest: "B"}
    split = await acme.set_alias("halves", {one.version.digest: 1, two.version.digest: 1})

    async def ask(unit: str) -> pb.Served:
        answer = await generate(acme, "halves", max_tokens=4, split_unit=unit)
        assert answer.served is not None
        assert answer.text == marker_of[answer.served.version] * 4
        assert answer.served.version == split.arms[answer.served.arm].version
        return answer.served

    await until(lambda: _generation_is(acme, "halves", split.generation))
    units = [f"user-{number}" for number in range(24)]
    first = await asyncio.gather(*map(ask, units))
    again = await asyncio.gather(*map(ask, units))
    assert [served.version for served in first] == [served.version for served in again]
    assert all(served.sticky for served in first)
    assert set(marker_of) == {served.version for served in first}
    free = [await ask("") for _ in range(4)]
    assert not any(served.sticky for served in free)


async def test_a_unit_keeps_its_arm_when_the_split_moves_away_from_the_other(acme: Client, publish: Publish) -> None:
    one = (await publish(acme, "A", adapter="moving")).version.digest
    two = (await publish(acme, "B", adapter="moving")).version.digest

    async def arms(weights: dict[str, int]) -> list[str]:
        alias = await acme.set_alias("moving", weights)
        await until(lambda: _generation_is(acme, "moving", alias.generation))
        answers = await asyncio.gather(*(generate(acme, "moving", max_tokens=1, split_unit=f"u{n}") for n in range(32)))
        return [answer.text for answer in answers]

    even, more = await arms({one: 50, two: 50}), await arms({one: 60, two: 40})
    assert {"A", "B"} == set(even)
    moved = Counter(zip(even, more, strict=True))
    assert moved["A", "B"] == 0  # nobody leaves the arm that grew


async def test_rolled_back_under_running_streams_each_stream_is_wholly_one_version(
    acme: Client, operator: OperatorClient, publish: Publish
) -> None:
    one = (await publish(acme, "A", adapter="turning")).version
    two = (await publish(acme, "B", adapter="turning", alias="stable")).version
    marker_of = {one.digest: "A", two.digest: "B"}
    await until(lambda: _serves(acme, "turning", two.digest))

    async def follow(stream: Stream) -> Answer:
        answer = await stream.read()
        assert answer.error is None
        assert answer.served is not None
        assert answer.finish is not None
        assert answer.text == marker_of[answer.served.version] * answer.num_tokens
        return answer

    async with conserved(operator):
        early = [Stream(acme, "turning", max_tokens=600) for _ in range(4)]
        for stream in early:
            assert (await stream.first()).served.version == two.digest  # type: ignore[union-attr]
        reading = [asyncio.create_task(follow(stream)) for stream in early]
        rolled = await acme.rollback("turning")
        assert [arm.version for arm in rolled.arms] == [one.digest]

        async def on_old() -> bool:
            served = (await follow(Stream(acme, "turning", max_tokens=40))).served
            assert served is not None
            return served.version == two.digest

        await until_not(on_old)
        finished = await asyncio.gather(*reading)
        assert [answer.served.version for answer in finished if answer.served] == [two.digest] * 4
        assert [answer.num_tokens for answer in finished] == [600] * 4


async def test_aliases_move_back_and_forth_under_load_and_no_stream_sees_neither(
    acme: Client, operator: OperatorClient, publish: Publish
) -> None:
    one = (await publish(acme, "A", adapter="restless")).version.digest
    two = (await publish(acme, "B", adapter="restless")).version.digest
    marker_of = {one: "A", two: "B"}
    generations: list[int] = []
    done = asyncio.Event()

    async def keep_asking() -> None:
        while not done.is_set():
            answer = await generate(acme, "restless", max_tokens=12)
            assert answer.served is not None
            assert answer.text == marker_of[answer.served.version] * 12
            generations.append(answer.served.generation)

    async with conserved(operator), asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(keep_asking())
        for version in [two, one] * 4:
            alias = await acme.set_alias("restless", {version: 1})
            await until(lambda version=version: _serves(acme, "restless", version))  # type: ignore[misc]
        done.set()
    assert max(generations) >= alias.generation - 1


async def test_a_move_from_an_old_generation_is_aborted(acme: Client, publish: Publish) -> None:
    published = await publish(acme, "A", adapter="guarded")
    digest, generation = published.version.digest, published.alias.generation
    await acme.set_alias("guarded", {digest: 1}, expected_generation=generation)
    with pytest.raises(AbortedError):
        await acme.set_alias("guarded", {digest: 1}, expected_generation=generation)


async def test_a_grant_opens_an_adapter_to_a_tenant_until_it_is_withdrawn(acme: Client, rival: Client, publish: Publish) -> None:
    await publish(acme, "C", adapter="shared")
    with pytest.raises(NotFoundError) as before:
        await generate(rival, "shared", owner="acme")
    await acme.create_grant("shared", "rival")

    async def used() -> str:
        try:
            return (await generate(rival, "shared", owner="acme", max_tokens=6)).text
        except NotFoundError:
            return ""

    assert await until(used) == "C" * 6
    await acme.revoke_grant("shared", "rival")

    async def admitted() -> bool:
        try:
            await generate(rival, "shared", owner="acme", max_tokens=1)
        except NotFoundError as error:
            assert error.message == before.value.message
            return False
        return True

    await until_not(admitted)
    assert (await generate(acme, "shared", max_tokens=6)).text == "C" * 6


async def test_a_revoked_key_is_refused_within_the_bound_and_its_streams_go_on(
    acme: Client, connect: Connect, publish: Publish
) -> None:
    await publish(acme, "D", adapter="kept")
    key = await acme.create_key(roles=["caller"])
    client = connect(key.secret)
    running = Stream(client, "kept", max_tokens=900)
    await running.first()
    await acme.revoke_key(key.key.id)

    async def admitted() -> bool:
        try:
            await generate(client, "kept", max_tokens=1)
        except UnauthenticatedError:
            return False
        return True

    await until_not(admitted)
    answer = await running.read()
    assert (answer.error, answer.text) == (None, "D" * 900)
    with pytest.raises(UnauthenticatedError):
        await client.adapters()


async def test_a_retired_version_ends_for_new_requests_and_not_for_running_ones(
    acme: Client, operator: OperatorClient, publish: Publish
) -> None:
    one = (await publish(acme, "E", adapter="ageing")).version.digest
    await publish(acme, "F", adapter="ageing", alias="stable")
    await generate(acme, "ageing", version=one, max_tokens=40)  # whole pages, which are kept
    async with conserved(operator):
        running = Stream(acme, "ageing", version=one, max_tokens=900)
        await running.first()
        await acme.retire("ageing", one)

        async def admitted() -> bool:
            try:
                await generate(acme, "ageing", version=one, max_tokens=1)
            except FailedPreconditionError:
                return False
            return True

        await until_not(admitted)
        answer = await running.read()
        assert (answer.error, answer.text) == (None, "E" * 900)

    freed = await _proof(operator, one)
    assert min(freed.device_bytes, freed.host_bytes, freed.disk_bytes, freed.kv_bytes) > 0


async def test_a_deleted_versions_bytes_are_gone_from_the_node_and_stay_gone(
    acme: Client, operator: OperatorClient, publish: Publish
) -> None:
    one = (await publish(acme, "G", adapter="leaving")).version.digest
    await publish(acme, "H", adapter="leaving", alias="stable")
    await generate(acme, "leaving", version=one, max_tokens=40)
    await acme.delete_version("leaving", one)
    freed = await _proof(operator, one)
    assert min(freed.device_bytes, freed.host_bytes, freed.disk_bytes, freed.kv_bytes) > 0
    with pytest.raises(NotFoundError):
        await generate(acme, "leaving", version=one, max_tokens=1)
    assert all(held.version != one for held in (await operator.residency()).versions)


async def _proof(operator: OperatorClient, version: str) -> admin_pb2.FreedBytes:
    """Waits until the node has let a version go by itself; returns what came free."""

    async def is_gone() -> bool:
        return all(held.version != version for held in (await operator.residency()).versions)

    await until(is_gone)
    done = await operator.unload(version)
    assert done.complete
    return done.freed


async def _serves(client: Client, adapter: str, version: str) -> bool:
    served = (await generate(client, adapter, max_tokens=1)).served
    return served is not None and served.version == version


async def _generation_is(client: Client, adapter: str, generation: int) -> bool:
    served = (await generate(client, adapter, max_tokens=1)).served
    return served is not None and served.generation == generation
