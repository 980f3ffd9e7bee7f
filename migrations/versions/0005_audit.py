"""An audit log of every write, and grants that do not tell whether a tenant exists.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_AUDITED = (
    "bases",
    "tenants",
    "keys",
    "operators",
    "nodes",
    "enrollments",
    "adapters",
    "versions",
    "aliases",
    "arms",
    "grants",
)

_TABLE = """
CREATE TABLE audit (
    tenant TEXT NOT NULL,
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    xid xid8 DEFAULT pg_current_xact_id() NOT NULL,
    actor TEXT NOT NULL,
    action TEXT NOT NULL,
    object TEXT NOT NULL,
    before JSONB,
    after JSONB,
    create_time TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_audit PRIMARY KEY (tenant, id),
    CONSTRAINT ck_audit_action CHECK (action IN ('INSERT', 'UPDATE', 'DELETE'))
);
ALTER TABLE audit ENABLE ROW LEVEL SECURITY;
ALTER TABLE audit FORCE ROW LEVEL SECURITY;
"""

# What nobody may read stays out, and so does what other rows say: a publish is told by its version, not by the counter.
_FUNCTIONS = """
CREATE FUNCTION audit_write() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp
    AS $$
    DECLARE
        hidden CONSTANT text[] := ARRAY['hash', 'previous_hash', 'report', 'num_versions'];
        was jsonb := CASE WHEN TG_OP <> 'INSERT' THEN to_jsonb(OLD) - hidden END;
        is_now jsonb := CASE WHEN TG_OP <> 'DELETE' THEN to_jsonb(NEW) - hidden END;
        either jsonb := coalesce(is_now, was);
    BEGIN
        IF was IS DISTINCT FROM is_now THEN
            INSERT INTO audit (tenant, actor, action, object, before, after) VALUES (
                coalesce(CASE WHEN TG_TABLE_NAME = 'tenants' THEN either ->> 'name' ELSE either ->> 'tenant' END, ''),
                coalesce(nullif(current_setting('app.actor', true), ''), session_user), TG_OP, TG_TABLE_NAME, was, is_now);
        END IF;
        RETURN NULL;
    END
    $$;

CREATE FUNCTION audit_stays() RETURNS trigger LANGUAGE plpgsql
    AS $$ BEGIN RAISE EXCEPTION 'the audit log is only added to'; END $$;
CREATE TRIGGER stays BEFORE UPDATE OR DELETE ON audit FOR EACH ROW EXECUTE FUNCTION audit_stays();
"""

_RIGHTS = """
GRANT SELECT ON audit TO veneer_app;
CREATE POLICY own ON audit FOR SELECT TO veneer_app USING (tenant = app_tenant() AND app_scope() = 'tenant');
CREATE POLICY operators ON audit FOR SELECT TO veneer_app USING (tenant = '' AND app_scope() = 'operator');
CREATE POLICY definer ON audit FOR INSERT TO CURRENT_USER WITH CHECK (true);

ALTER TABLE grants DROP CONSTRAINT fk_grants_grantee_tenants;
ALTER TABLE grants ADD CONSTRAINT ck_grants_grantee_name CHECK (grantee ~ '^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$');
"""

_BACK = """
ALTER TABLE grants NO FORCE ROW LEVEL SECURITY;
ALTER TABLE tenants NO FORCE ROW LEVEL SECURITY;
DELETE FROM grants g WHERE NOT EXISTS (SELECT FROM tenants t WHERE t.name = g.grantee);
ALTER TABLE grants DROP CONSTRAINT ck_grants_grantee_name;
ALTER TABLE grants ADD CONSTRAINT fk_grants_grantee_tenants FOREIGN KEY (grantee) REFERENCES tenants (name);
ALTER TABLE grants FORCE ROW LEVEL SECURITY;
ALTER TABLE tenants FORCE ROW LEVEL SECURITY;
DROP TABLE audit;
DROP FUNCTION audit_stays();
"""


def upgrade() -> None:
    """Writes are told from now on."""
    for block in (_TABLE, _FUNCTIONS, _RIGHTS):
        op.execute(block)
    for table in _AUDITED:
        op.execute(
            f"CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION audit_write()"
        )


def downgrade() -> None:
    """Removes the log, and grants to names that are no tenant's."""
    for table in _AUDITED:
        op.execute(f"DROP TRIGGER audit ON {table}")
    op.execute(_BACK)
    op.execute("DROP FUNCTION audit_write()")
