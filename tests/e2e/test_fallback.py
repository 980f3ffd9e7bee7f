"""What answers in place of a version: the whole truth table over the wire, and a version whose bytes went bad."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.conftest import Connect, Publish, Secrets
from tests.e2e.driving import aside, blobs_of, blobs_unreadable, conserved, generate, until, weights_of
from tests.e2e.markers import ANY_MARKER
from veneer.client import Client
from veneer.controlplane.v1 import catalog_pb2, tenants_pb2
from veneer.dataplane.v1 import generation_pb2 as pb
from veneer.errors import FailedPreconditionError, VeneerError
from veneer.local.stack import ALL_ROLES, LocalStack
from veneer.operator_client import OperatorClient

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.usefixtures("without_hints")]

NONE, NOT_READY, ANY = pb.FALLBACK_MODE_NONE, pb.FALLBACK_MODE_NOT_READY, pb.FALLBACK_MODE_ANY
PREVIOUS, FAIL = pb.FALLBACK_MODE_PREVIOUS, pb.FALLBACK_MODE_FAIL
_NOWHERE = "0" * 64

# What each reference gives: NONE, NOT_READY, ANY. A lower-case word is the reason with which the base answers. PREVIOUS and FAIL
# give what NONE gives, but for a version that has another before it, or that is only not loaded yet; see below.
TABLE = {
    "unknown name": ("NOT_FOUND", "NOT_FOUND", "not_found"),
    "unknown alias": ("NOT_FOUND", "NOT_FOUND", "not_found"),
    "unknown version": ("NOT_FOUND", "NOT_FOUND", "not_found"),
    "unknown owner": ("NOT_FOUND", "NOT_FOUND", "not_found"),
    "foreign name": ("NOT_FOUND", "NOT_FOUND", "not_found"),
    "foreign alias": ("NOT_FOUND", "NOT_FOUND", "not_found"),
    "foreign version": ("NOT_FOUND", "NOT_FOUND", "not_found"),
    "foreign version as one's own": ("NOT_FOUND", "NOT_FOUND", "not_found"),
    "retired": ("FAILED_PRECONDITION", "FAILED_PRECONDITION", "FAILED_PRECONDITION"),
    "lost": ("FAILED_PRECONDITION", "not_ready", "not_ready"),
    "role lacking": ("PERMISSION_DENIED", "PERMISSION_DENIED", "PERMISSION_DENIED"),
    "role lacking for the base": ("PERMISSION_DENIED", "PERMISSION_DENIED", "PERMISSION_DENIED"),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a caller sees: a status with its text, or the reason of a fallback."""

    word: str
    text: str


async def outcome(client: Client, mode: pb.FallbackMode.ValueType, **reference: Any) -> Outcome:
    try:
        answer = await generate(client, fallback=mode, max_tokens=4, request_id="same", **reference)
    except VeneerError as error:
        return Outcome(error.status, error.message)
    served = answer.served
    assert served is not None
    if served.version:
        return Outcome("before" if served.fallback else "itself", served.version)
    assert served.fallback
    assert (served.version, served.adapter, served.owner) == ("", "", "")
    assert not ANY_MARKER.search(answer.text)
    reason = pb.FallbackReason.Name(served.fallback_reason).removeprefix("FALLBACK_REASON_").lower()
    return Outcome(reason, served.SerializeToString(deterministic=True).hex())


