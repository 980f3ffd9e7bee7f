"""What a client asks of aliases and versions that are published: move, roll back, promote, freeze, retire, delete."""

from __future__ import annotations

from collections.abc import Mapping

from veneer.connection import Connection, identified, typed
from veneer.controlplane.v1 import catalog_pb2, catalog_pb2_grpc


class ReleaseCalls(Connection):
    """Moves aliases and ends versions. Owned by one event loop.

    Each write takes a `request_id`: the same again is done once and answered the same; empty makes one.
    """

    @property
    def _catalog(self) -> catalog_pb2_grpc.CatalogServiceAsyncStub:
        return catalog_pb2_grpc.CatalogServiceStub(self._channel("control"))

    async def set_alias(
        self,
        adapter: str,
        arms: Mapping[str, int],
        *,
        alias: str = "",
        expected_generation: int | None = None,
        dry_run: bool = False,
        request_id: str = "",
    ) -> catalog_pb2.Alias:
        """Points an alias at one version or at a weighted split.

        Args:
            adapter: Name of the adapter.
            arms: Weight by version digest.
            alias: Name of the alias; empty is the default one.
            expected_generation: Move only if it is still this one; None moves in any case.
            dry_run: Does nothing but say what would be done.
            request_id: Identifies this move: the same again is done once and answered the same. Empty makes one.

        Raises:
            AbortedError: The alias has moved since.
        """
        request = catalog_pb2.SetAliasRequest(
            adapter=adapter,
            alias=alias,
            arms=[catalog_pb2.Arm(version=version, weight=weight) for version, weight in arms.items()],
            expected_generation=expected_generation,
            dry_run=dry_run,
            request_id=identified(request_id),
        )
        response = await self._ask(self._catalog.SetAlias, request)
        return typed(catalog_pb2.Alias, response.alias)

    async def rollback(
        self,
        adapter: str,
        *,
        alias: str = "",
        version: str = "",
        expected_generation: int | None = None,
        dry_run: bool = False,
        request_id: str = "",
    ) -> catalog_pb2.Alias:
        """Points an alias back at the version that it served alone before its last move, or at a named earlier one."""
        request = catalog_pb2.RollbackRequest(
            adapter=adapter,
            alias=alias,
            version=version,
            expected_generation=expected_generation,
            dry_run=dry_run,
            request_id=identified(request_id),
        )
        response = await self._ask(self._catalog.Rollback, request)
        return typed(catalog_pb2.Alias, response.alias)

    async def retire(self, adapter: str, version: str, *, dry_run: bool = False, request_id: str = "") -> catalog_pb2.Version:
        """Ends a version; running requests finish on it."""
        request = catalog_pb2.RetireVersionRequest(
            adapter=adapter, version=version, dry_run=dry_run, request_id=identified(request_id)
        )
        response = await self._ask(self._catalog.RetireVersion, request)
        return typed(catalog_pb2.Version, response.version)

    async def promote(
        self,
        adapter: str,
        *,
        alias: str = "",
        source: str = "",
        version: str = "",
        expected_generation: int | None = None,
        dry_run: bool = False,
        request_id: str = "",
    ) -> catalog_pb2.Alias:
        """Gives all of an alias's traffic to the version that the alias `source` serves, or to one of its own arms."""
        request = catalog_pb2.PromoteRequest(
            adapter=adapter,
            alias=alias,
            source=source,
            version=version,
            expected_generation=expected_generation,
            dry_run=dry_run,
            request_id=identified(request_id),
        )
        response = await self._ask(self._catalog.Promote, request)
        return typed(catalog_pb2.Alias, response.alias)

    async def freeze(self, adapter: str, *, alias: str = "", frozen: bool = True, request_id: str = "") -> catalog_pb2.Alias:
        """Forbids every move of an alias, or allows them again."""
        request = catalog_pb2.FreezeAliasRequest(adapter=adapter, alias=alias, frozen=frozen, request_id=identified(request_id))
        response = await self._ask(self._catalog.FreezeAlias, request)
        return typed(catalog_pb2.Alias, response.alias)

    async def delete_version(
        self, adapter: str, version: str, *, force: bool = False, dry_run: bool = False, request_id: str = ""
    ) -> catalog_pb2.DeleteVersionResponse:
        """Deletes a version; with `force`, aliases that point at it are moved off it."""
        request = catalog_pb2.DeleteVersionRequest(
            adapter=adapter, version=version, force=force, dry_run=dry_run, request_id=identified(request_id)
        )
        return typed(catalog_pb2.DeleteVersionResponse, await self._ask(self._catalog.DeleteVersion, request))

    async def delete_adapter(
        self, adapter: str, *, force: bool = False, dry_run: bool = False, request_id: str = ""
    ) -> catalog_pb2.DeleteAdapterResponse:
        """Deletes an adapter with its versions, aliases and grants; with `force`, while it has aliases too."""
        request = catalog_pb2.DeleteAdapterRequest(
            adapter=adapter, force=force, dry_run=dry_run, request_id=identified(request_id)
        )
        return typed(catalog_pb2.DeleteAdapterResponse, await self._ask(self._catalog.DeleteAdapter, request))
