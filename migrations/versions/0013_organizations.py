"""Organisations, which own tenants: their keys, ceilings over all their tenants, and a scope of row-level security.

Revision ID: 0013
Revises: 0012
"""

from __future__ import annotations

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

_TABLES = """
CREATE TABLE organizations (
    name TEXT NOT NULL,
    max_tenants BIGINT DEFAULT 0 NOT NULL,
    max_adapters BIGINT DEFAULT 0 NOT NULL,
    max_stored_bytes BIGINT DEFAULT 0 NOT NULL,
    tenant_limits JSONB DEFAULT '{}' NOT NULL,
    tenant_quotas JSONB DEFAULT '{}' NOT NULL,
    create_time TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_organizations PRIMARY KEY (name),
    CONSTRAINT ck_organizations_name CHECK (name ~ '^[a-z0-9]+(-[a-z0-9]+)*$' AND length(name) <= 30),
    CONSTRAINT ck_organizations_quotas CHECK (max_tenants >= 0 AND max_adapters >= 0 AND max_stored_bytes >= 0)
);

CREATE TABLE organization_keys (
    organization TEXT NOT NULL,
    id UUID NOT NULL,
    hash BYTEA NOT NULL,
    roles TEXT[] NOT NULL,
    label TEXT NOT NULL,
    create_time TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    expire_time TIMESTAMP WITH TIME ZONE,
    revoke_time TIMESTAMP WITH TIME ZONE,
    successor UUID,
    CONSTRAINT pk_organization_keys PRIMARY KEY (organization, id),
    CONSTRAINT uq_organization_keys_hash UNIQUE (hash),
    CONSTRAINT ck_organization_keys_roles CHECK (roles <@ ARRAY['owner', 'auditor'] AND cardinality(roles) > 0),
    CONSTRAINT fk_organization_keys_organization_organizations FOREIGN KEY (organization) REFERENCES organizations (name)
);
CREATE INDEX ix_organization_keys_organization_create_time_id ON organization_keys (organization, create_time, id);

CREATE TABLE organization_requests (
    organization TEXT NOT NULL,
    request_id TEXT NOT NULL,
    fingerprint BYTEA NOT NULL,
    create_time TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    method TEXT NOT NULL,
    answer JSONB NOT NULL,
    CONSTRAINT pk_organization_requests PRIMARY KEY (organization, request_id),
    CONSTRAINT fk_organization_requests_organization_organizations
        FOREIGN KEY (organization) REFERENCES organizations (name)
);

ALTER TABLE tenants ADD COLUMN organization TEXT;
ALTER TABLE tenants ADD CONSTRAINT fk_tenants_organization_organizations
    FOREIGN KEY (organization) REFERENCES organizations (name);
CREATE INDEX ix_tenants_organization_name ON tenants (organization, name) WHERE organization IS NOT NULL;

ALTER TABLE audit ADD COLUMN organization TEXT;
CREATE INDEX ix_audit_organization_id ON audit (organization, id) WHERE organization IS NOT NULL;
"""

# In this scope `app.tenant` names the organisation, and no policy of another scope looks at it.
_FUNCTIONS = """
CREATE FUNCTION app_organization() RETURNS text LANGUAGE sql STABLE PARALLEL SAFE
    AS $$ SELECT CASE WHEN app_scope() = 'organization' THEN app_tenant() END $$;

CREATE FUNCTION tenants_stay() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, public, pg_temp
    AS $$
    BEGIN
        IF app_scope() IS NOT NULL AND OLD.organization IS NOT NULL AND NEW.organization IS DISTINCT FROM OLD.organization THEN
            RAISE EXCEPTION 'a tenant stays with its organisation' USING ERRCODE = 'insufficient_privilege';
        END IF;
        RETURN NEW;
    END
    $$;
CREATE TRIGGER stay BEFORE UPDATE ON tenants FOR EACH ROW EXECUTE FUNCTION tenants_stay();

CREATE FUNCTION stored_in_organization(except_tenant text, except_adapter text, OUT organization text, OUT max_adapters bigint,
        OUT max_stored_bytes bigint, OUT num_adapters bigint, OUT stored_bytes bigint)
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp
    AS $$
    BEGIN
        SELECT o.name, o.max_adapters, o.max_stored_bytes INTO organization, max_adapters, max_stored_bytes
            FROM organizations o WHERE o.name = coalesce(app_organization(),
                (SELECT t.organization FROM tenants t WHERE app_scope() = 'tenant' AND t.name = app_tenant()));
        IF except_adapter IS NULL THEN
            RETURN;
        END IF;
        IF max_adapters > 0 OR app_organization() IS NOT NULL THEN
            SELECT count(*) INTO num_adapters FROM tenants t JOIN adapters a ON a.tenant = t.name
                WHERE t.organization = stored_in_organization.organization AND a.delete_time IS NULL
                    AND (a.tenant, a.name) <> (except_tenant, except_adapter);
        END IF;
        IF max_stored_bytes > 0 OR app_organization() IS NOT NULL THEN
            SELECT coalesce(sum(v.config_bytes + v.weights_bytes), 0) INTO stored_bytes
                FROM tenants t JOIN versions v ON v.tenant = t.name WHERE t.organization = stored_in_organization.organization;
        END IF;
    END
    $$;
REVOKE ALL ON FUNCTION stored_in_organization(text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION stored_in_organization(text, text) TO veneer_app;
"""