async def test_the_base_answers_exactly_where_request_and_tenant_allow_it(
    stack: LocalStack,
    acme: Client,
    rival: Client,
    operator: OperatorClient,
    *,
    connect: Connect,
    secrets: Secrets,
    publish: Publish,
) -> None:
    strict = connect(secrets.strict)
    await operator.create_tenant("exact", fallback=tenants_pb2.FALLBACK_POLICY_EXACT)
    exact = connect((await operator.create_key(tenant="exact", roles=ALL_ROLES)).secret)
    foreign = (await publish(acme, "A", adapter="theirs")).version.digest
    found: dict[str, list[Outcome]] = {}
    for client in (rival, strict, exact):
        retired = (await publish(client, "B", adapter="mine")).version.digest
        await publish(client, "C", adapter="mine", alias="stable")
        await client.retire("mine", retired)
        lost = (await publish(client, "D", adapter="lost")).version.digest
        folder = blobs_of(stack, lost)
        folder.rename(folder.with_suffix(".lost"))
        publisher = connect((await client.create_key(roles=["publisher", "owner"])).secret)
        references: dict[str, tuple[Client, dict[str, str]]] = {
            "unknown name": (client, {"adapter": "nothere", "owner": "acme"}),
            "unknown alias": (client, {"adapter": "mine", "alias": "nothere"}),
            "unknown version": (client, {"adapter": "mine", "version": _NOWHERE}),
            "unknown owner": (client, {"adapter": "theirs", "owner": "nobody"}),
            "foreign name": (client, {"adapter": "theirs", "owner": "acme"}),
            "foreign alias": (client, {"adapter": "theirs", "owner": "acme", "alias": "stable"}),
            "foreign version": (client, {"adapter": "theirs", "owner": "acme", "version": foreign}),
            "foreign version as one's own": (client, {"adapter": "mine", "version": foreign}),
            "retired": (client, {"adapter": "mine", "version": retired}),
            "lost": (client, {"adapter": "lost"}),
            "role lacking": (publisher, {"adapter": "mine"}),
            "role lacking for the base": (publisher, {}),
        }
        assert references.keys() == TABLE.keys()
        for name, (who, reference) in references.items():
            found[name] = [await outcome(who, mode, **reference) for mode in (NONE, NOT_READY, ANY, PREVIOUS)]
            if name != "lost":  # it is only not loaded, until it was tried
                found[name].append(await outcome(who, FAIL, **reference))
        allowed = client is rival
        expected = {name: words if allowed else (words[0],) * 3 for name, words in TABLE.items()}
        assert {name: tuple(one.word for one in outcomes[:3]) for name, outcomes in found.items()} == expected
        assert {one.word for name, outcomes in found.items() for one in outcomes[3:] if one.word != TABLE[name][0]} == set()
        for name, outcomes in found.items():
            if name.startswith(("unknown", "foreign")):
                assert outcomes == found["unknown name"], name


async def test_a_version_that_loads_slowly_is_answered_by_the_base_only_if_allowed(
    stack: LocalStack, rival: Client, operator: OperatorClient, publish: Publish
) -> None:
    version = (await publish(rival, "E")).version
    async with conserved(operator):
        with blobs_unreadable(stack, version.digest):
            assert (await outcome(rival, FAIL, adapter=version.adapter)).word == "UNAVAILABLE"
            for mode in (NOT_READY, ANY):
                assert (await outcome(rival, mode, adapter=version.adapter)).word == "not_ready"
        assert (await generate(rival, version.adapter)).text == "E" * 8


async def test_the_version_before_answers_where_request_and_tenant_allow_it(
    stack: LocalStack, operator: OperatorClient, connect: Connect, publish: Publish
) -> None:
    async def of(tenant: str, policy: tenants_pb2.FallbackPolicy.ValueType) -> None:
        await operator.create_tenant(tenant, fallback=policy)  # of its own: its default changes, and is seen to for a while
        client = connect((await operator.create_key(tenant=tenant, roles=ALL_ROLES)).secret)
        name = f"moved-{tenant}"
        one = (await publish(client, "I", adapter=name, alias="stable")).version.digest
        two = (await publish(client, "J", adapter=name, alias="stable")).version.digest
        with blobs_unreadable(stack, two):
            await until(lambda: _gives(client, Outcome("before", one), {"adapter": name}))
            answer = await generate(client, name, fallback=PREVIOUS)
            assert answer.text == "I" * 8
            assert answer.served is not None
            assert (answer.served.version_number, answer.served.alias, answer.served.generation) == (1, "stable", 2)
            assert answer.served.fallback_reason == pb.FALLBACK_REASON_NOT_READY
            # A version that was named is that version.
            assert (await outcome(client, FAIL, adapter=name, version=two)).word == "UNAVAILABLE"

            await operator.set_fallback(policy, default=tenants_pb2.DEFAULT_FALLBACK_PREVIOUS, tenant=tenant)
            await until(lambda: _answers(client, name, Outcome("before", one)))
            await operator.set_fallback(policy, default=tenants_pb2.DEFAULT_FALLBACK_FAIL, tenant=tenant)
            await until(lambda: _fails_at_once(client, name))

            await client.retire(name, one)
            await until(lambda: _answers(client, name, None, PREVIOUS))

    await asyncio.gather(
        of("allows-all", tenants_pb2.FALLBACK_POLICY_ALLOWED), of("allows-nothing", tenants_pb2.FALLBACK_POLICY_FORBIDDEN)
    )


