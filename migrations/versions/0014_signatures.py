"""Signatures of versions, and whom tenants trust to make them.

Revision ID: 0014
Revises: 0013
"""

from __future__ import annotations

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

_NAMES = ("signature_policies", "trusted_keys", "signatures")
_TABLES = """
CREATE TABLE signature_policies (
    tenant TEXT NOT NULL,
    policy TEXT NOT NULL,
    CONSTRAINT pk_signature_policies PRIMARY KEY (tenant),
    CONSTRAINT fk_signature_policies_tenant_tenants FOREIGN KEY (tenant) REFERENCES tenants (name),
    CONSTRAINT ck_signature_policies_policy CHECK (policy IN ('OFF', 'IF_PRESENT', 'REQUIRE'))
);

CREATE TABLE trusted_keys (
    tenant TEXT NOT NULL,
    id TEXT NOT NULL,
    name TEXT NOT NULL,
    kind TEXT NOT NULL,
    algorithm TEXT NOT NULL,
    subject TEXT NOT NULL,
    pem TEXT NOT NULL,
    create_time TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_trusted_keys PRIMARY KEY (tenant, id),
    CONSTRAINT uq_trusted_keys_tenant_name UNIQUE (tenant, name),
    CONSTRAINT fk_trusted_keys_tenant_tenants FOREIGN KEY (tenant) REFERENCES tenants (name),
    CONSTRAINT ck_trusted_keys_id CHECK (id ~ '^[0-9a-f]{64}$'),
    CONSTRAINT ck_trusted_keys_kind CHECK (kind IN ('KEY', 'CERTIFICATE'))
);

CREATE TABLE signatures (
    tenant TEXT NOT NULL,
    version TEXT NOT NULL,
    bundle BYTEA NOT NULL,
    judge_time TIMESTAMP WITH TIME ZONE NOT NULL,
    CONSTRAINT pk_signatures PRIMARY KEY (tenant, version),
    CONSTRAINT fk_signatures_tenant_version_versions
        FOREIGN KEY (tenant, version) REFERENCES versions (tenant, digest) ON DELETE CASCADE
);

ALTER TABLE versions ADD COLUMN signature JSONB;
"""

# A signature never changes; it goes with its version.
_RIGHTS = """
GRANT SELECT, INSERT, UPDATE (policy) ON signature_policies TO veneer_app;
GRANT SELECT, INSERT, DELETE ON trusted_keys TO veneer_app;
GRANT SELECT, INSERT ON signatures TO veneer_app;
"""

# The older code would load whatever is asked of signatures.
_BACK = """
ALTER TABLE signature_policies NO FORCE ROW LEVEL SECURITY;
DO $$
BEGIN
    IF EXISTS (SELECT FROM signature_policies WHERE policy <> 'OFF') THEN
        RAISE EXCEPTION 'tenants ask for signatures, which nothing would check any more; have them set their policy to off first';
    END IF;
END
$$;
ALTER TABLE requests NO FORCE ROW LEVEL SECURITY;
UPDATE requests SET answer = answer #- '{version,signature}' WHERE method = 'Publish';
DELETE FROM requests WHERE method IN ('AddTrustedKey', 'RemoveTrustedKey', 'SetSignaturePolicy')
    OR method <> 'Publish' AND answer::text LIKE '%"signature"%';
ALTER TABLE requests FORCE ROW LEVEL SECURITY;
ALTER TABLE changes NO FORCE ROW LEVEL SECURITY;
ALTER TABLE outbox NO FORCE ROW LEVEL SECURITY;
DELETE FROM changes WHERE kind = 6;
DELETE FROM outbox WHERE kind = 6;
ALTER TABLE changes FORCE ROW LEVEL SECURITY;
ALTER TABLE outbox FORCE ROW LEVEL SECURITY;
ALTER TABLE versions DROP COLUMN signature;
DROP TABLE signatures;
DROP TABLE trusted_keys;
DROP TABLE signature_policies;
"""


def upgrade() -> None:
    """Adds tables and a column; no version has a signature yet, and no tenant asks for one."""
    op.execute(_TABLES)
    op.execute(_RIGHTS)
    for table in _NAMES:
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY")
        op.execute(f"CREATE POLICY own ON {table} TO veneer_app USING (tenant = app_tenant() AND app_scope() = 'tenant')")
    for table in ("signature_policies", "trusted_keys"):
        op.execute(
            f"CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION audit_write()"
        )


def downgrade() -> None:
    """Removes them. Refused while a tenant asks for signatures."""
    op.execute(_BACK)
