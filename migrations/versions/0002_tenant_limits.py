"""What a tenant may use at most on a node.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_LIMITS = ("max_rank_rows", "max_arena_bytes", "max_host_bytes")

_IDENTIFY = """
CREATE FUNCTION identify(wanted bytea)
    RETURNS TABLE (
        kind text, id uuid, tenant text, roles text[], expire_time timestamptz, fallback_allowed boolean, weight integer{columns})
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp
    AS $$
        SELECT 'tenant', k.id, k.tenant, k.roles, k.expire_time, t.fallback_allowed, t.weight{limits}
            FROM keys k JOIN tenants t ON t.name = k.tenant
            WHERE k.hash = wanted AND k.revoke_time IS NULL AND (k.expire_time IS NULL OR k.expire_time > now())
        UNION ALL
        SELECT 'operator', o.id, '', ARRAY[]::text[], NULL, false, 0{none}
            FROM operators o WHERE o.hash = wanted AND o.revoke_time IS NULL
        UNION ALL
        SELECT 'node', n.id, '', ARRAY[]::text[], NULL, false, 0{none}
            FROM nodes n WHERE n.hash = wanted AND n.revoke_time IS NULL
        UNION ALL
        SELECT 'node', n.id, '', ARRAY[]::text[], n.previous_end_time, false, 0{none}
            FROM nodes n WHERE n.previous_hash = wanted AND n.previous_end_time > now() AND n.revoke_time IS NULL
        UNION ALL
        SELECT 'enrollment', e.id, '', ARRAY[]::text[], e.expire_time, false, 0{none}
            FROM enrollments e WHERE e.hash = wanted AND e.use_time IS NULL AND e.expire_time > now()
    $$
"""


def upgrade() -> None:
    """Gives tenants limits, of which none has any yet; they come with whoever a credential belongs to."""
    op.execute("""
        ALTER TABLE tenants
            ADD COLUMN max_rank_rows INTEGER DEFAULT 0 NOT NULL,
            ADD COLUMN max_arena_bytes BIGINT DEFAULT 0 NOT NULL,
            ADD COLUMN max_host_bytes BIGINT DEFAULT 0 NOT NULL,
            ADD CONSTRAINT ck_tenants_limits CHECK (max_rank_rows >= 0 AND max_arena_bytes >= 0 AND max_host_bytes >= 0)
    """)
    op.execute(f"GRANT UPDATE ({', '.join(_LIMITS)}) ON tenants TO veneer_app")
    for table in ("changes", "outbox"):  # an operator's change of a tenant is told like the tenant's own
        op.execute(f"CREATE POLICY operators ON {table} FOR INSERT TO veneer_app WITH CHECK (app_scope() = 'operator')")
    _make_identify(
        columns=", max_rank_rows integer, max_arena_bytes bigint, max_host_bytes bigint",
        limits="".join(f", t.{name}" for name in _LIMITS),
        none=", 0, 0::bigint, 0::bigint",
    )


def downgrade() -> None:
    """Takes the limits away again."""
    _make_identify(columns="", limits="", none="")
    for table in ("changes", "outbox"):
        op.execute(f"DROP POLICY operators ON {table}")
    op.execute(f"REVOKE UPDATE ({', '.join(_LIMITS)}) ON tenants FROM veneer_app")
    op.execute(f"ALTER TABLE tenants {', '.join(f'DROP COLUMN {name}' for name in _LIMITS)}")


def _make_identify(*, columns: str, limits: str, none: str) -> None:
    """Replaces the function: its columns cannot be changed."""
    op.execute("DROP FUNCTION identify(bytea)")
    op.execute(_IDENTIFY.format(columns=columns, limits=limits, none=none))
    op.execute("REVOKE ALL ON FUNCTION identify(bytea) FROM PUBLIC")
    op.execute("GRANT EXECUTE ON FUNCTION identify(bytea) TO veneer_auth")