async def test_an_earlier_version_is_granted_with_its_adapter_and_gone_with_it(
    stack: LocalStack, acme: Client, rival: Client, publish: Publish
) -> None:
    one = (await publish(acme, "K", adapter="lent", alias="stable")).version.digest
    two = (await publish(acme, "L", adapter="lent", alias="stable")).version.digest
    theirs = {"adapter": "lent", "owner": "acme"}
    with blobs_unreadable(stack, two):
        assert (await outcome(rival, PREVIOUS, **theirs)).word == "NOT_FOUND"
        await acme.create_grant("lent", "rival")
        await until(lambda: _gives(rival, Outcome("before", one), theirs))
        await acme.revoke_grant("lent", "rival")
        nothing = Outcome("NOT_FOUND", "no such adapter, alias or version")
        await until(lambda: _gives(rival, nothing, theirs))


async def test_nothing_takes_the_place_of_a_version_that_is_quarantined(
    stack: LocalStack, acme: Client, publish: Publish
) -> None:
    await publish(acme, "A", adapter="spoilt", alias="stable")
    bad = (await publish(acme, "B", adapter="spoilt", alias="stable")).version.digest
    weights = weights_of(stack, bad)
    weights.write_bytes(weights.read_bytes()[:-1])
    await outcome(acme, PREVIOUS, adapter="spoilt")  # finds it out
    refused = Outcome("FAILED_PRECONDITION", "the version is quarantined")
    for mode in (NONE, NOT_READY, ANY, PREVIOUS, FAIL):
        await until(lambda: _gives(acme, refused, {"adapter": "spoilt"}, mode))  # noqa: B023


async def _gives(
    client: Client, expected: Outcome, reference: dict[str, str], mode: pb.FallbackMode.ValueType = PREVIOUS
) -> bool:
    return await outcome(client, mode, **reference) == expected


async def _answers(
    client: Client,
    adapter: str,
    expected: Outcome | None,
    mode: pb.FallbackMode.ValueType = pb.FALLBACK_MODE_UNSPECIFIED,
) -> bool:
    """Whether what comes is what is expected, in some seconds; None: no answer at all, in a second."""
    found = await outcome(client, mode, adapter=adapter, timeout_s=1.0 if expected is None else 5.0)
    return found.word in ("DEADLINE_EXCEEDED", "UNAVAILABLE") if expected is None else found == expected


async def _fails_at_once(client: Client, adapter: str) -> bool:
    found = await outcome(client, pb.FALLBACK_MODE_UNSPECIFIED, adapter=adapter)
    return found.word == "UNAVAILABLE"


@pytest.mark.parametrize("damage", ["flipped", "cut", "longer"])
async def test_a_version_whose_bytes_went_bad_is_never_served_and_quarantined(
    stack: LocalStack, acme: Client, operator: OperatorClient, publish: Publish, damage: str
) -> None:
    bad = (await publish(acme, "F", adapter=f"bad-{damage}")).version
    good = (await publish(acme, "G", adapter=f"good-{damage}")).version
    weights = weights_of(stack, bad.digest)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes({"flipped": bytes(data), "cut": weights.read_bytes()[:-1], "longer": bytes(data) + b"x"}[damage])

    async with conserved(operator):
        with pytest.raises(FailedPreconditionError):
            await generate(acme, bad.adapter)
        assert (await generate(acme, good.adapter)).text == "G" * 8

        async def state() -> bool:
            return (await acme.versions(bad.adapter))[0].state == catalog_pb2.VERSION_STATE_QUARANTINED

        await until(state)
        for mode in (NONE, NOT_READY, ANY):

            async def refused(mode: pb.FallbackMode.ValueType = mode) -> bool:
                return await outcome(acme, mode, adapter=bad.adapter) == Outcome(
                    "FAILED_PRECONDITION", "the version is quarantined"
                )

            await until(refused)
    assert all(held.version != bad.digest for held in (await operator.residency()).versions)


async def test_a_cached_image_that_went_bad_on_disk_is_fetched_again(stack: LocalStack, acme: Client, publish: Publish) -> None:
    version = (await publish(acme, "H")).version
    assert (await generate(acme, version.adapter)).text == "H" * 8
    await aside(stack.data_plane.stop)
    images = [path for path in (stack.folder / "cache" / "images").rglob("*") if version.digest in path.name]
    assert len(images) == 1
    data = bytearray(images[0].read_bytes())
    data[-1] ^= 1
    images[0].write_bytes(bytes(data))
    await aside(stack.data_plane.start)

    async def again() -> str:
        return (await generate(acme, version.adapter)).text

    assert await until(again) == "H" * 8
