"""Signatures that come after their versions.

Revision ID: 0015
Revises: 0014
"""

from __future__ import annotations

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

_ADD = """
ALTER TABLE signatures ADD COLUMN number INTEGER DEFAULT 0 NOT NULL;
ALTER TABLE signatures DROP CONSTRAINT pk_signatures;
ALTER TABLE signatures ADD CONSTRAINT pk_signatures PRIMARY KEY (tenant, version, number);
GRANT UPDATE (signature) ON versions TO veneer_app;
CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON signatures FOR EACH ROW EXECUTE FUNCTION audit_write();
"""

# A signature is told of without its bytes.
_AUDIT = """
CREATE OR REPLACE FUNCTION audit_write() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp
    AS $$
    DECLARE
        hidden CONSTANT text[] := ARRAY['hash', 'previous_hash', 'report', 'num_versions'{more}];
        was jsonb := CASE WHEN TG_OP <> 'INSERT' THEN to_jsonb(OLD) - hidden END;
        is_now jsonb := CASE WHEN TG_OP <> 'DELETE' THEN to_jsonb(NEW) - hidden END;
        either jsonb := coalesce(is_now, was);
    BEGIN
        IF was IS DISTINCT FROM is_now THEN
            INSERT INTO audit (tenant, organization, actor, action, object, before, after) VALUES (
                coalesce(CASE WHEN TG_TABLE_NAME = 'tenants' THEN either ->> 'name' ELSE either ->> 'tenant' END, ''),
                CASE TG_TABLE_NAME WHEN 'organizations' THEN either ->> 'name'
                    WHEN 'organization_keys' THEN either ->> 'organization' END,
                coalesce(nullif(current_setting('app.actor', true), ''), session_user), TG_OP, TG_TABLE_NAME, was, is_now);
        END IF;
        RETURN NULL;
    END
    $$
"""

# The older code knows one signature a version: the last one goes on counting.
_BACK = """
DROP TRIGGER audit ON signatures;
REVOKE UPDATE (signature) ON versions FROM veneer_app;
ALTER TABLE requests NO FORCE ROW LEVEL SECURITY;
DELETE FROM requests WHERE method = 'AttachSignature';
ALTER TABLE requests FORCE ROW LEVEL SECURITY;
ALTER TABLE signatures NO FORCE ROW LEVEL SECURITY;
DELETE FROM signatures s WHERE EXISTS (SELECT FROM signatures later
    WHERE later.tenant = s.tenant AND later.version = s.version AND later.number > s.number);
ALTER TABLE signatures FORCE ROW LEVEL SECURITY;
ALTER TABLE signatures DROP CONSTRAINT pk_signatures;
ALTER TABLE signatures ADD CONSTRAINT pk_signatures PRIMARY KEY (tenant, version);
ALTER TABLE signatures DROP COLUMN number;
"""


def upgrade() -> None:
    """Lets a version have several; those that are there are the first of theirs."""
    op.execute(_AUDIT.replace("{more}", ", 'bundle'"))
    op.execute(_ADD)


def downgrade() -> None:
    """Leaves each version its last one."""
    op.execute(_BACK)
    op.execute(_AUDIT.replace("{more}", ""))
