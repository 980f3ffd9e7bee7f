"""Repeated writes of operators, keys that are rotated, auditors; limits and an audit log that hold in the database itself.

Revision ID: 0007
Revises: 0006
"""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

# Identifiers of operators are longer than a tenant's can be: see `controlplane.answers`.
_ANSWERS = """
CREATE POLICY operators ON requests TO veneer_app
    USING (app_scope() = 'operator' AND request_id LIKE 'operator/%' AND length(request_id) > 128);
"""

_KEYS = """
ALTER TABLE keys ADD COLUMN successor UUID;
ALTER TABLE keys DROP CONSTRAINT ck_keys_roles;
ALTER TABLE keys ADD CONSTRAINT ck_keys_roles
    CHECK (roles <@ ARRAY['owner', 'publisher', 'caller', 'auditor'] AND cardinality(roles) > 0);
GRANT SELECT (successor), UPDATE (expire_time, successor) ON keys TO veneer_app;

CREATE FUNCTION keys_only_end() RETURNS trigger LANGUAGE plpgsql
    AS $$
    BEGIN
        IF coalesce(NEW.expire_time, 'infinity') > coalesce(OLD.expire_time, 'infinity')
                OR coalesce(NEW.revoke_time, 'infinity') > coalesce(OLD.revoke_time, 'infinity') THEN
            RAISE EXCEPTION 'a key is given no more time' USING ERRCODE = 'insufficient_privilege';
        END IF;
        RETURN NEW;
    END
    $$;
CREATE TRIGGER only_end BEFORE UPDATE ON keys FOR EACH ROW EXECUTE FUNCTION keys_only_end();
"""

_TENANTS = """
CREATE FUNCTION tenants_own() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, public, pg_temp
    AS $$
    DECLARE
        own CONSTANT text[] := ARRAY['fallback_allowed', 'previous_allowed', 'default_fallback'];
    BEGIN
        IF app_scope() = 'tenant' AND to_jsonb(NEW) - own IS DISTINCT FROM to_jsonb(OLD) - own THEN
            RAISE EXCEPTION 'a tenant changes its fallback and nothing else of its row' USING ERRCODE = 'insufficient_privilege';
        END IF;
        RETURN NEW;
    END
    $$;
CREATE TRIGGER own BEFORE UPDATE ON tenants FOR EACH ROW EXECUTE FUNCTION tenants_own();
"""

_AUDIT = """
CREATE OR REPLACE FUNCTION audit_stays() RETURNS trigger LANGUAGE plpgsql
    AS $$
    BEGIN
        IF TG_OP = 'DELETE' THEN
            IF OLD.create_time < now() - interval '30 days' THEN
                RETURN OLD;
            END IF;
        END IF;
        RAISE EXCEPTION 'the audit log is only added to';
    END
    $$;
CREATE TRIGGER stays_whole BEFORE TRUNCATE ON audit FOR EACH STATEMENT EXECUTE FUNCTION audit_stays();
CREATE INDEX ix_audit_create_time ON audit USING brin (create_time);

CREATE FUNCTION audit_trim(keep interval) RETURNS bigint
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp
    AS $$
        WITH gone AS (
            DELETE FROM audit WHERE ctid = ANY (ARRAY(
                SELECT ctid FROM audit WHERE create_time < now() - greatest(keep, interval '30 days') LIMIT 10000))
            RETURNING 1)
        SELECT count(*) FROM gone
    $$;
REVOKE ALL ON FUNCTION audit_trim(interval) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION audit_trim(interval) TO veneer_relay;
CREATE POLICY old ON audit FOR DELETE TO CURRENT_USER USING (create_time < now() - interval '30 days');
CREATE POLICY owner ON audit FOR SELECT TO CURRENT_USER USING (true);
"""

_BACK = """
DROP POLICY owner ON audit;
DROP POLICY old ON audit;
DROP FUNCTION audit_trim(interval);
DROP INDEX ix_audit_create_time;
DROP TRIGGER stays_whole ON audit;
CREATE OR REPLACE FUNCTION audit_stays() RETURNS trigger LANGUAGE plpgsql
    AS $$ BEGIN RAISE EXCEPTION 'the audit log is only added to'; END $$;

DROP TRIGGER own ON tenants;
DROP FUNCTION tenants_own();

DROP TRIGGER only_end ON keys;
DROP FUNCTION keys_only_end();
ALTER TABLE keys NO FORCE ROW LEVEL SECURITY;
DELETE FROM keys WHERE roles = ARRAY['auditor'];
UPDATE keys SET roles = array_remove(roles, 'auditor') WHERE 'auditor' = ANY (roles);
ALTER TABLE keys FORCE ROW LEVEL SECURITY;
ALTER TABLE keys DROP CONSTRAINT ck_keys_roles;
ALTER TABLE keys ADD CONSTRAINT ck_keys_roles CHECK (roles <@ ARRAY['owner', 'publisher', 'caller'] AND cardinality(roles) > 0);
REVOKE UPDATE (expire_time) ON keys FROM veneer_app;
ALTER TABLE keys DROP COLUMN successor;

DROP POLICY operators ON requests;
"""


def upgrade() -> None:
    """Adds to what is there; the service of the version before goes on working."""
    for block in (_ANSWERS, _KEYS, _TENANTS, _AUDIT):
        op.execute(block)


def downgrade() -> None:
    """Takes it away, with the role of auditors and the keys that have no other."""
    op.execute(_BACK)
