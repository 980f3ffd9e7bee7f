"""What may answer in place of a version, by tenant: earlier versions, and what a request asks for that does not say.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_COLUMNS = """
ALTER TABLE tenants
    ADD COLUMN previous_allowed BOOLEAN DEFAULT true NOT NULL,
    ADD COLUMN default_fallback TEXT DEFAULT 'NONE' NOT NULL,
    ADD CONSTRAINT ck_tenants_default_fallback
        CHECK (default_fallback IN ('NONE', 'NOT_READY', 'ANY', 'PREVIOUS', 'FAIL')),
    ADD CONSTRAINT ck_tenants_previous_allowed CHECK (previous_allowed OR NOT fallback_allowed),
    ADD CONSTRAINT ck_tenants_default_allowed CHECK (
        (fallback_allowed OR default_fallback NOT IN ('NOT_READY', 'ANY'))
        AND (previous_allowed OR default_fallback <> 'PREVIOUS'));
GRANT UPDATE (fallback_allowed, previous_allowed, default_fallback) ON tenants TO veneer_app;
CREATE POLICY fallback ON tenants FOR UPDATE TO veneer_app USING (name = app_tenant() AND app_scope() = 'tenant');
"""

# What a credential's tenant allows, beside `identify`, whose columns the version before goes on reading.
_FUNCTION = """
CREATE FUNCTION fallback_of(wanted text) RETURNS TABLE (previous_allowed boolean, default_fallback text)
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp
    AS $$ SELECT t.previous_allowed, t.default_fallback FROM tenants t WHERE t.name = wanted $$;
REVOKE ALL ON FUNCTION fallback_of(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION fallback_of(text) TO veneer_auth;
"""

_BACK = """
DROP FUNCTION fallback_of(text);
DROP POLICY fallback ON tenants;
REVOKE UPDATE (fallback_allowed, previous_allowed, default_fallback) ON tenants FROM veneer_app;
ALTER TABLE tenants
    DROP CONSTRAINT ck_tenants_default_allowed,
    DROP CONSTRAINT ck_tenants_previous_allowed,
    DROP CONSTRAINT ck_tenants_default_fallback,
    DROP COLUMN default_fallback,
    DROP COLUMN previous_allowed;
"""


def upgrade() -> None:
    """Adds them; the service of the version before goes on working."""
    op.execute(_COLUMNS)
    op.execute(_FUNCTION)


def downgrade() -> None:
    """Removes them."""
    op.execute(_BACK)
