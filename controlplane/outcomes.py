"""How requests for arms of splits ended, as data planes report it: each batch is added once, or not at all."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import text

from controlplane.db import NODE, Database

# One start of a node's process sends its batches one after the other; what comes again, or from behind, was added before.
_ADVANCE = text("""
    INSERT INTO outcome_batches AS b (node, epoch, sequence) VALUES (:node, :epoch, :sequence)
    ON CONFLICT (node, epoch) DO UPDATE SET sequence = excluded.sequence, update_time = now()
    WHERE b.sequence < excluded.sequence RETURNING sequence
""")

# The steps of several canaries are locked in one order by all, so that no two batches wait for each other.
_ADD = text("""
    WITH told AS (
        SELECT * FROM unnest(CAST(:owners AS text[]), CAST(:adapters AS text[]), CAST(:aliases AS text[]),
            CAST(:generations AS bigint[]), CAST(:versions AS text[]), CAST(:oks AS bigint[]), CAST(:faileds AS bigint[]))
            AS t (tenant, adapter, alias, generation, version, ok, failed)
    ), counted AS (
        SELECT s.tenant, s.adapter, s.alias, s.generation, t.version = c.version AS is_version, t.ok, t.failed
        FROM told t
        JOIN canary_steps s USING (tenant, adapter, alias, generation)
        JOIN canaries c ON c.tenant = s.tenant AND c.adapter = s.adapter AND c.alias = s.alias AND c.generation = s.canary
        JOIN versions v ON v.tenant = t.tenant AND v.digest = t.version
        JOIN nodes n ON n.id = :node AND n.base_digest = v.base_digest
        WHERE c.state = 'RUNNING' AND t.version IN (c.version, c.stable) AND v.state = 'READY'
    ), added AS (
        SELECT tenant, adapter, alias, generation,
            coalesce(sum(ok) FILTER (WHERE is_version), 0) AS version_ok,
            coalesce(sum(failed) FILTER (WHERE is_version), 0) AS version_failed,
            coalesce(sum(ok) FILTER (WHERE NOT is_version), 0) AS stable_ok,
            coalesce(sum(failed) FILTER (WHERE NOT is_version), 0) AS stable_failed
        FROM counted GROUP BY tenant, adapter, alias, generation
    ), locked AS MATERIALIZED (
        SELECT tenant, adapter, alias, generation FROM canary_steps s JOIN added USING (tenant, adapter, alias, generation)
        ORDER BY tenant, adapter, alias, generation FOR UPDATE OF s
    )
    UPDATE canary_steps s SET
        version_ok = s.version_ok + a.version_ok, version_failed = s.version_failed + a.version_failed,
        stable_ok = s.stable_ok + a.stable_ok, stable_failed = s.stable_failed + a.stable_failed
    FROM added a JOIN locked USING (tenant, adapter, alias, generation)
    WHERE (s.tenant, s.adapter, s.alias, s.generation) = (a.tenant, a.adapter, a.alias, a.generation)
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmOutcomes:
    """How requests for one arm of a split ended since they were last told.

    Attributes:
        owner: Tenant that owns the adapter.
        generation: Generation of the alias to which they were bound.
        version: Digest of the arm's version.
        ok: Ended well.
        failed: Failed by the service or the version.
    """

    owner: str
    adapter: str
    alias: str
    generation: int
    version: str
    ok: int
    failed: int


class Outcomes:
    """Adds what nodes report. Stateless; any task may call it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, node_id: str, epoch: str, sequence: int, outcomes: Sequence[ArmOutcomes]) -> bool:
        """Adds a batch, of which only what belongs to running canaries and to versions that the node may serve counts.

        Args:
            node_id: The node, by its credential.
            epoch: Start of its process; a UUID.
            sequence: Place of the batch among those of that start.
            outcomes: The batch.

        Returns:
            False when this batch or a later one came before.

        Raises:
            UnavailableError: The database is away.
        """
        node = uuid.UUID(node_id)
        parameters = {
            "node": node,
            "owners": [one.owner for one in outcomes],
            "adapters": [one.adapter for one in outcomes],
            "aliases": [one.alias for one in outcomes],
            "generations": [one.generation for one in outcomes],
            "versions": [one.version for one in outcomes],
            "oks": [one.ok for one in outcomes],
            "faileds": [one.failed for one in outcomes],
        }
        async with self._database.transaction(NODE) as connection:
            batch = {"node": node, "epoch": uuid.UUID(epoch), "sequence": sequence}
            if (await connection.execute(_ADVANCE, batch)).one_or_none() is None:
                return False
            await connection.execute(_ADD, parameters)
        return True
