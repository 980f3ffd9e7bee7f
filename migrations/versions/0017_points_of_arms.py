"""Arms of splits keep which units they serve.

Revision ID: 0017
Revises: 0016
"""

from __future__ import annotations

from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds a column. Splits that are there serve the units that they served, by the order of their arms."""
    op.execute("ALTER TABLE arms ADD COLUMN points INTEGER[]")


def downgrade() -> None:
    """Takes it away: units of a split move to the arms that the order of the arms gives them."""
    op.execute("ALTER TABLE arms DROP COLUMN points")
