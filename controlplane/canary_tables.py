"""Tables of canaries; see `controlplane.models`, of whose metadata they are part."""

from __future__ import annotations

from sqlalchemy import (
    ARRAY,
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    PrimaryKeyConstraint,
    Table,
    Text,
    Uuid,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from controlplane.models import metadata

_TIME = DateTime(timezone=True)

# Versions on their way to an alias's whole traffic, by the generation of the first step.
canaries = Table(
    "canaries",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("adapter", Text, nullable=False),
    Column("alias", Text, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("version", Text, nullable=False),
    Column("stable", Text, nullable=False),
    Column("steps", JSONB, nullable=False),
    Column("step", Integer, nullable=False),
    Column("state", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("step_time", _TIME, nullable=False, server_default=func.now()),
    Column("end_time", _TIME),
    Column("create_time", _TIME, nullable=False, server_default=func.now()),
    PrimaryKeyConstraint("tenant", "adapter", "alias", "generation"),
    ForeignKeyConstraint(["tenant", "adapter", "alias"], ["aliases.tenant", "aliases.adapter", "aliases.name"]),
    CheckConstraint("state IN ('RUNNING', 'PROMOTED', 'ROLLED_BACK', 'STOPPED')", name="state"),
    CheckConstraint("(state = 'RUNNING') = (end_time IS NULL)", name="end_time"),
    Index("ix_canaries_running", "tenant", "adapter", "alias", unique=True, postgresql_where=text("state = 'RUNNING'")),
)

# A step that has begun, by its generation: how requests of both versions ended, and the windows of that which were
# weighed, each with what it said.
canary_steps = Table(
    "canary_steps",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("adapter", Text, nullable=False),
    Column("alias", Text, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("canary", BigInteger, nullable=False),
    Column("version_ok", BigInteger, nullable=False, server_default="0"),
    Column("version_failed", BigInteger, nullable=False, server_default="0"),
    Column("stable_ok", BigInteger, nullable=False, server_default="0"),
    Column("stable_failed", BigInteger, nullable=False, server_default="0"),
    Column("windows", JSONB, nullable=False, server_default="[]"),
    Column("weighed", ARRAY(BigInteger), nullable=False, server_default="{0,0,0,0}"),  # read by processes of revision 0015
    Column("evidence", ARRAY(Double), nullable=False, server_default="{0,0,0,0,0,0}"),  # by these too
    PrimaryKeyConstraint("tenant", "adapter", "alias", "generation"),
    ForeignKeyConstraint(
        ["tenant", "adapter", "alias", "canary"],
        ["canaries.tenant", "canaries.adapter", "canaries.alias", "canaries.generation"],
        ondelete="CASCADE",
    ),
    Index("ix_canary_steps_tenant_adapter_alias_canary", "tenant", "adapter", "alias", "canary"),
)

# The last batch of counts that was added, by start of a node's process.
outcome_batches = Table(
    "outcome_batches",
    metadata,
    Column("node", Uuid, ForeignKey("nodes.id"), nullable=False),
    Column("epoch", Uuid, nullable=False),
    Column("sequence", BigInteger, nullable=False),
    Column("update_time", _TIME, nullable=False, server_default=func.now()),
    PrimaryKeyConstraint("node", "epoch"),
)
