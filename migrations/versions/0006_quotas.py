"""Quotas: what a tenant may use at most in all, and the shares of them that nodes hold.

Revision ID: 0006
Revises: 0005
"""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_QUOTAS = ("max_requests_per_minute", "max_tokens_per_minute", "max_streams", "max_adapters", "max_stored_bytes")

_TABLE = """
CREATE TABLE quota_leases (
    tenant TEXT NOT NULL,
    node UUID NOT NULL,
    requests_reserved BIGINT NOT NULL,
    tokens_reserved BIGINT NOT NULL,
    streams_reserved BIGINT NOT NULL,
    requests_wanted BIGINT NOT NULL,
    tokens_wanted BIGINT NOT NULL,
    streams_wanted BIGINT NOT NULL,
    end_time TIMESTAMP WITH TIME ZONE NOT NULL,
    CONSTRAINT pk_quota_leases PRIMARY KEY (tenant, node),
    CONSTRAINT fk_quota_leases_tenant_tenants FOREIGN KEY (tenant) REFERENCES tenants (name),
    CONSTRAINT fk_quota_leases_node_nodes FOREIGN KEY (node) REFERENCES nodes (id)
);
ALTER TABLE quota_leases ENABLE ROW LEVEL SECURITY;
ALTER TABLE quota_leases FORCE ROW LEVEL SECURITY;
"""

# A node's transaction names the one tenant that it is about.
_RIGHTS = """
GRANT SELECT, INSERT, UPDATE, DELETE ON quota_leases TO veneer_app;
CREATE POLICY nodes ON quota_leases TO veneer_app USING (app_scope() = 'node' AND tenant = app_tenant());
CREATE POLICY nodes ON tenants FOR SELECT TO veneer_app USING (app_scope() = 'node' AND name = app_tenant());
"""

# Beside `identify`, whose columns the version before goes on reading.
_FUNCTION = """
CREATE FUNCTION quotas_of(wanted text) RETURNS TABLE (
        max_requests_per_minute bigint, max_tokens_per_minute bigint, max_streams bigint, max_adapters bigint,
        max_stored_bytes bigint)
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp
    AS $$
        SELECT t.max_requests_per_minute, t.max_tokens_per_minute, t.max_streams, t.max_adapters, t.max_stored_bytes
        FROM tenants t WHERE t.name = wanted
    $$;
REVOKE ALL ON FUNCTION quotas_of(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION quotas_of(text) TO veneer_auth;
"""


# Row level security would hide the rows from an owner who is no superuser.
_REFUSE = f"""
ALTER TABLE tenants NO FORCE ROW LEVEL SECURITY;
DO $$
BEGIN
    IF EXISTS (SELECT FROM tenants WHERE {" OR ".join(f"{name} > 0" for name in _QUOTAS)}) THEN
        RAISE EXCEPTION 'tenants have quotas, which would be lost; set them to 0 first';
    END IF;
END
$$;
ALTER TABLE tenants FORCE ROW LEVEL SECURITY;
"""


def upgrade() -> None:
    """Gives tenants quotas, of which none has any yet."""
    columns = ", ".join(f"ADD COLUMN {name} BIGINT DEFAULT 0 NOT NULL" for name in _QUOTAS)
    check = " AND ".join(f"{name} >= 0" for name in _QUOTAS)
    op.execute(f"ALTER TABLE tenants {columns}, ADD CONSTRAINT ck_tenants_quotas CHECK ({check})")
    op.execute(f"GRANT UPDATE ({', '.join(_QUOTAS)}) ON tenants TO veneer_app")
    for block in (_TABLE, _RIGHTS, _FUNCTION):
        op.execute(block)


def downgrade() -> None:
    """Takes them away. Refused while a tenant has one."""
    op.execute(_REFUSE)
    op.execute("DROP FUNCTION quotas_of(text)")
    op.execute("DROP POLICY nodes ON tenants")
    op.execute("DROP TABLE quota_leases")
    op.execute(f"REVOKE UPDATE ({', '.join(_QUOTAS)}) ON tenants FROM veneer_app")
    op.execute(f"ALTER TABLE tenants {', '.join(f'DROP COLUMN {name}' for name in _QUOTAS)}")
