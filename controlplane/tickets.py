"""What shows that a node was told of a tenant, or of a version for it."""

from __future__ import annotations

from controlplane.vault import Vault


def ticket(vault: Vault, node_id: str, tenant: str, *version: str) -> bytes:
    """The ticket of a node for a tenant, or for a version that the tenant may use; 32 bytes. It never ends.

    Args:
        vault: Signs it.
        node_id: Who was told.
        tenant: Of which caller.
        version: Owner, adapter and digest of the version; nothing, or nothing but empty ones, for the base.
    """
    named = version if any(version) else ()
    return vault.sign("ticket", b"\0".join(part.encode() for part in (node_id, tenant, *named)))
