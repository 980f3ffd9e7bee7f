"""Signed adapters: what its owner does not trust, or not any more, no data plane loads or keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Connect
from tests.e2e.driving import generate, until
from tests.e2e.markers import write_marker
from tests.fixtures.signing import Signer
from veneer.artifact import BaseDescription
from veneer.client import Client
from veneer.controlplane.v1 import signatures_pb2
from veneer.errors import FailedPreconditionError
from veneer.local.stack import ALL_ROLES
from veneer.operator_client import OperatorClient
from veneer.signature_file import SIGNATURE_NAME

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


async def is_refused(client: Client, adapter: str, why: str = "") -> bool:
    """Whether a request for an adapter is refused, with words in its reason."""
    try:
        await generate(client, adapter, max_tokens=1)
    except FailedPreconditionError as error:
        return why in error.message
    return False


async def test_what_is_not_signed_by_who_is_trusted_is_served_no_longer_and_comes_back_with_the_trust(
    operator: OperatorClient, connect: Connect, acme: Client, model_base: BaseDescription, tmp_path: Path
) -> None:
    await operator.create_tenant("signing")
    client = connect((await operator.create_key(tenant="signing", roles=ALL_ROLES)).secret)
    signer = Signer()
    loose = write_marker(tmp_path / "loose", model_base, "A", seed=1)
    sealed = write_marker(tmp_path / "sealed", model_base, "B", seed=2)
    other = write_marker(tmp_path / "other", model_base, "C", seed=3)
    (sealed / SIGNATURE_NAME).write_bytes(signer.sign({path.name: path.read_bytes() for path in sealed.iterdir()}))
    key = await client.trust_key("trainer", signer.pem)
    await client.publish(loose, adapter="loose", base=model_base.digest)
    published = await client.publish(sealed, adapter="sealed", base=model_base.digest)
    assert published.version.report.signature.key_name == "trainer"
    assert [(await generate(client, name, max_tokens=4)).text for name in ("loose", "sealed")] == ["AAAA", "BBBB"]

    await client.set_signature_policy(signatures_pb2.SIGNATURE_POLICY_REQUIRE)
    await until(lambda: is_refused(client, "loose", "is missing"))
    assert (await generate(client, "sealed", max_tokens=4)).text == "BBBB"
    with pytest.raises(FailedPreconditionError, match="is missing"):
        await client.publish(other, adapter="other", base=model_base.digest)

    signature = signer.sign({path.name: path.read_bytes() for path in loose.iterdir()})
    [bare] = await client.versions("loose")
    assert (await client.attach_signature("loose", bare.digest, signature)).key_name == "trainer"

    async def serves(adapter: str) -> bool:
        return not await is_refused(client, adapter)

    await until(lambda: serves("loose"))
    assert (await generate(client, "loose", max_tokens=4)).text == "AAAA"

    await client.distrust_key(key.id)
    await until(lambda: is_refused(client, "sealed", "which is not trusted"))
    assert (await generate(acme, max_tokens=4)).text, "others are not concerned"

    await client.trust_key("trainer", signer.pem)
    await until(lambda: serves("sealed"))
    assert (await generate(client, "sealed", max_tokens=4)).text == "BBBB"
