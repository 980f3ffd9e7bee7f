"""Tables of organisations; see `controlplane.models`, of whose metadata they are part."""

from __future__ import annotations

from sqlalchemy import (
    ARRAY,
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    ForeignKey,
    Index,
    LargeBinary,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    func,
)
from sqlalchemy.dialects.postgresql import JSONB

from controlplane.models import metadata

_TIME = DateTime(timezone=True)

# Each with the ceilings over its tenants, and what the tenants may use that it makes.
organizations = Table(
    "organizations",
    metadata,
    Column("name", Text, primary_key=True),
    Column("max_tenants", BigInteger, nullable=False, server_default="0"),
    Column("max_adapters", BigInteger, nullable=False, server_default="0"),
    Column("max_stored_bytes", BigInteger, nullable=False, server_default="0"),
    Column("tenant_limits", JSONB, nullable=False, server_default="{}"),
    Column("tenant_quotas", JSONB, nullable=False, server_default="{}"),
    Column("create_time", _TIME, nullable=False, server_default=func.now()),
    CheckConstraint("name ~ '^[a-z0-9]+(-[a-z0-9]+)*$' AND length(name) <= 30", name="name"),
    CheckConstraint("max_tenants >= 0 AND max_adapters >= 0 AND max_stored_bytes >= 0", name="quotas"),
)

organization_keys = Table(
    "organization_keys",
    metadata,
    Column("organization", Text, ForeignKey("organizations.name"), nullable=False),
    Column("id", Uuid, nullable=False),
    Column("hash", LargeBinary, nullable=False),
    Column("roles", ARRAY(Text), nullable=False),
    Column("label", Text, nullable=False),
    Column("create_time", _TIME, nullable=False, server_default=func.now()),
    Column("expire_time", _TIME),
    Column("revoke_time", _TIME),
    Column("successor", Uuid),
    PrimaryKeyConstraint("organization", "id"),
    UniqueConstraint("hash"),
    CheckConstraint("roles <@ ARRAY['owner', 'auditor'] AND cardinality(roles) > 0", name="roles"),
    Index("ix_organization_keys_organization_create_time_id", "organization", "create_time", "id"),
    implicit_returning=False,  # the application may not read it back
)

# Answers of an organisation's writes; see `controlplane.answers`.
organization_requests = Table(
    "organization_requests",
    metadata,
    Column("organization", Text, ForeignKey("organizations.name"), nullable=False),
    Column("request_id", Text, nullable=False),
    Column("fingerprint", LargeBinary, nullable=False),
    Column("create_time", _TIME, nullable=False, server_default=func.now()),
    Column("method", Text, nullable=False),
    Column("answer", JSONB, nullable=False),
    PrimaryKeyConstraint("organization", "request_id"),
)
