"""When the base answers in place of an adapter: the whole truth table over the wire, and a version whose bytes went bad."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.e2e.conftest import Connect, Publish, Secrets
from tests.e2e.driving import aside, blobs_of, blobs_unreadable, conserved, generate, until
from tests.e2e.markers import ANY_MARKER
from veneer.client import Client
from veneer.controlplane.v1 import catalog_pb2
from veneer.dataplane.v1 import generation_pb2 as pb
from veneer.errors import FailedPreconditionError, VeneerError
from veneer.local.stack import LocalStack
from veneer.operator_client import OperatorClient

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.usefixtures("without_hints")]

NONE, NOT_READY, ANY = pb.FALLBACK_MODE_NONE, pb.FALLBACK_MODE_NOT_READY, pb.FALLBACK_MODE_ANY
_NOWHERE = "0" * 64

# What each reference gives: NONE, NOT_READY, ANY. A lower-case word is the reason with which the base answers.
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


async def outcome(client: Client, mode: pb.FallbackMode.ValueType, **reference: str) -> Outcome:
    try:
        answer = await generate(client, fallback=mode, max_tokens=4, request_id="same", **reference)
    except VeneerError as error:
        return Outcome(error.status, error.message)
    served = answer.served
    assert served is not None
    assert (served.fallback, served.version, served.adapter, served.owner) == (True, "", "", "")
    assert not ANY_MARKER.search(answer.text)
    reason = pb.FallbackReason.Name(served.fallback_reason).removeprefix("FALLBACK_REASON_").lower()
    return Outcome(reason, served.SerializeToString(deterministic=True).hex())


async def test_the_base_answers_exactly_where_request_and_tenant_allow_it(
    stack: LocalStack, acme: Client, rival: Client, connect: Connect, secrets: Secrets, publish: Publish
) -> None:
    strict = connect(secrets.strict)
    foreign = (await publish(acme, "A", adapter="theirs")).version.digest
    found: dict[str, list[Outcome]] = {}
    for client in (rival, strict):
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
            found[name] = [await outcome(who, mode, **reference) for mode in (NONE, NOT_READY, ANY)]
        allowed = client is rival
        expected = {name: words if allowed else (words[0],) * 3 for name, words in TABLE.items()}
        assert {name: tuple(one.word for one in outcomes) for name, outcomes in found.items()} == expected
        for name, outcomes in found.items():
            if name.startswith(("unknown", "foreign")):
                assert outcomes == found["unknown name"], name


async def test_a_version_that_loads_slowly_is_answered_by_the_base_only_if_allowed(
    stack: LocalStack, rival: Client, operator: OperatorClient, publish: Publish
) -> None:
    version = (await publish(rival, "E")).version
    async with conserved(operator):
        with blobs_unreadable(stack, version.digest):
            for mode in (NOT_READY, ANY):
                assert (await outcome(rival, mode, adapter=version.adapter)).word == "not_ready"
        assert (await generate(rival, version.adapter)).text == "E" * 8


@pytest.mark.parametrize("damage", ["flipped", "cut", "longer"])
async def test_a_version_whose_bytes_went_bad_is_never_served_and_quarantined(
    stack: LocalStack, acme: Client, operator: OperatorClient, publish: Publish, damage: str
) -> None:
    bad = (await publish(acme, "F", adapter=f"bad-{damage}")).version
    good = (await publish(acme, "G", adapter=f"good-{damage}")).version
    weights = max(blobs_of(stack, bad.digest).iterdir(), key=lambda path: path.stat().st_size)
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
