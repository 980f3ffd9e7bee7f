"""Tables of what tenants may still use, and used; see `controlplane.models`, of whose metadata they are part."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, DateTime, ForeignKey, PrimaryKeyConstraint, Table, Text, Uuid, func

from controlplane.models import metadata

_TIME = DateTime(timezone=True)

# Shares of tenants' quotas that nodes hold; see `controlplane.quotas`.
quota_leases = Table(
    "quota_leases",
    metadata,
    Column("tenant", Text, ForeignKey("tenants.name"), nullable=False),
    Column("node", Uuid, ForeignKey("nodes.id"), nullable=False),
    Column("requests_reserved", BigInteger, nullable=False),
    Column("tokens_reserved", BigInteger, nullable=False),
    Column("streams_reserved", BigInteger, nullable=False),
    Column("requests_wanted", BigInteger, nullable=False),
    Column("tokens_wanted", BigInteger, nullable=False),
    Column("streams_wanted", BigInteger, nullable=False),
    Column("end_time", _TIME, nullable=False),
    PrimaryKeyConstraint("tenant", "node"),
)

# What requests used; see `controlplane.usage`.
usage = Table(
    "usage",
    metadata,
    Column("tenant", Text, ForeignKey("tenants.name"), nullable=False),
    Column("hour", _TIME, nullable=False),
    Column("owner", Text, nullable=False),
    Column("adapter", Text, nullable=False),
    Column("requests", BigInteger, nullable=False),
    Column("failed_requests", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    PrimaryKeyConstraint("tenant", "hour", "owner", "adapter"),
)

# How far the journals of nodes were taken.
usage_journals = Table(
    "usage_journals",
    metadata,
    Column("node", Uuid, ForeignKey("nodes.id"), nullable=False),
    Column("journal", Text, nullable=False),
    Column("last_sequence", BigInteger, nullable=False),
    Column("update_time", _TIME, nullable=False, server_default=func.now()),
    Column("end_time", _TIME),  # since when its node has kept nothing of it
    PrimaryKeyConstraint("node", "journal"),
)
