"""Releases: deletion and what the collector needs, freezing, labels and provenance, stored answers of every write.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

# The owner of the tables is under row-level security too, so rows are rewritten while it is not forced.
_TABLES = """
CREATE TABLE uploads (
    tenant TEXT NOT NULL,
    folder TEXT NOT NULL,
    taken BOOLEAN NOT NULL,
    collect_time TIMESTAMP WITH TIME ZONE NOT NULL,
    create_time TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_uploads PRIMARY KEY (tenant, folder)
);
CREATE INDEX ix_uploads_collect_time ON uploads (collect_time);

CREATE TABLE blob_leases (
    tenant TEXT NOT NULL,
    folder TEXT NOT NULL,
    node UUID NOT NULL,
    end_time TIMESTAMP WITH TIME ZONE NOT NULL,
    CONSTRAINT pk_blob_leases PRIMARY KEY (tenant, folder, node)
);
CREATE INDEX ix_blob_leases_end_time ON blob_leases (end_time);

CREATE TABLE leaders (
    name TEXT NOT NULL,
    epoch BIGINT NOT NULL,
    CONSTRAINT pk_leaders PRIMARY KEY (name)
);

ALTER TABLE adapters ADD COLUMN delete_time TIMESTAMP WITH TIME ZONE;
CREATE INDEX ix_adapters_tenant_name_live ON adapters (tenant, name) WHERE delete_time IS NULL;

ALTER TABLE versions
    ADD COLUMN upload UUID,
    ADD COLUMN labels JSONB DEFAULT '{}' NOT NULL,
    ADD COLUMN training_run TEXT DEFAULT '' NOT NULL,
    ADD COLUMN data_digest TEXT DEFAULT '' NOT NULL;

ALTER TABLE aliases ADD COLUMN frozen BOOLEAN DEFAULT false NOT NULL;
CREATE INDEX ix_arms_tenant_adapter_version ON arms (tenant, adapter, version);

ALTER TABLE publish_requests NO FORCE ROW LEVEL SECURITY;
ALTER TABLE versions NO FORCE ROW LEVEL SECURITY;
ALTER TABLE publish_requests RENAME TO requests;
ALTER TABLE requests RENAME CONSTRAINT pk_publish_requests TO pk_requests;
ALTER TABLE requests RENAME CONSTRAINT fk_publish_requests_tenant_tenants TO fk_requests_tenant_tenants;
ALTER TABLE requests DROP CONSTRAINT fk_publish_requests_tenant_version_versions;
ALTER TABLE requests ADD COLUMN method TEXT DEFAULT 'Publish' NOT NULL, ADD COLUMN answer JSONB;
UPDATE requests r SET answer = jsonb_build_object('alias', r.alias, 'version', (
    SELECT jsonb_build_object(
        'digest', v.digest, 'owner', v.tenant, 'adapter', v.adapter, 'number', v.number, 'base_digest', v.base_digest,
        'state', v.state, 'size_bytes', v.config_bytes + v.weights_bytes, 'report', v.report, 'label', v.label,
        'create_time', v.create_time, 'retire_time', v.retire_time, 'labels', v.labels, 'training_run', '', 'data_digest', '')
    FROM versions v WHERE v.tenant = r.tenant AND v.digest = r.version));
ALTER TABLE requests ALTER COLUMN answer SET NOT NULL, DROP COLUMN version, DROP COLUMN alias;
ALTER TABLE requests FORCE ROW LEVEL SECURITY;
ALTER TABLE versions FORCE ROW LEVEL SECURITY;
"""

_RIGHTS = """
GRANT UPDATE (delete_time) ON adapters TO veneer_app;
GRANT DELETE ON versions, arms, reports TO veneer_app;
GRANT UPDATE (frozen) ON aliases TO veneer_app;
GRANT SELECT, INSERT, UPDATE (collect_time), DELETE ON uploads TO veneer_app;
GRANT SELECT, INSERT, UPDATE (end_time) ON blob_leases TO veneer_app;

GRANT SELECT, UPDATE (taken, collect_time), DELETE ON uploads TO veneer_relay;
GRANT SELECT, DELETE ON blob_leases TO veneer_relay;
GRANT SELECT, INSERT, UPDATE ON leaders TO veneer_relay;
"""

_POLICIES = """
CREATE POLICY own ON uploads TO veneer_app USING (tenant = app_tenant() AND app_scope() = 'tenant');
CREATE POLICY own ON blob_leases TO veneer_app USING (tenant = app_tenant() AND app_scope() = 'tenant');
CREATE POLICY relay ON uploads TO veneer_relay USING (true);
CREATE POLICY relay ON blob_leases TO veneer_relay USING (true);
CREATE POLICY relay ON leaders TO veneer_relay USING (true);
"""

_BACK = """
ALTER TABLE requests NO FORCE ROW LEVEL SECURITY;
ALTER TABLE versions NO FORCE ROW LEVEL SECURITY;
DO $$
BEGIN
    IF EXISTS (SELECT FROM versions WHERE upload IS NOT NULL) THEN
        RAISE EXCEPTION 'versions were published whose files the older code would not find; delete them first';
    END IF;
END
$$;
ALTER TABLE requests ADD COLUMN version TEXT, ADD COLUMN alias JSONB;
UPDATE requests SET version = answer -> 'version' ->> 'digest', alias = nullif(answer -> 'alias', 'null');
DELETE FROM requests r WHERE method <> 'Publish'
    OR NOT EXISTS (SELECT FROM versions v WHERE v.tenant = r.tenant AND v.digest = r.version);
ALTER TABLE requests ALTER COLUMN version SET NOT NULL, DROP COLUMN answer, DROP COLUMN method;
ALTER TABLE requests ADD CONSTRAINT fk_publish_requests_tenant_version_versions
    FOREIGN KEY (tenant, version) REFERENCES versions (tenant, digest);
ALTER TABLE requests RENAME CONSTRAINT fk_requests_tenant_tenants TO fk_publish_requests_tenant_tenants;
ALTER TABLE requests RENAME CONSTRAINT pk_requests TO pk_publish_requests;
ALTER TABLE requests RENAME TO publish_requests;
ALTER TABLE publish_requests FORCE ROW LEVEL SECURITY;
ALTER TABLE versions FORCE ROW LEVEL SECURITY;

DROP INDEX ix_arms_tenant_adapter_version;
ALTER TABLE aliases DROP COLUMN frozen;
ALTER TABLE versions DROP COLUMN upload, DROP COLUMN labels, DROP COLUMN training_run, DROP COLUMN data_digest;
ALTER TABLE adapters DROP COLUMN delete_time;
REVOKE DELETE ON versions, arms, reports FROM veneer_app;
DROP TABLE leaders;
DROP TABLE blob_leases;
DROP TABLE uploads;
"""


def upgrade() -> None:
    """Adds tables and columns; what was published stays where it lies."""
    op.execute(_TABLES)
    op.execute(_RIGHTS)
    for table in ("uploads", "blob_leases", "leaders"):
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY")
    op.execute(_POLICIES)


def downgrade() -> None:
    """Takes them away. Refused while there are versions published since: the older code would not find their files."""
    op.execute(_BACK)
