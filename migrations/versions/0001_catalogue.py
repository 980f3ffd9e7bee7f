"""Catalogue: tables, roles, row-level security.

Revision ID: 0001
Revises:

Statements are written out, not taken from the models: a migration must do the same in a year as today.
"""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Roles belong to the cluster, so another database may have made them; `python -m controlplane migrate` sets their passwords.
_ROLES = """
DO $$
DECLARE
    role_name text;
BEGIN
    FOREACH role_name IN ARRAY ARRAY['veneer_app', 'veneer_auth', 'veneer_relay'] LOOP
        BEGIN
            EXECUTE format('CREATE ROLE %I LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOBYPASSRLS', role_name);
        EXCEPTION WHEN duplicate_object OR unique_violation THEN
            NULL;
        END;
    END LOOP;
END
$$;
"""

_TABLES = """
CREATE TABLE bases (
    digest TEXT NOT NULL,
    name TEXT NOT NULL,
    family TEXT NOT NULL,
    num_layers INTEGER NOT NULL,
    modules JSONB NOT NULL,
    vocab_size BIGINT NOT NULL,
    max_context BIGINT NOT NULL,
    known_names TEXT[] NOT NULL,
    create_time TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_bases PRIMARY KEY (digest),
    CONSTRAINT uq_bases_name UNIQUE (name),
    CONSTRAINT ck_bases_digest CHECK (digest ~ '^[0-9a-f]{64}$')
);

CREATE TABLE change_floor (
    one INTEGER NOT NULL,
    xid xid8 NOT NULL,
    id BIGINT NOT NULL,
    CONSTRAINT pk_change_floor PRIMARY KEY (one),
    CONSTRAINT ck_change_floor_one CHECK (one = 1)
);

CREATE TABLE changes (
    xid xid8 DEFAULT pg_current_xact_id() NOT NULL,
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    kind INTEGER NOT NULL,
    tenant TEXT NOT NULL,
    adapter TEXT NOT NULL,
    version TEXT NOT NULL,
    generation BIGINT NOT NULL,
    create_time TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_changes PRIMARY KEY (xid, id)
);

CREATE TABLE enrollments (
    id UUID NOT NULL,
    node_name TEXT NOT NULL,
    hash BYTEA NOT NULL,
    create_time TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    expire_time TIMESTAMP WITH TIME ZONE NOT NULL,
    use_time TIMESTAMP WITH TIME ZONE,
    CONSTRAINT pk_enrollments PRIMARY KEY (id),
    CONSTRAINT uq_enrollments_hash UNIQUE (hash)
);

CREATE TABLE operators (
    id UUID NOT NULL,
    origin TEXT NOT NULL,
    hash BYTEA NOT NULL,
    create_time TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    revoke_time TIMESTAMP WITH TIME ZONE,
    CONSTRAINT pk_operators PRIMARY KEY (id),
    CONSTRAINT uq_operators_origin UNIQUE (origin),
    CONSTRAINT uq_operators_hash UNIQUE (hash)
);

CREATE TABLE outbox (
    xid xid8 DEFAULT pg_current_xact_id() NOT NULL,
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    kind INTEGER NOT NULL,
    tenant TEXT NOT NULL,
    adapter TEXT NOT NULL,
    version TEXT NOT NULL,
    generation BIGINT NOT NULL,
    create_time TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_outbox PRIMARY KEY (xid, id)
);

CREATE TABLE tenants (
    name TEXT NOT NULL,
    fallback_allowed BOOLEAN NOT NULL,
    weight INTEGER NOT NULL,
    create_time TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_tenants PRIMARY KEY (name),
    CONSTRAINT ck_tenants_name CHECK (name ~ '^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$'),
    CONSTRAINT ck_tenants_weight CHECK (weight BETWEEN 1 AND 1000)
);

CREATE TABLE adapters (
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    num_versions BIGINT NOT NULL,
    create_time TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_adapters PRIMARY KEY (tenant, name),
    CONSTRAINT ck_adapters_name CHECK (name ~ '^[a-z0-9]([a-z0-9._-]{0,98}[a-z0-9])?$'),
    CONSTRAINT fk_adapters_tenant_tenants FOREIGN KEY(tenant) REFERENCES tenants (name)
);

CREATE TABLE keys (
    tenant TEXT NOT NULL,
    id UUID NOT NULL,
    hash BYTEA NOT NULL,
    roles TEXT[] NOT NULL,
    label TEXT NOT NULL,
    create_time TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    expire_time TIMESTAMP WITH TIME ZONE,
    revoke_time TIMESTAMP WITH TIME ZONE,
    CONSTRAINT pk_keys PRIMARY KEY (tenant, id),
    CONSTRAINT uq_keys_hash UNIQUE (hash),
    CONSTRAINT ck_keys_roles CHECK (roles <@ ARRAY['owner', 'publisher', 'caller'] AND cardinality(roles) > 0),
    CONSTRAINT fk_keys_tenant_tenants FOREIGN KEY(tenant) REFERENCES tenants (name)
);

CREATE INDEX ix_keys_tenant_create_time_id ON keys (tenant, create_time, id);

CREATE TABLE nodes (
    id UUID NOT NULL,
    name TEXT NOT NULL,
    base_digest TEXT NOT NULL,
    hash BYTEA NOT NULL,
    previous_hash BYTEA,
    previous_end_time TIMESTAMP WITH TIME ZONE,
    create_time TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    revoke_time TIMESTAMP WITH TIME ZONE,
    CONSTRAINT pk_nodes PRIMARY KEY (id),
    CONSTRAINT uq_nodes_hash UNIQUE (hash),
    CONSTRAINT uq_nodes_previous_hash UNIQUE (previous_hash),
    CONSTRAINT fk_nodes_base_digest_bases FOREIGN KEY(base_digest) REFERENCES bases (digest)
);

CREATE TABLE aliases (
    tenant TEXT NOT NULL,
    adapter TEXT NOT NULL,
    name TEXT NOT NULL,
    generation BIGINT NOT NULL,
    update_time TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_aliases PRIMARY KEY (tenant, adapter, name),
    CONSTRAINT fk_aliases_tenant_adapter_adapters FOREIGN KEY(tenant, adapter) REFERENCES adapters (tenant, name),
    CONSTRAINT ck_aliases_generation CHECK (generation >= 1),
    CONSTRAINT ck_aliases_name CHECK (name ~ '^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$')
);

CREATE TABLE grants (
    tenant TEXT NOT NULL,
    adapter TEXT NOT NULL,
    grantee TEXT NOT NULL,
    create_time TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_grants PRIMARY KEY (tenant, adapter, grantee),
    CONSTRAINT fk_grants_tenant_adapter_adapters FOREIGN KEY(tenant, adapter) REFERENCES adapters (tenant, name),
    CONSTRAINT ck_grants_grantee CHECK (tenant <> grantee),
    CONSTRAINT fk_grants_grantee_tenants FOREIGN KEY(grantee) REFERENCES tenants (name)
);

CREATE INDEX ix_grants_grantee_tenant_adapter ON grants (grantee, tenant, adapter);

CREATE TABLE versions (
    tenant TEXT NOT NULL,
    digest TEXT NOT NULL,
    adapter TEXT NOT NULL,
    number BIGINT NOT NULL,
    base_digest TEXT NOT NULL,
    state TEXT NOT NULL,
    config_digest TEXT NOT NULL,
    config_bytes BIGINT NOT NULL,
    weights_digest TEXT NOT NULL,
    weights_bytes BIGINT NOT NULL,
    max_rank INTEGER NOT NULL,
    report JSONB NOT NULL,
    label TEXT NOT NULL,
    create_time TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    retire_time TIMESTAMP WITH TIME ZONE,
    CONSTRAINT pk_versions PRIMARY KEY (tenant, digest),
    CONSTRAINT uq_versions_digest UNIQUE (digest),
    CONSTRAINT uq_versions_tenant_adapter_number UNIQUE (tenant, adapter, number),
    CONSTRAINT uq_versions_tenant_adapter_digest UNIQUE (tenant, adapter, digest),
    CONSTRAINT fk_versions_tenant_adapter_adapters FOREIGN KEY(tenant, adapter) REFERENCES adapters (tenant, name),
    CONSTRAINT ck_versions_state CHECK (state IN ('READY', 'RETIRED', 'QUARANTINED')),
    CONSTRAINT ck_versions_digest CHECK (digest ~ '^[0-9a-f]{64}$'),
    CONSTRAINT ck_versions_retire_time CHECK ((state = 'RETIRED') = (retire_time IS NOT NULL)),
    CONSTRAINT fk_versions_base_digest_bases FOREIGN KEY(base_digest) REFERENCES bases (digest)
);

CREATE TABLE arms (
    tenant TEXT NOT NULL,
    adapter TEXT NOT NULL,
    alias TEXT NOT NULL,
    generation BIGINT NOT NULL,
    position INTEGER NOT NULL,
    version TEXT NOT NULL,
    weight INTEGER NOT NULL,
    CONSTRAINT pk_arms PRIMARY KEY (tenant, adapter, alias, generation, position),
    CONSTRAINT uq_arms_tenant_adapter_alias_generation_version UNIQUE (tenant, adapter, alias, generation, version),
    CONSTRAINT fk_arms_tenant_adapter_alias_aliases
        FOREIGN KEY(tenant, adapter, alias) REFERENCES aliases (tenant, adapter, name),
    CONSTRAINT fk_arms_tenant_adapter_version_versions
        FOREIGN KEY(tenant, adapter, version) REFERENCES versions (tenant, adapter, digest),
    CONSTRAINT ck_arms_weight CHECK (weight BETWEEN 1 AND 10000)
);

CREATE TABLE publish_requests (
    tenant TEXT NOT NULL,
    request_id TEXT NOT NULL,
    fingerprint BYTEA NOT NULL,
    version TEXT NOT NULL,
    alias JSONB,
    create_time TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_publish_requests PRIMARY KEY (tenant, request_id),
    CONSTRAINT fk_publish_requests_tenant_version_versions FOREIGN KEY(tenant, version) REFERENCES versions (tenant, digest),
    CONSTRAINT fk_publish_requests_tenant_tenants FOREIGN KEY(tenant) REFERENCES tenants (name)
);

CREATE TABLE reports (
    tenant TEXT NOT NULL,
    version TEXT NOT NULL,
    node UUID NOT NULL,
    fault TEXT NOT NULL,
    create_time TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_reports PRIMARY KEY (tenant, version, node),
    CONSTRAINT fk_reports_tenant_version_versions FOREIGN KEY(tenant, version) REFERENCES versions (tenant, digest),
    CONSTRAINT ck_reports_fault CHECK (fault IN ('NOT_FINITE', 'CORRUPT')),
    CONSTRAINT fk_reports_node_nodes FOREIGN KEY(node) REFERENCES nodes (id)
);

INSERT INTO change_floor (one, xid, id) VALUES (1, '0', 0);
"""

