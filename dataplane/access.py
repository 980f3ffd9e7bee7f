"""Who may call what of a data plane, and whose credential it is."""

from __future__ import annotations

from dataplane.catalog_client import CatalogClient
from veneer.access import Authenticator, Identity, Rule, Rules, current_peer
from veneer.errors import UnauthenticatedError
from veneer.key_lookups import KeyLookups

RULES: Rules = {
    # Whose key it is the control plane says, together with what the reference means: one call instead of two.
    "/veneer.dataplane.v1.GenerationService/Generate": Rule.of("bearer"),
    "/veneer.dataplane.v1.AdminService/GetResidency": Rule.of("operator"),
    "/veneer.dataplane.v1.AdminService/WatchResidency": Rule.of("operator"),
    "/veneer.dataplane.v1.AdminService/UnloadVersion": Rule.of("operator"),
    "/veneer.dataplane.v1.AdminService/PinVersion": Rule.of("operator"),
    "/veneer.dataplane.v1.AdminService/UnpinVersion": Rule.of("operator"),
    "/veneer.dataplane.v1.AdminService/ListPins": Rule.of("operator"),
    "/veneer.dataplane.v1.AdminService/Drain": Rule.of("operator"),
}


class NodeAuthenticator(Authenticator):
    """Asks the control plane whose credential it is."""

    def __init__(self, client: CatalogClient) -> None:
        self._client = client
        self._lookups = KeyLookups()

    async def authenticate(self, key_digest: bytes) -> Identity | None:
        """See `veneer.access.Authenticator`."""
        try:
            found = await self._lookups.look_up(key_digest, lambda: self._client.introspect(key_digest), peer=current_peer())
        except UnauthenticatedError:
            return None
        if found.kind not in ("tenant", "operator", "node"):
            return None
        return Identity(
            kind=found.kind,  # type: ignore[arg-type]
            key_digest=key_digest,
            key_id=found.key_id,
            tenant=found.tenant,
            roles=frozenset(found.roles),
        )
