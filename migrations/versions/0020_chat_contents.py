"""A base says what control tokens in contents of messages are, and why it serves no conversations.

Revision ID: 0020
Revises: 0019
"""

from __future__ import annotations

from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

_FORTH = """
ALTER TABLE bases
    ADD COLUMN chat_contents TEXT DEFAULT 'text' NOT NULL,
    ADD COLUMN chat_fault TEXT,
    ADD CONSTRAINT ck_bases_chat_contents CHECK (chat_contents IN ('text', 'tokens'));
GRANT UPDATE (chat_contents, chat_fault) ON bases TO veneer_app;
"""

_BACK = """
ALTER TABLE bases
    DROP COLUMN chat_contents,
    DROP COLUMN chat_fault;
"""


def upgrade() -> None:
    """Adds columns. Control tokens in contents are ordinary text for bases that are registered."""
    op.execute(_FORTH)


def downgrade() -> None:
    """Takes them away; control tokens in contents are what the data planes of before take them for."""
    op.execute(_BACK)
