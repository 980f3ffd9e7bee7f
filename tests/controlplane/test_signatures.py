"""Whom a tenant trusts, and what that makes of signatures: at publish, and for the nodes that load."""

from __future__ import annotations

import asyncio
import datetime
import json
from typing import Any

import grpc
import pytest
from sqlalchemy import text as text_of
from sqlalchemy.exc import ProgrammingError

from controlplane import aliases
from controlplane.db import Scope
from tests.fixtures.controlplane import AUDITOR, CALLER, PUBLISHER, Client, World, adapter_files, check_here, refused
from tests.fixtures.signing import Authority, Signer
from veneer.artifact import Report
from veneer.controlplane.v1 import canaries_pb2, catalog_pb2, nodes_pb2, tenants_pb2
from veneer.controlplane.v1 import signatures_pb2 as pb

OFF, IF_PRESENT, REQUIRE = pb.SIGNATURE_POLICY_OFF, pb.SIGNATURE_POLICY_IF_PRESENT, pb.SIGNATURE_POLICY_REQUIRE
NAMES = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture
async def acme(world: World) -> Client:
    await world.base()
    return await world.tenant("acme")


def files_of(seed: int) -> dict[str, bytes]:
    files = adapter_files(seed)
    return dict(zip(NAMES, (files.config, files.weights), strict=True))


async def trust(client: Client, pem: bytes, name: str = "trainer", **fields: Any) -> pb.TrustedKey:
    return (await client.signatures.AddTrustedKey(pb.AddTrustedKeyRequest(name=name, pem=pem, **fields))).key


async def ask(client: Client, policy: int) -> None:
    await client.signatures.SetSignaturePolicy(pb.SetSignaturePolicyRequest(policy=policy))


async def grant(node: Client, version: str, *, judges: bool = True) -> nodes_pb2.GrantBlobsResponse:
    return await node.nodes.GrantBlobs(nodes_pb2.GrantBlobsRequest(version=version, judges_signatures=judges))


async def test_keys_are_added_listed_and_removed_and_every_write_is_in_the_log(world: World, acme: Client) -> None:
    signer, authority = Signer(), Authority(at=Authority.now())
    key = await trust(acme, signer.pem, request_id="once")
    assert (key.id, key.kind, key.algorithm) == (signer.trusted.id, pb.TRUSTED_KEY_KIND_KEY, "ECDSA P-256")
    assert await trust(acme, signer.pem, request_id="once") == key
    root = await trust(acme, authority.pem, "root")
    assert (root.kind, root.subject) == (pb.TRUSTED_KEY_KIND_CERTIFICATE, "CN=Root")
    for again, name in ((signer.pem, "other"), (Signer().pem, "root")):
        assert (await refused(trust(acme, again, name)))[0] == grpc.StatusCode.ALREADY_EXISTS
    await ask(acme, REQUIRE)
    listed = await acme.signatures.ListTrustedKeys(pb.ListTrustedKeysRequest())
    assert (list(listed.keys), listed.policy) == ([root, key], REQUIRE)

    removed = await acme.signatures.RemoveTrustedKey(pb.RemoveTrustedKeyRequest(id=key.id, request_id="gone"))
    assert removed.key == key
    assert await acme.signatures.RemoveTrustedKey(pb.RemoveTrustedKeyRequest(id=key.id, request_id="gone")) == removed
    code, _ = await refused(acme.signatures.RemoveTrustedKey(pb.RemoveTrustedKeyRequest(id=key.id)))
    assert code == grpc.StatusCode.NOT_FOUND

    auditor = await world.key("acme", AUDITOR)
    entries = (await auditor.tenants.ListAudit(tenants_pb2.ListAuditRequest())).entries
    written = [(one.action, one.object) for one in entries if one.object in ("trusted_keys", "signature_policies")]
    assert written == [("delete", "trusted_keys"), ("insert", "signature_policies"), *[("insert", "trusted_keys")] * 2]


