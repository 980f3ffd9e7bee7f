from __future__ import annotations


def test_migrations_run(database):
    with database.connect() as c:
        assert c.execute("select count(*) from pg_tables where schemaname='public'").fetchone()[0] == 17
