"""The server of a data plane: its two services, each on its listener, and who may call them."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry

from dataplane.access import RULES, NodeAuthenticator
from dataplane.admin import AdminServicer
from dataplane.options import server_options
from dataplane.servicer import GenerationServicer
from dataplane.settings import Settings
from veneer.dataplane.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc
from veneer.server import PlaneServer, Service


def make_server(
    settings: Settings,
    *,
    generation: GenerationServicer,
    admin: AdminServicer,
    authenticator: NodeAuthenticator,
    registry: CollectorRegistry,
) -> PlaneServer:
    """Returns the server, which does not listen yet."""
    return PlaneServer(
        server_options(settings),
        services=[
            Service(
                generation_pb2.DESCRIPTOR.services_by_name["GenerationService"],
                partial(generation_pb2_grpc.add_GenerationServiceServicer_to_server, generation),
                ("callers",),
            ),
            Service(
                admin_pb2.DESCRIPTOR.services_by_name["AdminService"],
                partial(admin_pb2_grpc.add_AdminServiceServicer_to_server, admin),
                ("operators",),
            ),
        ],
        rules=RULES,
        authenticators={"callers": authenticator, "operators": authenticator},
        registry=registry,
    )