# A setting that was set in an earlier transaction of a session reads '' afterwards, one never set NULL: both mean nobody.
_FUNCTIONS = """
CREATE FUNCTION app_tenant() RETURNS text LANGUAGE sql STABLE PARALLEL SAFE
    AS $$ SELECT nullif(current_setting('app.tenant', true), '') $$;

CREATE FUNCTION app_scope() RETURNS text LANGUAGE sql STABLE PARALLEL SAFE
    AS $$ SELECT nullif(current_setting('app.scope', true), '') $$;

CREATE FUNCTION identify(wanted bytea)
    RETURNS TABLE (
        kind text, id uuid, tenant text, roles text[], expire_time timestamptz, fallback_allowed boolean, weight integer)
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp
    AS $$
        SELECT 'tenant', k.id, k.tenant, k.roles, k.expire_time, t.fallback_allowed, t.weight
            FROM keys k JOIN tenants t ON t.name = k.tenant
            WHERE k.hash = wanted AND k.revoke_time IS NULL AND (k.expire_time IS NULL OR k.expire_time > now())
        UNION ALL
        SELECT 'operator', o.id, '', ARRAY[]::text[], NULL, false, 0
            FROM operators o WHERE o.hash = wanted AND o.revoke_time IS NULL
        UNION ALL
        SELECT 'node', n.id, '', ARRAY[]::text[], NULL, false, 0
            FROM nodes n WHERE n.hash = wanted AND n.revoke_time IS NULL
        UNION ALL
        SELECT 'node', n.id, '', ARRAY[]::text[], n.previous_end_time, false, 0
            FROM nodes n WHERE n.previous_hash = wanted AND n.previous_end_time > now() AND n.revoke_time IS NULL
        UNION ALL
        SELECT 'enrollment', e.id, '', ARRAY[]::text[], e.expire_time, false, 0
            FROM enrollments e WHERE e.hash = wanted AND e.use_time IS NULL AND e.expire_time > now()
    $$;
REVOKE ALL ON FUNCTION identify(bytea) FROM PUBLIC;
"""

