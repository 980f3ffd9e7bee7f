"""No version is granted whose signature does not hold where its owner asks for one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from dataplane.blob_grants import Grant, Trust, read_grant
from dataplane.signed_urls import SignedReads
from dataplane.transfer import Transfer, TransferLimits
from dataplane.trust import TrustedSource, UntrustedVersionError
from tests.dataplane.doubles import FolderSource
from tests.fixtures.adapters import make_adapter_folder
from tests.fixtures.signing import NOW, Authority, Signer
from veneer.artifact import BaseDescription
from veneer.controlplane.v1 import nodes_pb2, signatures_pb2
from veneer.errors import NotFoundError
from veneer.signature import Policy
from veneer.signature.messages import key_message, policy_value, timestamp_of


@pytest.fixture
def source(tmp_path: Path, tiny_base: BaseDescription) -> FolderSource:
    return FolderSource(make_adapter_folder(tmp_path / "adapter", tiny_base, ranks=4), base_digest=tiny_base.digest)


def ask(source: FolderSource, trust: Trust) -> TrustedSource:
    source.grant = dataclasses.replace(source.grant, trust=trust)
    return TrustedSource(source)


@pytest.mark.parametrize("policy", [Policy.IF_PRESENT, Policy.REQUIRE])
async def test_a_version_whose_signature_holds_is_granted(source: FolderSource, policy: Policy) -> None:
    signer, authority = Signer(), Authority()

    for trust in (
        Trust(policy, signer.sign(source.files), (signer.trusted,), NOW),
        Trust(policy, authority.sign(source.files), (authority.trusted,), NOW),
    ):
        assert await ask(source, trust).grant_blobs(source.version) == source.grant


async def test_what_does_not_hold_is_refused_with_the_reason(source: FolderSource, tmp_path: Path) -> None:
    signer = Signer()
    other = {**source.files, "adapter_config.json": b"{}"}
    for trust, words in (
        (Trust(Policy.REQUIRE), "is missing"),
        (Trust(Policy.REQUIRE, signer.sign(source.files), (), NOW), "is not trusted"),
        (Trust(Policy.IF_PRESENT, signer.sign(source.files), (), NOW), "is not trusted"),
        (Trust(Policy.REQUIRE, signer.sign(other), (signer.trusted,), NOW), "adapter_config.json: has the digest"),
    ):
        trusted = ask(source, trust)
        limits = TransferLimits(max_config_bytes=1 << 20, max_weights_bytes=1 << 20)
        transfer = Transfer(
            trusted,
            SignedReads(2),
            base_digest=source.grant.base_digest,
            folder=tmp_path,
            limits=limits,
            observe=lambda part, seconds: None,
        )
        with pytest.raises(UntrustedVersionError, match=words):
            await trusted.grant_blobs(source.version)
        with pytest.raises(UntrustedVersionError, match=words):
            await transfer.read(source.version, by_url=True)
    assert source.num_transfers == 0, "no byte is asked for before the signature holds"


async def test_what_is_not_asked_for_is_granted(source: FolderSource) -> None:
    for trust in (Trust(), Trust(Policy.OFF, b"no signature at all"), Trust(Policy.IF_PRESENT)):
        assert await ask(source, trust).grant_blobs(source.version) == source.grant


async def test_it_is_known_whose_versions_were_asked_for_even_those_that_were_refused(source: FolderSource) -> None:
    trusted = ask(source, Trust(Policy.REQUIRE))
    assert trusted.may_be_of("acme", source.version)
    assert trusted.may_be_of("other", source.version)
    with pytest.raises(UntrustedVersionError):
        await trusted.grant_blobs(source.version)
    assert trusted.may_be_of(source.grant.owner, source.version)
    assert not trusted.may_be_of("other", source.version)
    with pytest.raises(NotFoundError):
        await trusted.grant_blobs("0" * 64)


def test_a_grant_comes_through_its_message(source: FolderSource) -> None:
    authority, signer = Authority(), Signer()
    trust = Trust(Policy.IF_PRESENT, b"signature", (authority.trusted, signer.trusted), NOW)
    grant = dataclasses.replace(source.grant, trust=trust)
    message = nodes_pb2.GrantBlobsResponse(
        grant=grant.token,
        blobs=[nodes_pb2.Blob(name=one.name, digest=one.digest, size_bytes=one.size_bytes, url=one.url) for one in grant.blobs],
        base_digest=grant.base_digest,
        owner=grant.owner,
        trust=signatures_pb2.SignatureTrust(
            policy=policy_value(trust.policy),
            signature=trust.signature,
            keys=map(key_message, trust.keys),
            publish_time=timestamp_of(trust.time),
        ),
    )

    assert read_grant(nodes_pb2.GrantBlobsResponse.FromString(message.SerializeToString())) == grant


def test_a_control_plane_of_an_older_release_asks_for_nothing_and_one_of_a_newer_for_the_most() -> None:
    assert read_grant(nodes_pb2.GrantBlobsResponse()).trust.policy is Policy.OFF
    newer = nodes_pb2.GrantBlobsResponse(trust=signatures_pb2.SignatureTrust(policy=99))  # type: ignore[arg-type]
    assert read_grant(newer).trust.policy is Policy.REQUIRE
    assert isinstance(read_grant(newer), Grant)
