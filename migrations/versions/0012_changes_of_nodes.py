"""The change feed tells of changes to nodes' keys.

Revision ID: 0012
Revises: 0011
"""

from __future__ import annotations

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

# A trigger, so that processes of the release before tell of it too. A new node changes nothing that anyone remembers.
_ADD = """
CREATE FUNCTION nodes_changed() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp
    AS $$
    BEGIN
        INSERT INTO changes (kind, tenant, adapter, version, generation) VALUES (1000, '', OLD.id::text, '', 0);
        RETURN NULL;
    END
    $$;
REVOKE ALL ON FUNCTION nodes_changed() FROM PUBLIC;
CREATE POLICY definer ON changes FOR INSERT TO CURRENT_USER WITH CHECK (kind = 1000);
CREATE TRIGGER feed AFTER UPDATE OR DELETE ON nodes FOR EACH ROW EXECUTE FUNCTION nodes_changed();
"""
_BACK = """
DROP TRIGGER feed ON nodes;
DROP POLICY definer ON changes;
DROP FUNCTION nodes_changed();
ALTER TABLE changes NO FORCE ROW LEVEL SECURITY;
DELETE FROM changes WHERE kind = 1000;
ALTER TABLE changes FORCE ROW LEVEL SECURITY;
"""


def upgrade() -> None:
    """Adds the trigger."""
    op.execute(_ADD)


def downgrade() -> None:
    """Removes it, and what it wrote."""
    op.execute(_BACK)
