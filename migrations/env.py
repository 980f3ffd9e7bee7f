"""Runs the migrations with the connection that `python -m controlplane migrate` hands over, or as the owner from the settings."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, create_engine

from controlplane import models
from controlplane.settings import Settings


def _run(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=models.metadata, transaction_per_migration=True)
    with context.begin_transaction():
        context.run_migrations()


def _main() -> None:
    connection = context.config.attributes.get("connection")
    if connection is not None:
        _run(connection)
        return
    engine = create_engine(Settings().owner())
    with engine.connect() as own:
        _run(own)
    engine.dispose()


_main()