async def test_a_tenant_trusts_at_most_32_and_no_private_keys(acme: Client) -> None:
    code, text = await refused(trust(acme, b"-----BEGIN " + b"PRIVATE KEY-----"))
    assert (code, "private key" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    for number in range(32):
        await trust(acme, Signer().pem, f"key-{number:02}")
    code, text = await refused(trust(acme, Signer().pem, "one more"))
    assert (code, "at most 32" in text) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
    assert len((await acme.signatures.ListTrustedKeys(pb.ListTrustedKeysRequest())).keys) == 32


async def test_what_one_tenant_trusts_is_nothing_to_another(world: World, acme: Client) -> None:
    other, signer = await world.tenant("other"), Signer()
    key = await trust(acme, signer.pem)
    await ask(acme, REQUIRE)
    listed = await other.signatures.ListTrustedKeys(pb.ListTrustedKeysRequest())
    assert (len(listed.keys), listed.policy) == (0, OFF)
    code, _ = await refused(other.signatures.RemoveTrustedKey(pb.RemoveTrustedKeyRequest(id=key.id)))
    assert code == grpc.StatusCode.NOT_FOUND
    assert await trust(other, signer.pem)
    await ask(other, IF_PRESENT)
    published = await world.publish(other, seed=1, signature=signer.sign(files_of(1)))
    assert published.version.report.signature.key_name == "trainer"


async def test_a_signature_that_holds_is_in_the_report_under_every_policy(world: World, acme: Client) -> None:
    signer, authority = Signer(), Authority(at=Authority.now())
    await trust(acme, signer.pem)
    await trust(acme, authority.pem, "root")
    for seed, policy in enumerate((OFF, IF_PRESENT, REQUIRE)):
        await ask(acme, policy)
        signature = signer.sign({**files_of(seed), "README.md": b"more"})
        published = await world.publish(acme, seed=seed, signature=signature, request_id=f"signed-{seed}")
        found = published.version.report.signature
        assert found.state == pb.SIGNATURE_STATE_VERIFIED
        assert (found.key_id, found.key_name, found.num_other_files) == (signer.trusted.id, "trainer", 1)
        assert await world.publish(acme, seed=seed, signature=signature, request_id=f"signed-{seed}") == published
        code, _ = await refused(world.publish(acme, seed=seed, request_id=f"signed-{seed}"))
        assert code == grpc.StatusCode.INVALID_ARGUMENT, "with a signature and without are two requests"
    by_certificate = await world.publish(acme, seed=9, signature=authority.sign(files_of(9)))
    assert by_certificate.version.report.signature.signer == "CN=Trainer"
    versions = (await acme.catalog.ListVersions(catalog_pb2.ListVersionsRequest(adapter="style"))).versions
    assert versions[0] == by_certificate.version


async def test_what_does_not_hold_is_refused_with_the_reason_and_nothing_is_stored(world: World, acme: Client) -> None:
    signer = Signer()
    await trust(acme, signer.pem)
    bundle = signer.bundle(files_of(1))
    bundle["verificationMaterial"] = {"certificate": {"rawBytes": "AAAA"}}
    for policy in (IF_PRESENT, REQUIRE):
        await ask(acme, policy)
        for signature, expected, words in (
            (Signer().sign(files_of(1)), grpc.StatusCode.FAILED_PRECONDITION, "which is not trusted"),
            (signer.sign(files_of(2)), grpc.StatusCode.INVALID_ARGUMENT, "has the digest"),
            (signer.sign({NAMES[0]: files_of(1)[NAMES[0]]}), grpc.StatusCode.INVALID_ARGUMENT, f"{NAMES[1]}: is not among"),
            (b"no signature", grpc.StatusCode.INVALID_ARGUMENT, "is not JSON"),
            (json.dumps(bundle).encode(), grpc.StatusCode.INVALID_ARGUMENT, "model_signing sign key"),
        ):
            code, text = await refused(world.publish(acme, seed=1, signature=signature))
            assert (code, words in text) == (expected, True), text
    code, text = await refused(world.publish(acme, seed=1))
    assert (code, "is missing" in text) == (grpc.StatusCode.FAILED_PRECONDITION, True)
    assert (await acme.catalog.ListAdapters(catalog_pb2.ListAdaptersRequest())).adapters == []


async def test_without_a_policy_what_a_signature_is_worth_is_told(world: World, acme: Client) -> None:
    published = await world.publish(acme, seed=1, signature=Signer().sign(files_of(1)))
    found = published.version.report.signature
    assert (found.state, found.reason) == (pb.SIGNATURE_STATE_UNVERIFIED, pb.SIGNATURE_REASON_UNKNOWN_KEY)
    assert "which is not trusted" in found.fault
    assert not (await world.publish(acme, seed=2)).version.report.HasField("signature")


async def test_a_node_is_told_what_it_judges_by_and_an_older_one_is_judged_for(world: World, acme: Client) -> None:
    signer, node = Signer(), await world.node()
    key = await trust(acme, signer.pem)
    signature = signer.sign(files_of(1))
    signed = (await world.publish(acme, seed=1, signature=signature)).version
    bare = (await world.publish(acme, seed=2)).version
    await ask(acme, REQUIRE)

    for version in (signed, bare):
        await world.ask(node, acme, version=version.digest)

    told = (await grant(node, signed.digest)).trust
    assert (told.policy, told.signature, [one.id for one in told.keys]) == (REQUIRE, signature, [key.id])
    age = datetime.datetime.now(datetime.UTC) - told.publish_time.ToDatetime(datetime.UTC)
    assert abs(age) < datetime.timedelta(minutes=5)
    told = (await grant(node, bare.digest)).trust
    assert (told.policy, told.signature, list(told.keys)) == (REQUIRE, b"", [])
    assert (await grant(node, signed.digest, judges=False)).grant
    code, text = await refused(grant(node, bare.digest, judges=False))
    assert (code, "is missing" in text) == (grpc.StatusCode.FAILED_PRECONDITION, True)

    await acme.signatures.RemoveTrustedKey(pb.RemoveTrustedKeyRequest(id=key.id))
    assert list((await grant(node, signed.digest)).trust.keys) == []
    code, text = await refused(grant(node, signed.digest, judges=False))
    assert (code, "which is not trusted" in text) == (grpc.StatusCode.FAILED_PRECONDITION, True)
    await ask(acme, OFF)
    assert (await grant(node, bare.digest, judges=False)).grant


async def all_changes(node: Client, cursor: str, number: int) -> list[Any]:
    """Changes since a cursor, once there are so many."""
    seen: list[Any] = []
    async with asyncio.timeout(60):
        while len(seen) < number:
            page = await node.nodes.ListChanges(nodes_pb2.ListChangesRequest(cursor=cursor))
            seen += page.changes
            cursor = page.next_cursor
    return seen


async def test_every_change_of_trust_is_in_the_feed_and_none_where_nothing_changes(world: World, acme: Client) -> None:
    node = await world.node()
    cursor = (await node.nodes.ListChanges(nodes_pb2.ListChangesRequest())).next_cursor
    key = await trust(acme, Signer().pem)
    await ask(acme, REQUIRE)
    await ask(acme, REQUIRE)
    await acme.signatures.RemoveTrustedKey(pb.RemoveTrustedKeyRequest(id=key.id))
    seen = await all_changes(node, cursor, 3)
    assert [(one.kind, one.tenant, one.version) for one in seen] == [(nodes_pb2.CHANGE_KIND_TRUST, "acme", "")] * 3


async def test_no_alias_moves_to_what_no_data_plane_would_load(
    world: World, acme: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    signer = Signer()
    await trust(acme, signer.pem)
    signatures = [signer.sign(files_of(0)), b"", signer.sign(files_of(2))]
    signed, bare, last = [
        (await world.publish(acme, seed=seed, signature=signature, alias="stable")).version.digest
        for seed, signature in enumerate(signatures)
    ]
    await ask(acme, REQUIRE)
    arms = [catalog_pb2.Arm(version=last, weight=1), catalog_pb2.Arm(version=bare, weight=1)]
    steps = [canaries_pb2.CanaryStep(weight_percent=10)]
    for call in (
        acme.catalog.SetAlias(catalog_pb2.SetAliasRequest(adapter="style", arms=arms)),
        acme.catalog.Rollback(catalog_pb2.RollbackRequest(adapter="style", version=bare)),
        acme.catalog.StartCanary(canaries_pb2.StartCanaryRequest(adapter="style", version=bare, steps=steps)),
    ):
        code, text = await refused(call)
        assert (code, bare in text, "is missing" in text) == (grpc.StatusCode.FAILED_PRECONDITION, True, True), text

    with monkeypatch.context() as patch:
        patch.setattr(aliases, "_MOST_JUDGED", 1)
        code, text = await refused(acme.catalog.Rollback(catalog_pb2.RollbackRequest(adapter="style")))
        assert (code, "of the last 1" in text) == (grpc.StatusCode.FAILED_PRECONDITION, True)
    rolled = (await acme.catalog.Rollback(catalog_pb2.RollbackRequest(adapter="style"))).alias
    assert [arm.version for arm in rolled.arms] == [signed], "the one before the unsigned one"
    await ask(acme, OFF)
    assert (await acme.catalog.Rollback(catalog_pb2.RollbackRequest(adapter="style", version=bare))).alias.generation == 5


@pytest.mark.parametrize("alias", ["", "stable"])
async def test_a_policy_that_came_while_a_version_was_checked_keeps_it_from_its_alias(
    world: World, acme: Client, monkeypatch: pytest.MonkeyPatch, alias: str
) -> None:
    async def check(*arguments: Any, **options: Any) -> Report:
        await ask(acme, REQUIRE)
        return await check_here(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(world.plane.publisher, "_check", check)
        code, text = await refused(lambda: world.publish(acme, alias=alias))
        assert (code, "is missing" in text) == (grpc.StatusCode.FAILED_PRECONDITION, True), text
    await ask(acme, OFF)
    published = await world.publish(acme, alias=alias)
    assert (published.version.number, published.alias.name, published.alias.generation) == (1, "stable", 1)


async def test_a_signature_goes_with_its_version(world: World, acme: Client) -> None:
    signer = Signer()
    await trust(acme, signer.pem)
    await ask(acme, REQUIRE)
    version = (await world.publish(acme, seed=1, signature=signer.sign(files_of(1)))).version.digest
    await acme.catalog.DeleteVersion(catalog_pb2.DeleteVersionRequest(adapter="style", version=version, force=True))
    again = await world.publish(acme, seed=1, signature=signer.sign(files_of(1)))
    assert (again.version.digest, again.version.number) == (version, 2)


async def attach(client: Client, version: str, signature: bytes, **fields: Any) -> pb.SignatureReport:
    request = pb.AttachSignatureRequest(adapter="style", version=version, signature=signature, **fields)
    return (await client.signatures.AttachSignature(request)).signature


async def test_a_version_that_was_published_gets_a_signature_and_is_granted_again(world: World, acme: Client) -> None:
    signer, node = Signer(), await world.node()
    bare = (await world.publish(acme, seed=1)).version
    await trust(acme, signer.pem)
    await ask(acme, REQUIRE)
    await world.ask(node, acme, version=bare.digest)
    code, text = await refused(grant(node, bare.digest, judges=False))
    assert (code, "is missing" in text) == (grpc.StatusCode.FAILED_PRECONDITION, True)
    code, _ = await refused(world.publish(acme, seed=1, signature=signer.sign(files_of(1))))
    assert code == grpc.StatusCode.ALREADY_EXISTS
    cursor = (await node.nodes.ListChanges(nodes_pb2.ListChangesRequest())).next_cursor

    signature = signer.sign(files_of(1))
    publisher = await world.key("acme", PUBLISHER)
    found = await attach(publisher, bare.digest, signature, request_id="once")
    assert (found.state, found.key_name) == (pb.SIGNATURE_STATE_VERIFIED, "trainer")
    told = (await grant(node, bare.digest, judges=True)).trust
    assert told.signature == signature
    assert (await grant(node, bare.digest, judges=False)).grant
    [version] = (await acme.catalog.ListVersions(catalog_pb2.ListVersionsRequest(adapter="style"))).versions
    assert version.report.signature == found
    version.report.ClearField("signature")
    assert version == bare, "nothing else of it changed"

    auditor = await world.key("acme", AUDITOR)
    entries = (await auditor.tenants.ListAudit(tenants_pb2.ListAuditRequest())).entries
    [entry] = [one for one in entries if (one.action, one.object) == ("update", "versions")]
    assert entry.actor.startswith("tenant ")
    assert json.loads(entry.before)["signature"] is None
    assert json.loads(entry.after)["signature"]["key_id"] == signer.trusted.id
    [entry] = [one for one in entries if one.object == "signatures"]
    assert (entry.action, json.loads(entry.after)["number"], "bundle" in entry.after) == ("insert", 0, False)

    for fields in ({"request_id": "once"}, {"request_id": "other"}, {}):
        assert await attach(acme, bare.digest, signature, **fields) == found
    code, _ = await refused(attach(acme, bare.digest, Signer().sign(files_of(1)), request_id="once"))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    await world.key("acme", CALLER)
    kinds = [one.kind for one in await all_changes(node, cursor, 4)]  # keys were made before, between and after
    assert kinds == [nodes_pb2.CHANGE_KIND_KEY, nodes_pb2.CHANGE_KIND_TRUST, *[nodes_pb2.CHANGE_KIND_KEY] * 2]


async def test_another_signature_takes_the_place_of_one_whose_key_is_removed(world: World, acme: Client) -> None:
    first, second, node = Signer(), Signer(), await world.node()
    key = await trust(acme, first.pem, "first")
    version = (await world.publish(acme, seed=1, signature=first.sign(files_of(1)))).version.digest
    await ask(acme, REQUIRE)
    await trust(acme, second.pem, "second")
    await acme.signatures.RemoveTrustedKey(pb.RemoveTrustedKeyRequest(id=key.id))
    await world.ask(node, acme, version=version)
    code, _ = await refused(grant(node, version, judges=False))
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert (await attach(acme, version, second.sign(files_of(1)))).key_name == "second"
    assert (await grant(node, version, judges=False)).grant


async def test_what_does_not_hold_is_attached_under_no_policy(world: World, acme: Client) -> None:
    signer, other = Signer(), await world.tenant("other")
    await trust(acme, signer.pem)
    version = (await world.publish(acme, seed=1, signature=signer.sign(files_of(1)))).version
    for policy in (OFF, REQUIRE):
        await ask(acme, policy)
        for signature, expected, words in (
            (Signer().sign(files_of(1)), grpc.StatusCode.FAILED_PRECONDITION, "which is not trusted"),
            (signer.sign(files_of(2)), grpc.StatusCode.INVALID_ARGUMENT, "has the digest"),
            (b"no signature", grpc.StatusCode.INVALID_ARGUMENT, "is not JSON"),
            (b"", grpc.StatusCode.INVALID_ARGUMENT, "signature"),
        ):
            code, text = await refused(attach(acme, version.digest, signature))
            assert (code, words in text) == (expected, True), text
    for client, digest in ((acme, "0" * 64), (other, version.digest)):
        code, _ = await refused(attach(client, digest, signer.sign(files_of(1))))
        assert code == grpc.StatusCode.NOT_FOUND
    caller = await world.key("acme", CALLER)
    code, _ = await refused(attach(caller, version.digest, signer.sign(files_of(1))))
    assert code == grpc.StatusCode.PERMISSION_DENIED
    assert (await acme.catalog.ListVersions(catalog_pb2.ListVersionsRequest(adapter="style"))).versions == [version]


async def test_a_version_has_at_most_32_signatures_and_the_service_takes_none_away(world: World, acme: Client) -> None:
    signer = Signer()
    await trust(acme, signer.pem)
    version = (await world.publish(acme, seed=1)).version.digest
    for number in range(32):  # each says something else of a file that is none of the version's
        await attach(acme, version, signer.sign({**files_of(1), "README.md": b"%d" % number}))
    told = (await acme.tenants.ListAudit(tenants_pb2.ListAuditRequest(page_size=1000))).entries
    assert sum(one.object == "signatures" for one in told) == 32, "each is told of, though the same was found of all"
    code, text = await refused(attach(acme, version, signer.sign(files_of(1))))
    assert (code, "at most 32" in text) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
    for statement in ("UPDATE signatures SET bundle = ''", "DELETE FROM signatures", "TRUNCATE signatures"):
        with pytest.raises(ProgrammingError, match="permission denied"):
            async with world.plane.database.transaction(Scope.of_tenant("acme")) as connection:
                await connection.execute(text_of(statement))
    await acme.catalog.DeleteVersion(catalog_pb2.DeleteVersionRequest(adapter="style", version=version, force=True))
    assert not (await world.publish(acme, seed=1)).version.report.HasField("signature")


async def test_callers_see_whom_their_tenant_trusts_and_change_nothing(world: World, acme: Client) -> None:
    caller = await world.key("acme", CALLER)
    await trust(acme, Signer().pem)
    assert len((await caller.signatures.ListTrustedKeys(pb.ListTrustedKeysRequest())).keys) == 1
    assert (await refused(trust(caller, Signer().pem, "mine")))[0] == grpc.StatusCode.PERMISSION_DENIED
