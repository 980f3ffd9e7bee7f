"""When journals of use were over, so that what is kept of them can be dropped.

Revision ID: 0011
Revises: 0010
"""

from __future__ import annotations

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_ADD = """
ALTER TABLE usage_journals ADD COLUMN end_time TIMESTAMP WITH TIME ZONE;
GRANT UPDATE (end_time) ON usage_journals TO veneer_app;
GRANT SELECT (node, journal, end_time), DELETE ON usage_journals TO veneer_relay;
GRANT SELECT (id, revoke_time) ON nodes TO veneer_relay;
CREATE POLICY relay ON nodes FOR SELECT TO veneer_relay USING (revoke_time IS NOT NULL);
CREATE POLICY relay ON usage_journals TO veneer_relay USING (
    end_time < now() - interval '1 hour'
    OR EXISTS (SELECT FROM nodes n WHERE n.id = node AND n.revoke_time < now() - interval '1 hour'));
"""

# A journal that is over is none to the older code, which is told nothing of it any more.
_BACK = """
DROP POLICY relay ON usage_journals;
DROP POLICY relay ON nodes;
REVOKE SELECT (id, revoke_time) ON nodes FROM veneer_relay;
REVOKE SELECT (node, journal, end_time), DELETE ON usage_journals FROM veneer_relay;
ALTER TABLE usage_journals DROP COLUMN end_time;
"""


def upgrade() -> None:
    """Adds the column and the rights."""
    op.execute(_ADD)


def downgrade() -> None:
    """Removes them; rows stay as they are."""
    op.execute(_BACK)
