"""Canaries: their schedules, how requests of both versions ended, and which batches of counts were added.

Revision ID: 0008
Revises: 0007
"""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_TABLES = """
CREATE TABLE canaries (
    tenant TEXT NOT NULL,
    adapter TEXT NOT NULL,
    alias TEXT NOT NULL,
    generation BIGINT NOT NULL,
    version TEXT NOT NULL,
    stable TEXT NOT NULL,
    steps JSONB NOT NULL,
    step INTEGER NOT NULL,
    state TEXT NOT NULL,
    reason TEXT NOT NULL,
    step_time TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    end_time TIMESTAMP WITH TIME ZONE,
    create_time TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_canaries PRIMARY KEY (tenant, adapter, alias, generation),
    CONSTRAINT fk_canaries_tenant_adapter_alias_aliases
        FOREIGN KEY(tenant, adapter, alias) REFERENCES aliases (tenant, adapter, name),
    CONSTRAINT ck_canaries_state CHECK (state IN ('RUNNING', 'PROMOTED', 'ROLLED_BACK', 'STOPPED')),
    CONSTRAINT ck_canaries_end_time CHECK ((state = 'RUNNING') = (end_time IS NULL))
);
CREATE UNIQUE INDEX ix_canaries_running ON canaries (tenant, adapter, alias) WHERE state = 'RUNNING';

CREATE TABLE canary_steps (
    tenant TEXT NOT NULL,
    adapter TEXT NOT NULL,
    alias TEXT NOT NULL,
    generation BIGINT NOT NULL,
    canary BIGINT NOT NULL,
    version_ok BIGINT DEFAULT 0 NOT NULL,
    version_failed BIGINT DEFAULT 0 NOT NULL,
    stable_ok BIGINT DEFAULT 0 NOT NULL,
    stable_failed BIGINT DEFAULT 0 NOT NULL,
    weighed BIGINT[] DEFAULT '{0,0,0,0}' NOT NULL,
    evidence DOUBLE PRECISION[] NOT NULL,
    CONSTRAINT pk_canary_steps PRIMARY KEY (tenant, adapter, alias, generation),
    CONSTRAINT fk_canary_steps_tenant_adapter_alias_canary_canaries
        FOREIGN KEY(tenant, adapter, alias, canary) REFERENCES canaries (tenant, adapter, alias, generation) ON DELETE CASCADE
);
CREATE INDEX ix_canary_steps_tenant_adapter_alias_canary ON canary_steps (tenant, adapter, alias, canary);

CREATE TABLE outcome_batches (
    node UUID NOT NULL,
    epoch UUID NOT NULL,
    sequence BIGINT NOT NULL,
    update_time TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_outcome_batches PRIMARY KEY (node, epoch),
    CONSTRAINT fk_outcome_batches_node_nodes FOREIGN KEY(node) REFERENCES nodes (id)
);
"""

_RIGHTS = """
GRANT SELECT, INSERT, UPDATE (step, state, reason, step_time, end_time), DELETE ON canaries TO veneer_app;
GRANT SELECT, INSERT, UPDATE (version_ok, version_failed, stable_ok, stable_failed, weighed, evidence)
    ON canary_steps TO veneer_app;
GRANT SELECT, INSERT, UPDATE (sequence, update_time) ON outcome_batches TO veneer_app;

GRANT SELECT (tenant, adapter, alias, state) ON canaries TO veneer_relay;
GRANT SELECT (update_time), DELETE ON outcome_batches TO veneer_relay;

CREATE POLICY own ON canaries TO veneer_app USING (tenant = app_tenant() AND app_scope() = 'tenant');
CREATE POLICY own ON canary_steps TO veneer_app USING (tenant = app_tenant() AND app_scope() = 'tenant');
CREATE POLICY nodes ON canaries FOR SELECT TO veneer_app USING (app_scope() = 'node' AND state = 'RUNNING');
CREATE POLICY nodes ON canary_steps FOR SELECT TO veneer_app USING (app_scope() = 'node');
CREATE POLICY counting ON canary_steps FOR UPDATE TO veneer_app USING (app_scope() = 'node');
CREATE POLICY nodes ON outcome_batches TO veneer_app USING (app_scope() = 'node');

CREATE POLICY relay ON canaries FOR SELECT TO veneer_relay USING (state = 'RUNNING');
CREATE POLICY relay ON outcome_batches TO veneer_relay USING (update_time < now() - interval '24 hours');

CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON canaries FOR EACH ROW EXECUTE FUNCTION audit_write();
"""

_BACK = """
ALTER TABLE canaries NO FORCE ROW LEVEL SECURITY;
DO $$
BEGIN
    IF EXISTS (SELECT FROM canaries WHERE state = 'RUNNING') THEN
        RAISE EXCEPTION 'canaries are running, whose aliases nothing would move any more; stop them first';
    END IF;
END
$$;
DROP TABLE outcome_batches;
DROP TABLE canary_steps;
DROP TABLE canaries;
"""


def upgrade() -> None:
    """Adds tables; nothing that is there changes."""
    op.execute(_TABLES)
    for table in ("canaries", "canary_steps", "outcome_batches"):
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY")
    op.execute(_RIGHTS)


def downgrade() -> None:
    """Takes them away; aliases stay where canaries left them. Refused while one is running."""
    op.execute(_BACK)