_IDENTIFY = """
CREATE OR REPLACE FUNCTION identify(wanted bytea)
    RETURNS TABLE (
        kind text, id uuid, tenant text, roles text[], expire_time timestamptz, fallback_allowed boolean, weight integer,
        max_rank_rows integer, max_arena_bytes bigint, max_host_bytes bigint)
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp
    AS $$
        SELECT 'tenant', k.id, k.tenant, k.roles, k.expire_time, t.fallback_allowed, t.weight, t.max_rank_rows, t.max_arena_bytes,
               t.max_host_bytes
            FROM keys k JOIN tenants t ON t.name = k.tenant
            WHERE k.hash = wanted AND k.revoke_time IS NULL AND (k.expire_time IS NULL OR k.expire_time > now())
        UNION ALL
        SELECT 'operator', o.id, '', ARRAY[]::text[], NULL, false, 0, 0, 0::bigint, 0::bigint
            FROM operators o WHERE o.hash = wanted AND o.revoke_time IS NULL
        UNION ALL
        SELECT 'node', n.id, '', ARRAY[]::text[], NULL, false, 0, 0, 0::bigint, 0::bigint
            FROM nodes n WHERE n.hash = wanted AND n.revoke_time IS NULL
        UNION ALL
        SELECT 'node', n.id, '', ARRAY[]::text[], n.previous_end_time, false, 0, 0, 0::bigint, 0::bigint
            FROM nodes n WHERE n.previous_hash = wanted AND n.previous_end_time > now() AND n.revoke_time IS NULL
        UNION ALL
        SELECT 'enrollment', e.id, '', ARRAY[]::text[], e.expire_time, false, 0, 0, 0::bigint, 0::bigint
            FROM enrollments e WHERE e.hash = wanted AND e.use_time IS NULL AND e.expire_time > now(){more}
    $$
"""
_ORGANIZATION_KEYS = """
        UNION ALL
        SELECT 'organization', k.id, k.organization, k.roles, k.expire_time, false, 0, 0, 0::bigint, 0::bigint
            FROM organization_keys k
            WHERE k.hash = wanted AND k.revoke_time IS NULL AND (k.expire_time IS NULL OR k.expire_time > now())"""

_AUDIT = """
CREATE OR REPLACE FUNCTION audit_write() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp
    AS $$
    DECLARE
        hidden CONSTANT text[] := ARRAY['hash', 'previous_hash', 'report', 'num_versions'];
        was jsonb := CASE WHEN TG_OP <> 'INSERT' THEN to_jsonb(OLD) - hidden END;
        is_now jsonb := CASE WHEN TG_OP <> 'DELETE' THEN to_jsonb(NEW) - hidden END;
        either jsonb := coalesce(is_now, was);
    BEGIN
        IF was IS DISTINCT FROM is_now THEN
            INSERT INTO audit (tenant, {columns}actor, action, object, before, after) VALUES (
                coalesce(CASE WHEN TG_TABLE_NAME = 'tenants' THEN either ->> 'name' ELSE either ->> 'tenant' END, ''),{values}
                coalesce(nullif(current_setting('app.actor', true), ''), session_user), TG_OP, TG_TABLE_NAME, was, is_now);
        END IF;
        RETURN NULL;
    END
    $$
"""
_OF_ORGANIZATION = """
                CASE TG_TABLE_NAME WHEN 'organizations' THEN either ->> 'name'
                    WHEN 'organization_keys' THEN either ->> 'organization' END,"""

_RIGHTS = """
GRANT SELECT, INSERT, UPDATE (max_tenants, max_adapters, max_stored_bytes, tenant_limits, tenant_quotas)
    ON organizations TO veneer_app;
GRANT SELECT (organization, id, roles, label, create_time, expire_time, revoke_time, successor), INSERT,
    UPDATE (expire_time, revoke_time, successor) ON organization_keys TO veneer_app;
GRANT SELECT, INSERT ON organization_requests TO veneer_app;
GRANT UPDATE (organization) ON tenants TO veneer_app;
GRANT SELECT (create_time), DELETE ON organization_requests TO veneer_relay;

CREATE TRIGGER only_end BEFORE UPDATE ON organization_keys FOR EACH ROW EXECUTE FUNCTION keys_only_end();
CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON organizations FOR EACH ROW EXECUTE FUNCTION audit_write();
CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON organization_keys FOR EACH ROW EXECUTE FUNCTION audit_write();
"""

