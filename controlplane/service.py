"""The control plane put together: use cases, servicers, listeners, relay, collector."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import Self

from prometheus_client import CollectorRegistry
from redis.exceptions import RedisError

from controlplane.aliases import Aliases
from controlplane.audit import Audit
from controlplane.bases import Bases
from controlplane.blob_grants import BlobGrants
from controlplane.blobs import Blobs
from controlplane.canaries import Canaries
from controlplane.catalog import Catalog
from controlplane.catalog_servicer import BaseServicer, CatalogServicer
from controlplane.changes import ChangeFeed
from controlplane.collector import Collector
from controlplane.conductor import Conductor
from controlplane.db import Database
from controlplane.deletion import Deletion
from controlplane.grants import Sharing
from controlplane.homes import Homes
from controlplane.identities import Identities
from controlplane.intake import JailedChecks
from controlplane.keys import ORGANIZATION_KEYS, Keys
from controlplane.locate import Locator
from controlplane.node_servicer import NodeServicer
from controlplane.node_versions import NodeVersions
from controlplane.nodes import Nodes
from controlplane.organization_servicer import OrganizationServicer
from controlplane.organizations import Organizations
from controlplane.outbox import Relay, connect
from controlplane.outcomes import Outcomes
from controlplane.placement_servicer import PlacementServicer
from controlplane.placer import Placer
from controlplane.probes import Probes
from controlplane.publish import Check, Publisher, PublishMetrics
from controlplane.quotas import QuotaLeases
from controlplane.remembered import Freshness
from controlplane.resolve import Resolver
from controlplane.rules import RULES
from controlplane.settings import Settings
from controlplane.signature_servicer import SignatureServicer
from controlplane.signatures import Signatures
from controlplane.spool import remove_abandoned
from controlplane.tenant_servicer import TenantServicer
from controlplane.tenants import Tenants
from controlplane.told import ToldAnswers
from controlplane.usage import UsageLedger
from controlplane.vault import Vault
from veneer.background import end_tasks
from veneer.controlplane.v1 import (
    bases_pb2,
    bases_pb2_grpc,
    catalog_pb2,
    catalog_pb2_grpc,
    nodes_pb2,
    nodes_pb2_grpc,
    organizations_pb2,
    organizations_pb2_grpc,
    placement_pb2,
    placement_pb2_grpc,
    signatures_pb2,
    signatures_pb2_grpc,
    tenants_pb2,
    tenants_pb2_grpc,
)
from veneer.server import PlaneServer, ServerOptions, Service, Tls


class ControlPlane:
    """One control-plane process. Owned by the event loop in which it is entered.

    Attributes:
        server: Its listeners.
        database: Its connections.
        blobs: Its object store.
        publisher: Its use case of publishing.
        relay: Its relay of hints.
        collector: Removes from the store what no version owns.
        conductor: Takes the steps of canaries.
        placer: Plans where adapters should be warm; None without Redis.
    """

    def __init__(self, settings: Settings, vault: Vault, *, check: Check | None = None) -> None:
        registry = CollectorRegistry()
        self._jail = JailedChecks() if check is None else None
        self.database = Database(settings)
        self._freshness = Freshness(self.database)
        node_versions = NodeVersions(self.database, self._freshness)
        self.relay = Relay(self.database, settings, node_versions=node_versions, registry=registry)
        url = settings.redis_url
        self._redis = None if url is None else connect(url.get_secret_value())
        self.placer = (
            None
            if self._redis is None
            else Placer(self.database, self._redis, settings, node_versions=node_versions, registry=registry)
        )
        locator = Locator(self.database, None if self._redis is None else Homes(self._redis))
        identities = Identities(self.database, vault, self._freshness)
        self.blobs = Blobs(settings.store_url)
        self.collector = Collector(self.database, self.blobs, settings, registry=registry)
        check = check or self._jail
        assert check is not None
        self.conductor = Conductor(self.database, settings, registry=registry)
        self.publisher = Publisher(self.database, self.blobs, settings, check=check, metrics=PublishMetrics(registry))
        ledger = UsageLedger(self.database, vault)
        tenants = Tenants(self.database)
        node_servicer = NodeServicer(
            nodes=Nodes(self.database, vault, settings),
            resolver=Resolver(self.database, identities, vault, self._freshness, node_versions),
            identities=identities,
            feed=ChangeFeed(self.database),
            grants=BlobGrants(
                self.database, vault, self.blobs, identities=identities, lifetime_s=settings.grant_lifetime_s, registry=registry
            ),
            blobs=self.blobs,
            quotas=QuotaLeases(self.database, vault, lifetime_s=settings.quota_lease_s),
            outcomes=Outcomes(self.database),
            usage=ledger,
            probes=Probes(self.database, settings),
        )
        services = [
            Service(
                bases_pb2.DESCRIPTOR.services_by_name["BaseService"],
                partial(bases_pb2_grpc.add_BaseServiceServicer_to_server, BaseServicer(Bases(self.database))),
            ),
            Service(
                tenants_pb2.DESCRIPTOR.services_by_name["TenantService"],
                partial(
                    tenants_pb2_grpc.add_TenantServiceServicer_to_server,
                    TenantServicer(tenants, Keys(self.database, vault), Sharing(self.database), Audit(self.database), ledger),
                ),
            ),
            Service(
                organizations_pb2.DESCRIPTOR.services_by_name["OrganizationService"],
                partial(
                    organizations_pb2_grpc.add_OrganizationServiceServicer_to_server,
                    OrganizationServicer(Organizations(self.database), Keys(self.database, vault, ORGANIZATION_KEYS), tenants),
                ),
            ),
            Service(
                catalog_pb2.DESCRIPTOR.services_by_name["CatalogService"],
                partial(
                    catalog_pb2_grpc.add_CatalogServiceServicer_to_server,
                    CatalogServicer(
                        Catalog(self.database),
                        Aliases(self.database),
                        Canaries(self.database),
                        Deletion(self.database, grace_s=settings.delete_grace_s),
                        self.publisher,
                    ),
                ),
                listeners=("callers",),
            ),
            Service(
                nodes_pb2.DESCRIPTOR.services_by_name["NodeService"],
                partial(nodes_pb2_grpc.add_NodeServiceServicer_to_server, node_servicer),
            ),
            Service(
                placement_pb2.DESCRIPTOR.services_by_name["PlacementService"],
                partial(placement_pb2_grpc.add_PlacementServiceServicer_to_server, PlacementServicer(locator)),
                listeners=("callers",),
            ),
            Service(
                signatures_pb2.DESCRIPTOR.services_by_name["SignatureService"],
                partial(
                    signatures_pb2_grpc.add_SignatureServiceServicer_to_server,
                    SignatureServicer(Signatures(self.database)),
                ),
                listeners=("callers",),
            ),
        ]
        self.server = PlaneServer(
            _options(settings),
            services=services,
            rules=RULES,
            authenticators={"callers": identities, "operators": identities},
            registry=registry,
            shortcuts={"/veneer.controlplane.v1.NodeService/Resolve": ToldAnswers(self._freshness)},
        )
        self._spool_folder = settings.spool_folder
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(remove_abandoned, self._spool_folder)
        if self._jail is not None:
            await self._jail.start()
        self._tasks = [
            asyncio.create_task(self.relay.run(), name="relay"),
            asyncio.create_task(self.collector.run(), name="collector"),
            asyncio.create_task(self.conductor.run(), name="conductor"),
        ]
        if self.placer is not None:
            self._tasks.append(asyncio.create_task(self.placer.run(), name="placer"))
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(self._tasks)
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()
        await self.relay.close()
        if self._jail is not None:
            await self._jail.close()
        if self._redis is not None:
            with contextlib.suppress(RedisError, OSError):
                await self._redis.aclose()
        await self._freshness.close()
        await self.database.close()


def _options(settings: Settings) -> ServerOptions:
    tls = None
    if settings.tls_certificate is not None and settings.tls_key is not None:
        tls = Tls(certificate=settings.tls_certificate, key=settings.tls_key)
    return ServerOptions(
        callers=settings.listen_callers,
        operators=settings.listen_operators,
        metrics=settings.listen_metrics or None,
        tls=tls,
        allow_plaintext=settings.allow_plaintext,
        reflection=settings.reflection,
        ready_file=settings.ready_file,
        drain_delay_s=settings.drain_delay_s,
        drain_grace_s=settings.drain_grace_s,
    )