_RIGHTS = """
GRANT SELECT, INSERT ON bases TO veneer_app;
GRANT SELECT, INSERT ON tenants TO veneer_app;
GRANT SELECT (tenant, id, roles, label, create_time, expire_time, revoke_time) ON keys TO veneer_app;
GRANT INSERT, UPDATE (revoke_time) ON keys TO veneer_app;
GRANT SELECT, INSERT, UPDATE ON nodes TO veneer_app;
GRANT SELECT, INSERT, UPDATE (use_time) ON enrollments TO veneer_app;
GRANT SELECT, INSERT, UPDATE (num_versions) ON adapters TO veneer_app;
GRANT SELECT, INSERT, UPDATE (state, retire_time) ON versions TO veneer_app;
GRANT SELECT, INSERT, UPDATE (generation, update_time) ON aliases TO veneer_app;
GRANT SELECT, INSERT ON arms TO veneer_app;
GRANT SELECT, INSERT, DELETE ON grants TO veneer_app;
GRANT SELECT, INSERT ON publish_requests TO veneer_app;
GRANT SELECT, INSERT ON reports TO veneer_app;
GRANT INSERT ON changes, outbox TO veneer_app;

GRANT EXECUTE ON FUNCTION identify(bytea) TO veneer_auth;

GRANT SELECT, UPDATE, DELETE ON outbox TO veneer_relay;
GRANT SELECT, DELETE ON changes TO veneer_relay;
GRANT SELECT, UPDATE ON change_floor TO veneer_relay;
GRANT SELECT (create_time), DELETE ON publish_requests TO veneer_relay;
"""

