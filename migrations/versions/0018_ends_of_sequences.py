"""A base has the tokens that end a sequence.

Revision ID: 0018
Revises: 0017
"""

from __future__ import annotations

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

_FORTH = """
ALTER TABLE bases ADD COLUMN eos_ids BIGINT[];
GRANT UPDATE (eos_ids) ON bases TO veneer_app;
"""


def upgrade() -> None:
    """Adds a column. Bases that are registered have none until they are registered again."""
    op.execute(_FORTH)


def downgrade() -> None:
    """Takes it away."""
    op.execute("ALTER TABLE bases DROP COLUMN eos_ids")
