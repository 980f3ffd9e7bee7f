"""Windows of canaries are kept as they were weighed, rather than what they came to.

Revision ID: 0016
Revises: 0015
"""

from __future__ import annotations

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

_FORTH = """
ALTER TABLE canary_steps
    ADD COLUMN windows JSONB DEFAULT '[]' NOT NULL,
    ALTER COLUMN evidence SET DEFAULT '{0,0,0,0,0,0}';
GRANT UPDATE (windows) ON canary_steps TO veneer_app;
"""

_BACK = """
ALTER TABLE canary_steps
    DROP COLUMN windows,
    ALTER COLUMN evidence DROP DEFAULT;
"""


def upgrade() -> None:
    """Adds a column. What running canaries have counted is weighed anew, as one window for each step."""
    op.execute(_FORTH)


def downgrade() -> None:
    """Takes it away; what was counted since is weighed anew in the way of before."""
    op.execute(_BACK)