_FORCED = (
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
    "publish_requests",
    "reports",
    "changes",
    "change_floor",
    "outbox",
)

_POLICIES = """
-- What a tenant owns.
CREATE POLICY own ON tenants FOR SELECT TO veneer_app USING (name = app_tenant() AND app_scope() = 'tenant');
CREATE POLICY own ON keys TO veneer_app USING (tenant = app_tenant() AND app_scope() = 'tenant');
CREATE POLICY own ON adapters TO veneer_app USING (tenant = app_tenant() AND app_scope() = 'tenant');
CREATE POLICY own ON versions TO veneer_app USING (tenant = app_tenant() AND app_scope() = 'tenant');
CREATE POLICY own ON aliases TO veneer_app USING (tenant = app_tenant() AND app_scope() = 'tenant');
CREATE POLICY own ON arms TO veneer_app USING (tenant = app_tenant() AND app_scope() = 'tenant');
CREATE POLICY own ON publish_requests TO veneer_app USING (tenant = app_tenant() AND app_scope() = 'tenant');
CREATE POLICY own ON reports TO veneer_app USING (tenant = app_tenant() AND app_scope() = 'tenant');
CREATE POLICY own ON changes FOR INSERT TO veneer_app WITH CHECK (tenant = app_tenant() AND app_scope() = 'tenant');
CREATE POLICY own ON outbox FOR INSERT TO veneer_app WITH CHECK (tenant = app_tenant() AND app_scope() = 'tenant');
CREATE POLICY own ON grants TO veneer_app USING (tenant = app_tenant() AND app_scope() = 'tenant');
CREATE POLICY received ON grants FOR SELECT TO veneer_app USING (grantee = app_tenant() AND app_scope() IN ('tenant', 'caller'));

-- What a caller may use: its own, and what was granted to it.
CREATE POLICY usable ON versions FOR SELECT TO veneer_app USING (app_scope() = 'caller' AND (
    tenant = app_tenant() OR EXISTS (SELECT FROM grants g
        WHERE g.grantee = app_tenant() AND g.tenant = versions.tenant AND g.adapter = versions.adapter)));
CREATE POLICY usable ON aliases FOR SELECT TO veneer_app USING (app_scope() = 'caller' AND (
    tenant = app_tenant() OR EXISTS (SELECT FROM grants g
        WHERE g.grantee = app_tenant() AND g.tenant = aliases.tenant AND g.adapter = aliases.adapter)));
CREATE POLICY usable ON arms FOR SELECT TO veneer_app USING (app_scope() = 'caller' AND (
    tenant = app_tenant() OR EXISTS (SELECT FROM grants g
        WHERE g.grantee = app_tenant() AND g.tenant = arms.tenant AND g.adapter = arms.adapter)));

-- Operators: tenants and nodes, no customer's adapter.
CREATE POLICY operators ON tenants TO veneer_app USING (app_scope() = 'operator');
CREATE POLICY operators ON nodes TO veneer_app USING (app_scope() = 'operator');
CREATE POLICY operators ON enrollments TO veneer_app USING (app_scope() = 'operator');

-- Data planes: versions of all tenants, read-only; nodes and enrolments, of which the use cases touch their own.
CREATE POLICY nodes ON versions FOR SELECT TO veneer_app USING (app_scope() = 'node');
CREATE POLICY nodes ON nodes TO veneer_app USING (app_scope() = 'node');
CREATE POLICY nodes ON enrollments TO veneer_app USING (app_scope() = 'node');

CREATE POLICY relay ON outbox TO veneer_relay USING (true);
CREATE POLICY relay ON changes TO veneer_relay USING (true);
CREATE POLICY relay ON change_floor TO veneer_relay USING (true);
CREATE POLICY relay ON publish_requests TO veneer_relay USING (create_time < now() - interval '24 hours');

-- The owner's rights inside `identify`, and to make the first operator.
CREATE POLICY definer ON tenants FOR SELECT TO CURRENT_USER USING (true);
CREATE POLICY definer ON keys FOR SELECT TO CURRENT_USER USING (true);
CREATE POLICY definer ON nodes FOR SELECT TO CURRENT_USER USING (true);
CREATE POLICY definer ON enrollments FOR SELECT TO CURRENT_USER USING (true);
CREATE POLICY definer ON operators TO CURRENT_USER USING (true);
"""


def upgrade() -> None:
    """Makes everything."""
    for block in (_ROLES, _TABLES, _FUNCTIONS, _RIGHTS):
        op.execute(block)
    for table in _FORCED:
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY")
    op.execute(_POLICIES)


def downgrade() -> None:
    """Removes everything but the roles, which other databases of the cluster may use."""
    for table in ("reports", "publish_requests", "arms", "aliases", "versions", "grants", "adapters", "keys", "nodes"):
        op.execute(f"DROP TABLE {table}")
    for table in ("enrollments", "operators", "outbox", "changes", "change_floor", "tenants", "bases"):
        op.execute(f"DROP TABLE {table}")
    for function in ("identify(bytea)", "app_scope()", "app_tenant()"):
        op.execute(f"DROP FUNCTION {function}")
