"""What requests used, as data planes report it, and how far each of their journals was taken.

Revision ID: 0009
Revises: 0008
"""

from __future__ import annotations

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_TABLES = """
CREATE TABLE usage (
    tenant TEXT NOT NULL,
    hour TIMESTAMP WITH TIME ZONE NOT NULL,
    owner TEXT NOT NULL,
    adapter TEXT NOT NULL,
    requests BIGINT NOT NULL,
    failed_requests BIGINT NOT NULL,
    prompt_tokens BIGINT NOT NULL,
    cached_tokens BIGINT NOT NULL,
    output_tokens BIGINT NOT NULL,
    CONSTRAINT pk_usage PRIMARY KEY (tenant, hour, owner, adapter),
    CONSTRAINT fk_usage_tenant_tenants FOREIGN KEY (tenant) REFERENCES tenants (name)
);

CREATE TABLE usage_journals (
    node UUID NOT NULL,
    journal TEXT NOT NULL,
    last_sequence BIGINT NOT NULL,
    update_time TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_usage_journals PRIMARY KEY (node, journal),
    CONSTRAINT fk_usage_journals_node_nodes FOREIGN KEY (node) REFERENCES nodes (id)
);
"""

# A node's transaction names the one tenant that it is about at a time, and adds to what is there.
_RIGHTS = """
GRANT SELECT, INSERT, UPDATE (requests, failed_requests, prompt_tokens, cached_tokens, output_tokens) ON usage TO veneer_app;
GRANT SELECT, INSERT, UPDATE (last_sequence, update_time) ON usage_journals TO veneer_app;
CREATE POLICY own ON usage FOR SELECT TO veneer_app USING (tenant = app_tenant() AND app_scope() = 'tenant');
CREATE POLICY nodes ON usage TO veneer_app USING (app_scope() = 'node' AND tenant = app_tenant());
CREATE POLICY nodes ON usage_journals TO veneer_app USING (app_scope() = 'node');
"""


_BACK = """
ALTER TABLE usage NO FORCE ROW LEVEL SECURITY;
DO $$
BEGIN
    IF EXISTS (SELECT FROM usage) THEN
        RAISE EXCEPTION 'the ledger of use would be lost; keep a copy of the table usage and empty it first';
    END IF;
END
$$;
DROP TABLE usage_journals;
DROP TABLE usage;
"""


def upgrade() -> None:
    """Makes the ledger."""
    op.execute(_TABLES)
    for table in ("usage", "usage_journals"):
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY")
    op.execute(_RIGHTS)


def downgrade() -> None:
    """Removes it. Refused while something is in it: data planes keep no copy of what was taken from them."""
    op.execute(_BACK)
