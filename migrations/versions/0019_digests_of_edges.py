"""A base has digests of its embedding and head, by which copies of them beside adapters are known.

Revision ID: 0019
Revises: 0018
"""

from __future__ import annotations

from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

_FORTH = """
ALTER TABLE bases ADD COLUMN edge_digests JSONB;
GRANT UPDATE (edge_digests) ON bases TO veneer_app;
"""


def upgrade() -> None:
    """Adds a column. Bases that are registered have none until they are registered again."""
    op.execute(_FORTH)


def downgrade() -> None:
    """Takes it away."""
    op.execute("ALTER TABLE bases DROP COLUMN edge_digests")
