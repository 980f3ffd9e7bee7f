"""What each node was asked to serve or told to stage, which is all that it may read.

Revision ID: 0021
Revises: 0020
"""

from __future__ import annotations

from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

_FORTH = """
CREATE TABLE node_versions (
    tenant TEXT NOT NULL,
    adapter TEXT NOT NULL,
    node UUID NOT NULL,
    version TEXT NOT NULL,
    use_time TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_node_versions PRIMARY KEY (tenant, adapter, node, version)
);
CREATE INDEX ix_node_versions_use_time ON node_versions (use_time);

ALTER TABLE node_versions ENABLE ROW LEVEL SECURITY;
ALTER TABLE node_versions FORCE ROW LEVEL SECURITY;
GRANT SELECT, INSERT, UPDATE (use_time) ON node_versions TO veneer_app;
GRANT SELECT, DELETE ON node_versions TO veneer_relay;
CREATE POLICY nodes ON node_versions TO veneer_app USING (app_scope() = 'node');
CREATE POLICY relay ON node_versions TO veneer_relay USING (true);

ALTER TABLE nodes ADD COLUMN reads_all_until TIMESTAMP WITH TIME ZONE DEFAULT now() + interval '1 day';
ALTER TABLE nodes ALTER COLUMN reads_all_until DROP DEFAULT;
"""

_BACK = """
ALTER TABLE nodes DROP COLUMN reads_all_until;
DROP TABLE node_versions;
"""


def upgrade() -> None:
    """Adds a table. Nodes that are enrolled read all versions of their base for a day more: in that time the table fills."""
    op.execute(_FORTH)


def downgrade() -> None:
    """Takes it away; nodes read all versions of their base again."""
    op.execute(_BACK)
