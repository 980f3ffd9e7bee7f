"""An organisation's key from a new tenant to its bill, with nothing of any other tenant on the way."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Connect, Publish
from tests.e2e.driving import generate, until
from veneer.controlplane.v1 import tenants_pb2
from veneer.errors import NotFoundError, UnauthenticatedError
from veneer.local.stack import ALL_ROLES, LocalStack
from veneer.operator_client import OperatorClient
from veneer.organization_client import OrganizationClient

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


async def test_it_makes_a_tenant_that_serves_reads_its_use_and_ends_its_key(
    stack: LocalStack, operator: OperatorClient, connect: Connect, publish: Publish
) -> None:
    await operator.create_organization("fleet")
    secret = (await operator.create_organization_key(roles=["owner", "auditor"], organization="fleet")).secret
    async with OrganizationClient(control=stack.state.control, key=secret, timeout_s=60.0) as fleet:
        await fleet.create_tenant("fleet--boats")
        key = await fleet.create_key(roles=ALL_ROLES, tenant="fleet--boats")
        boats = connect(key.secret)
        await publish(boats, "A", adapter="sails")
        answer = await generate(boats, "sails", max_tokens=3)
        assert answer.finish is not None

        async def is_told() -> list[tenants_pb2.Usage]:
            return [one for one in await fleet.usage(tenant="fleet--boats") if one.adapter == "sails"]

        [used] = await until(is_told)
        assert used.output_tokens == 3
        assert (await fleet.organization()).use.num_adapters == 1
        with pytest.raises(NotFoundError):
            await fleet.usage(tenant="acme")
        with pytest.raises(UnauthenticatedError):
            await generate(connect(secret))

        await fleet.revoke_key(key.key.id, tenant="fleet--boats")

        async def is_refused() -> bool:
            try:
                await generate(boats, "sails", max_tokens=1)
            except UnauthenticatedError:
                return True
            return False

        await until(is_refused)
