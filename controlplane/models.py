"""Tables of the catalogue. The migrations make them; a test compares the two.

The tenant's name is its key: it is unique, never changes and is never given to another. The tenant column leads every key and
index of a tenant table, and row-level security is forced on every table but `bases` (see docs/adr and the first migration).
"""

from __future__ import annotations

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    ForeignKey,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import UserDefinedType


class Xid8(UserDefinedType[str]):
    """A transaction number that never wraps; as text in Python."""

    cache_ok = True

    def get_col_spec(self, **_: object) -> str:
        """Name of the type in Postgres."""
        return "xid8"


metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

_TIME = DateTime(timezone=True)


def _created() -> Column[object]:
    return Column("create_time", _TIME, nullable=False, server_default=func.now())


bases = Table(
    "bases",
    metadata,
    Column("digest", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("family", Text, nullable=False),
    Column("num_layers", Integer, nullable=False),
    Column("modules", JSONB, nullable=False),
    Column("vocab_size", BigInteger, nullable=False),
    Column("max_context", BigInteger, nullable=False),
    Column("known_names", ARRAY(Text), nullable=False),
    Column("edge_digests", JSONB(none_as_null=True)),  # null of bases that were registered before they were kept
    Column("chat_contents", Text, nullable=False, server_default="text"),
    Column("chat_fault", Text),
    Column("eos_ids", ARRAY(BigInteger)),
    _created(),
    UniqueConstraint("name"),
    CheckConstraint("digest ~ '^[0-9a-f]{64}$'", name="digest"),
    CheckConstraint("chat_contents IN ('text', 'tokens')", name="chat_contents"),
)

tenants = Table(
    "tenants",
    metadata,
    Column("name", Text, primary_key=True),
    Column("fallback_allowed", Boolean, nullable=False),
    Column("weight", Integer, nullable=False),
    _created(),
    Column("max_rank_rows", Integer, nullable=False, server_default="0"),
    Column("max_arena_bytes", BigInteger, nullable=False, server_default="0"),
    Column("max_host_bytes", BigInteger, nullable=False, server_default="0"),
    Column("previous_allowed", Boolean, nullable=False, server_default="true"),
    Column("default_fallback", Text, nullable=False, server_default="NONE"),
    Column("max_requests_per_minute", BigInteger, nullable=False, server_default="0"),
    Column("max_tokens_per_minute", BigInteger, nullable=False, server_default="0"),
    Column("max_streams", BigInteger, nullable=False, server_default="0"),
    Column("max_adapters", BigInteger, nullable=False, server_default="0"),
    Column("max_stored_bytes", BigInteger, nullable=False, server_default="0"),
    Column("organization", Text, ForeignKey("organizations.name")),  # see `controlplane.organization_tables`
    CheckConstraint("name ~ '^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$'", name="name"),
    CheckConstraint("weight BETWEEN 1 AND 1000", name="weight"),
    CheckConstraint("max_rank_rows >= 0 AND max_arena_bytes >= 0 AND max_host_bytes >= 0", name="limits"),
    CheckConstraint(
        "max_requests_per_minute >= 0 AND max_tokens_per_minute >= 0 AND max_streams >= 0 AND max_adapters >= 0"
        " AND max_stored_bytes >= 0",
        name="quotas",
    ),
    CheckConstraint("default_fallback IN ('NONE', 'NOT_READY', 'ANY', 'PREVIOUS', 'FAIL')", name="default_fallback"),
    CheckConstraint("previous_allowed OR NOT fallback_allowed", name="previous_allowed"),
    CheckConstraint(
        "(fallback_allowed OR default_fallback NOT IN ('NOT_READY', 'ANY'))"
        " AND (previous_allowed OR default_fallback <> 'PREVIOUS')",
        name="default_allowed",
    ),
    Index("ix_tenants_organization_name", "organization", "name", postgresql_where=text("organization IS NOT NULL")),
)

keys = Table(
    "keys",
    metadata,
    Column("tenant", Text, ForeignKey("tenants.name"), nullable=False),
    Column("id", Uuid, nullable=False),
    Column("hash", LargeBinary, nullable=False),
    Column("roles", ARRAY(Text), nullable=False),
    Column("label", Text, nullable=False),
    _created(),
    Column("expire_time", _TIME),
    Column("revoke_time", _TIME),
    Column("successor", Uuid),
    PrimaryKeyConstraint("tenant", "id"),
    UniqueConstraint("hash"),
    CheckConstraint("roles <@ ARRAY['owner', 'publisher', 'caller', 'auditor'] AND cardinality(roles) > 0", name="roles"),
    Index("ix_keys_tenant_create_time_id", "tenant", "create_time", "id"),
    implicit_returning=False,  # the application may not read it back
)

operators = Table(
    "operators",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("origin", Text, nullable=False),
    Column("hash", LargeBinary, nullable=False),
    _created(),
    Column("revoke_time", _TIME),
    UniqueConstraint("origin"),
    UniqueConstraint("hash"),
)

nodes = Table(
    "nodes",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("name", Text, nullable=False),
    Column("base_digest", Text, ForeignKey("bases.digest"), nullable=False),
    Column("hash", LargeBinary, nullable=False),
    Column("previous_hash", LargeBinary),
    Column("previous_end_time", _TIME),
    _created(),
    Column("revoke_time", _TIME),
    Column("reads_all_until", _TIME),  # of nodes that were enrolled before `node_versions` was kept
    UniqueConstraint("hash"),
    UniqueConstraint("previous_hash"),
)

enrollments = Table(
    "enrollments",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("node_name", Text, nullable=False),
    Column("hash", LargeBinary, nullable=False),
    _created(),
    Column("expire_time", _TIME, nullable=False),
    Column("use_time", _TIME),
    UniqueConstraint("hash"),
)

adapters = Table(
    "adapters",
    metadata,
    Column("tenant", Text, ForeignKey("tenants.name"), nullable=False),
    Column("name", Text, nullable=False),
    Column("num_versions", BigInteger, nullable=False),
    _created(),
    Column("delete_time", _TIME),
    PrimaryKeyConstraint("tenant", "name"),
    CheckConstraint("name ~ '^[a-z0-9]([a-z0-9._-]{0,98}[a-z0-9])?$'", name="name"),
    Index("ix_adapters_tenant_name_live", "tenant", "name", postgresql_where=text("delete_time IS NULL")),
)

versions = Table(
    "versions",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("digest", Text, nullable=False),
    Column("adapter", Text, nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("base_digest", Text, ForeignKey("bases.digest"), nullable=False),
    Column("state", Text, nullable=False),
    Column("config_digest", Text, nullable=False),
    Column("config_bytes", BigInteger, nullable=False),
    Column("weights_digest", Text, nullable=False),
    Column("weights_bytes", BigInteger, nullable=False),
    Column("max_rank", Integer, nullable=False),
    Column("report", JSONB, nullable=False),
    Column("label", Text, nullable=False),
    _created(),
    Column("retire_time", _TIME),
    Column("upload", Uuid),  # part of the name of its folder in the store; versions of the first layout have none
    Column("labels", JSONB, nullable=False, server_default="{}"),
    Column("training_run", Text, nullable=False, server_default=""),
    Column("data_digest", Text, nullable=False, server_default=""),
    Column("probe", JSONB(none_as_null=True)),
    Column("signature", JSONB(none_as_null=True)),
    PrimaryKeyConstraint("tenant", "digest"),
    UniqueConstraint("digest"),
    UniqueConstraint("tenant", "adapter", "number"),
    UniqueConstraint("tenant", "adapter", "digest"),
    ForeignKeyConstraint(["tenant", "adapter"], ["adapters.tenant", "adapters.name"]),
    CheckConstraint("state IN ('READY', 'RETIRED', 'QUARANTINED')", name="state"),
    CheckConstraint("digest ~ '^[0-9a-f]{64}$'", name="digest"),
    CheckConstraint("(state = 'RETIRED') = (retire_time IS NOT NULL)", name="retire_time"),
)

aliases = Table(
    "aliases",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("adapter", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("update_time", _TIME, nullable=False, server_default=func.now()),
    Column("frozen", Boolean, nullable=False, server_default=text("false")),
    PrimaryKeyConstraint("tenant", "adapter", "name"),
    ForeignKeyConstraint(["tenant", "adapter"], ["adapters.tenant", "adapters.name"]),
    CheckConstraint("generation >= 1", name="generation"),
    CheckConstraint("name ~ '^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$'", name="name"),
)

# The arms of every generation that an alias ever had: those of the present one are served, the older ones are its history.
arms = Table(
    "arms",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("adapter", Text, nullable=False),
    Column("alias", Text, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("position", Integer, nullable=False),
    Column("version", Text, nullable=False),
    Column("weight", Integer, nullable=False),
    Column("points", ARRAY(Integer)),  # see `controlplane.splits`; null of an arm that is alone, and of splits of before
    PrimaryKeyConstraint("tenant", "adapter", "alias", "generation", "position"),
    UniqueConstraint("tenant", "adapter", "alias", "generation", "version"),
    ForeignKeyConstraint(["tenant", "adapter", "alias"], ["aliases.tenant", "aliases.adapter", "aliases.name"]),
    ForeignKeyConstraint(["tenant", "adapter", "version"], ["versions.tenant", "versions.adapter", "versions.digest"]),
    CheckConstraint("weight BETWEEN 1 AND 10000", name="weight"),
    Index("ix_arms_tenant_adapter_version", "tenant", "adapter", "version"),
)

grants = Table(
    "grants",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("adapter", Text, nullable=False),
    Column("grantee", Text, nullable=False),  # of a tenant, or of none: who gives it is not to learn which
    _created(),
    PrimaryKeyConstraint("tenant", "adapter", "grantee"),
    ForeignKeyConstraint(["tenant", "adapter"], ["adapters.tenant", "adapters.name"]),
    CheckConstraint("tenant <> grantee", name="grantee"),
    CheckConstraint("grantee ~ '^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$'", name="grantee_name"),
    Index("ix_grants_grantee_tenant_adapter", "grantee", "tenant", "adapter"),
)

# Answers of writes by the caller's own identifier of each; see `controlplane.answers`.
requests = Table(
    "requests",
    metadata,
    Column("tenant", Text, ForeignKey("tenants.name"), nullable=False),
    Column("request_id", Text, nullable=False),
    Column("fingerprint", LargeBinary, nullable=False),
    _created(),
    Column("method", Text, nullable=False, server_default="Publish"),
    Column("answer", JSONB, nullable=False),
    PrimaryKeyConstraint("tenant", "request_id"),
)

# Folders of the store that no version owns: an upload that is not published yet or never was, and what a deleted version left.
uploads = Table(
    "uploads",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("folder", Text, nullable=False),
    Column("taken", Boolean, nullable=False),
    Column("collect_time", _TIME, nullable=False),
    _created(),
    PrimaryKeyConstraint("tenant", "folder"),
    Index("ix_uploads_collect_time", "collect_time"),
)

# Nodes that may still read a folder.
blob_leases = Table(
    "blob_leases",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("folder", Text, nullable=False),
    Column("node", Uuid, nullable=False),
    Column("end_time", _TIME, nullable=False),
    PrimaryKeyConstraint("tenant", "folder", "node"),
    Index("ix_blob_leases_end_time", "end_time"),
)

# Versions that a node was asked to serve or told to stage; see `controlplane.node_versions`.
node_versions = Table(
    "node_versions",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("adapter", Text, nullable=False),
    Column("node", Uuid, nullable=False),
    Column("version", Text, nullable=False),
    Column("use_time", _TIME, nullable=False, server_default=func.now()),
    PrimaryKeyConstraint("tenant", "adapter", "node", "version"),
    Index("ix_node_versions_use_time", "use_time"),
)

# Terms of the jobs that one process at a time does; see `controlplane.leader`.
leaders = Table(
    "leaders",
    metadata,
    Column("name", Text, primary_key=True),
    Column("epoch", BigInteger, nullable=False),
)

reports = Table(
    "reports",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("version", Text, nullable=False),
    Column("node", Uuid, ForeignKey("nodes.id"), nullable=False),
    Column("fault", Text, nullable=False),
    _created(),
    PrimaryKeyConstraint("tenant", "version", "node"),
    ForeignKeyConstraint(["tenant", "version"], ["versions.tenant", "versions.digest"]),
    CheckConstraint("fault IN ('NOT_FINITE', 'CORRUPT')", name="fault"),
)

changes = Table(
    "changes",
    metadata,
    Column("xid", Xid8, nullable=False, server_default=func.pg_current_xact_id()),
    Column("id", BigInteger, Identity(always=True), nullable=False),
    Column("kind", Integer, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("adapter", Text, nullable=False),
    Column("version", Text, nullable=False),
    Column("generation", BigInteger, nullable=False),
    _created(),
    PrimaryKeyConstraint("xid", "id"),
    implicit_returning=False,  # the application may not read it back
)

# Position up to which changes were removed: a cursor below it cannot be followed.
change_floor = Table(
    "change_floor",
    metadata,
    Column("one", Integer, primary_key=True, autoincrement=False),
    Column("xid", Xid8, nullable=False),
    Column("id", BigInteger, nullable=False),
    CheckConstraint("one = 1", name="one"),
)

outbox = Table(
    "outbox",
    metadata,
    Column("xid", Xid8, nullable=False, server_default=func.pg_current_xact_id()),
    Column("id", BigInteger, Identity(always=True), nullable=False),
    Column("kind", Integer, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("adapter", Text, nullable=False),
    Column("version", Text, nullable=False),
    Column("generation", BigInteger, nullable=False),
    _created(),
    PrimaryKeyConstraint("xid", "id"),
    implicit_returning=False,  # the application may not read it back
)

# Written by triggers of the database.
audit = Table(
    "audit",
    metadata,
    Column("tenant", Text, nullable=False),
    Column("id", BigInteger, Identity(always=True), nullable=False),
    Column("xid", Xid8, nullable=False, server_default=func.pg_current_xact_id()),
    Column("actor", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("object", Text, nullable=False),
    Column("before", JSONB),
    Column("after", JSONB),
    _created(),
    Column("organization", Text),  # of rows that are an organisation's
    PrimaryKeyConstraint("tenant", "id"),
    CheckConstraint("action IN ('INSERT', 'UPDATE', 'DELETE')", name="action"),
    Index("ix_audit_create_time", "create_time", postgresql_using="brin"),
    Index("ix_audit_organization_id", "organization", "id", postgresql_where=text("organization IS NOT NULL")),
)