_POLICIES = """
-- An organisation: itself and its keys, its tenants and what it may do with them.
CREATE POLICY own ON organizations FOR SELECT TO veneer_app USING (name = app_organization());
CREATE POLICY own ON organization_keys TO veneer_app USING (organization = app_organization());
CREATE POLICY own ON organization_requests TO veneer_app USING (organization = app_organization());
CREATE POLICY organization ON tenants FOR SELECT TO veneer_app USING (organization = app_organization());
CREATE POLICY made ON tenants FOR INSERT TO veneer_app WITH CHECK (
    organization = app_organization() AND starts_with(name, app_organization() || '--') AND weight = 1
    AND EXISTS (SELECT FROM organizations o
        WHERE o.name = app_organization() AND to_jsonb(tenants) @> (o.tenant_limits || o.tenant_quotas)));
CREATE POLICY organization ON keys TO veneer_app USING (app_organization() IS NOT NULL
    AND EXISTS (SELECT FROM tenants t WHERE t.name = keys.tenant AND t.organization = app_organization()));
CREATE POLICY organization ON changes FOR INSERT TO veneer_app WITH CHECK (app_organization() IS NOT NULL
    AND EXISTS (SELECT FROM tenants t WHERE t.name = changes.tenant AND t.organization = app_organization()));
CREATE POLICY organization ON outbox FOR INSERT TO veneer_app WITH CHECK (app_organization() IS NOT NULL
    AND EXISTS (SELECT FROM tenants t WHERE t.name = outbox.tenant AND t.organization = app_organization()));
CREATE POLICY organization ON usage FOR SELECT TO veneer_app USING (app_organization() IS NOT NULL
    AND EXISTS (SELECT FROM tenants t WHERE t.name = usage.tenant AND t.organization = app_organization()));
CREATE POLICY organization ON audit FOR SELECT TO veneer_app USING (app_organization() IS NOT NULL
    AND (organization = app_organization()
        OR EXISTS (SELECT FROM tenants t WHERE t.name = audit.tenant AND t.organization = app_organization())));

CREATE POLICY operators ON organizations TO veneer_app USING (app_scope() = 'operator');
CREATE POLICY operators ON organization_requests TO veneer_app
    USING (app_scope() = 'operator' AND request_id LIKE 'operator/%' AND length(request_id) > 128);
CREATE POLICY relay ON organization_requests TO veneer_relay USING (create_time < now() - interval '24 hours');

-- The owner's rights inside functions: `stored_in_organization` counts on behalf of a tenant or an organisation.
CREATE POLICY definer ON organizations FOR SELECT TO CURRENT_USER USING (true);
CREATE POLICY definer ON organization_keys FOR SELECT TO CURRENT_USER USING (true);
CREATE POLICY counting ON adapters FOR SELECT TO CURRENT_USER USING (app_scope() IN ('tenant', 'organization'));
CREATE POLICY counting ON versions FOR SELECT TO CURRENT_USER USING (app_scope() IN ('tenant', 'organization'));
"""

_BACK = """
ALTER TABLE organizations NO FORCE ROW LEVEL SECURITY;
DO $$
BEGIN
    IF EXISTS (SELECT FROM organizations) THEN
        RAISE EXCEPTION 'organisations would be lost with their keys and ceilings; keep a copy and remove them';
    END IF;
END
$$;
DROP POLICY counting ON versions;
DROP POLICY counting ON adapters;
DROP POLICY organization ON audit;
DROP POLICY organization ON usage;
DROP POLICY organization ON outbox;
DROP POLICY organization ON changes;
DROP POLICY organization ON keys;
DROP POLICY made ON tenants;
DROP POLICY organization ON tenants;
DROP TRIGGER stay ON tenants;
DROP FUNCTION tenants_stay();
DROP FUNCTION stored_in_organization(text, text);
DROP INDEX ix_audit_organization_id;
ALTER TABLE audit DROP COLUMN organization;
REVOKE UPDATE (organization) ON tenants FROM veneer_app;
ALTER TABLE tenants DROP COLUMN organization;
DROP TABLE organization_requests;
DROP TABLE organization_keys;
DROP TABLE organizations;
DROP FUNCTION app_organization();
"""


def upgrade() -> None:
    """Adds to what is there: tenants belong to no organisation yet, and the service of the version before goes on working."""
    op.execute(_TABLES)
    op.execute(_FUNCTIONS)
    op.execute(_IDENTIFY.replace("{more}", _ORGANIZATION_KEYS))
    op.execute(_audit(columns="organization, ", values=_OF_ORGANIZATION))
    op.execute(_RIGHTS)
    for table in ("organizations", "organization_keys", "organization_requests"):
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY")
    op.execute(_POLICIES)


def downgrade() -> None:
    """Takes it away; tenants stay. Refused while there is an organisation."""
    op.execute(_IDENTIFY.replace("{more}", ""))
    op.execute(_audit(columns="", values=""))
    op.execute(_BACK)


def _audit(*, columns: str, values: str) -> str:
    return _AUDIT.replace("{columns}", columns).replace("{values}", values)
