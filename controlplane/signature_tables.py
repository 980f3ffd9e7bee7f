"""Tables of signatures and of who is trusted to make them; see `controlplane.models`, of whose metadata they are part."""

from __future__ import annotations

from sqlalchemy import (
    CheckConstraint,
    Column,
    DateTime,
    ForeignKey,
    ForeignKeyConstraint,
    Integer,
    LargeBinary,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    func,
)

from controlplane.models import metadata

_TIME = DateTime(timezone=True)

# What tenants ask of signatures; one without a row asks nothing.
signature_policies = Table(
    "signature_policies",
    metadata,
    Column("tenant", Text, ForeignKey("tenants.name"), nullable=False),
    Column("policy", Text, nullable=False),
    PrimaryKeyConstraint("tenant"),
    CheckConstraint("policy IN ('OFF', 'IF_PRESENT', 'REQUIRE')", name="policy"),
)

trusted_keys = Table(
    "trusted_keys",
    metadata,
    Column("tenant", Text, ForeignKey("tenants.name"), nullable=False),
    Column("id", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("algorithm", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("pem", Text, nullable=False),
    Column("create_time", _TIME, nullable=False, server_default=func.now()),
    PrimaryKeyConstraint("tenant", "id"),
    UniqueConstraint("tenant", "name"),
    CheckConstraint("id ~ '^[0-9a-f]{64}$'", name="id"),
    CheckConstraint("kind IN ('KEY', 'CERTIFICATE')", name="kind"),
)

# Signatures as they came: with their versions as number 0, and later ones, of which the last counts.
# They are not in the row of a version, which is read far oftener.
signatures = Table(
    "signatures",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("version", Text, nullable=False),
    Column("number", Integer, nullable=False, server_default="0"),
    Column("bundle", LargeBinary, nullable=False),
    Column("judge_time", _TIME, nullable=False),
    PrimaryKeyConstraint("tenant", "version", "number"),
    ForeignKeyConstraint(["tenant", "version"], ["versions.tenant", "versions.digest"], ondelete="CASCADE"),
)
