"""Probes of versions, and answers that are completed when a probe has ended.

Revision ID: 0010
Revises: 0009
"""

from __future__ import annotations

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


_ADD = """
ALTER TABLE versions ADD COLUMN probe JSONB;
GRANT UPDATE (probe) ON versions TO veneer_app;
GRANT UPDATE (answer) ON requests TO veneer_app;
"""

# The older code knows neither the kind of change nor the fields of answers; a publish that waits for its probe moves no alias.
_BACK = """
ALTER TABLE requests NO FORCE ROW LEVEL SECURITY;
UPDATE requests SET answer = (answer #- '{version,probe}') - 'awaits' WHERE method = 'Publish';
DELETE FROM requests WHERE method <> 'Publish' AND answer::text LIKE '%"probe"%';
ALTER TABLE requests FORCE ROW LEVEL SECURITY;
REVOKE UPDATE (answer) ON requests FROM veneer_app;
ALTER TABLE changes NO FORCE ROW LEVEL SECURITY;
ALTER TABLE outbox NO FORCE ROW LEVEL SECURITY;
DELETE FROM changes WHERE kind = 5;
DELETE FROM outbox WHERE kind = 5;
ALTER TABLE changes FORCE ROW LEVEL SECURITY;
ALTER TABLE outbox FORCE ROW LEVEL SECURITY;
ALTER TABLE versions DROP COLUMN probe;
"""


def upgrade() -> None:
    """Adds the column and the rights."""
    op.execute(_ADD)


def downgrade() -> None:
    """Removes them, and what the older code could not read."""
    op.execute(_BACK)
