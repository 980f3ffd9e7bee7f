"""Signatures that come after their versions.

Revision ID: 0015
Revises: 0014
"""

from __future__ import annotations

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

_ADD = """
ALTER TABLE signatures ADD COLUMN number INTEGER DEFAULT 0 NOT NULL;
ALTER TABLE signatures DROP CONSTRAINT pk_signatures;
ALTER TABLE signatures ADD CONSTRAINT pk_signatures PRIMARY KEY (tenant, version, number);
GRANT UPDATE (signature) ON versions TO veneer_app;
"""

# The older code knows one signature a version: the last one goes on counting.
_BACK = """
REVOKE UPDATE (signature) ON versions FROM veneer_app;
ALTER TABLE requests NO FORCE ROW LEVEL SECURITY;
DELETE FROM requests WHERE method = 'AttachSignature';
ALTER TABLE requests FORCE ROW LEVEL SECURITY;
ALTER TABLE signatures NO FORCE ROW LEVEL SECURITY;
DELETE FROM signatures s WHERE EXISTS (SELECT FROM signatures later
    WHERE later.tenant = s.tenant AND later.version = s.version AND later.number > s.number);
ALTER TABLE signatures FORCE ROW LEVEL SECURITY;
ALTER TABLE signatures DROP CONSTRAINT pk_signatures;
ALTER TABLE signatures ADD CONSTRAINT pk_signatures PRIMARY KEY (tenant, version);
ALTER TABLE signatures DROP COLUMN number;
"""


def upgrade() -> None:
    """Lets a version have several; those that are there are the first of theirs."""
    op.execute(_ADD)


def downgrade() -> None:
    """Leaves each version its last one."""
    op.execute(_BACK)
