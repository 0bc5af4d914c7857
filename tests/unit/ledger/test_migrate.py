"""The schema: made by migrations, equal to the tables, and refused when it is not this release's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect, text
from tokenmill_scheduler.ledger import migrate
from tokenmill_scheduler.ledger.engine import UnsupportedDatabase, connect
from tokenmill_scheduler.ledger.lock import database_lock
from tokenmill_scheduler.ledger.migrate import SchemaState
from tokenmill_scheduler.ledger.port import LedgerUnavailable, SchemaMismatch
from tokenmill_scheduler.ledger.sql import open_ledger
from tokenmill_scheduler.ledger.tables import metadata

from tests.fakes.ledger_records import submission


def execute(url: str, statement: str) -> None:
    engines = connect(url)
    with engines.write.begin() as connection:
        connection.execute(text(statement))
    engines.dispose()


def test_migrations_make_what_the_tables_say(url: str) -> None:
    engines = connect(url)
    with engines.read.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
    engines.dispose()


def test_down_and_up_again(empty_url: str) -> None:
    assert migrate.check(empty_url) is SchemaState.EMPTY
    migrate.upgrade(empty_url)
    assert (migrate.check(empty_url), migrate.current(empty_url)) == (SchemaState.CURRENT, migrate.head())
    migrate.downgrade(empty_url, "base")
    assert (migrate.check(empty_url), migrate.current(empty_url)) == (SchemaState.EMPTY, None)
    engines = connect(empty_url)
    inspector = inspect(engines.read)
    assert (inspector.get_table_names(), inspector.get_view_names()) == (["alembic_version"], [])
    engines.dispose()
    migrate.upgrade(empty_url)
    assert migrate.check(empty_url) is SchemaState.CURRENT


def test_no_migration_under_a_running_scheduler(empty_url: str) -> None:
    with database_lock(empty_url):
        ledger = open_ledger(empty_url)
        ledger.take_lease("s1", 60.0)
        with pytest.raises(LedgerUnavailable, match=r"stop that one|in use by s1: stop every scheduler on it first"):
            migrate.downgrade(empty_url, "base")
        assert migrate.check(empty_url) is SchemaState.CURRENT
        ledger.close()


def test_a_new_database_is_made_and_found_again(empty_url: str) -> None:
    ledger = open_ledger(empty_url)
    ledger.write([submission()])
    ledger.close()
    ledger = open_ledger(empty_url, create=False)
    assert ledger.find("a") is not None
    ledger.close()


def test_an_empty_database_is_left_alone_when_told_so(empty_url: str) -> None:
    with pytest.raises(SchemaMismatch, match="no tables yet: run `tokenmill db upgrade`"):
        open_ledger(empty_url, create=False)
    assert migrate.check(empty_url) is SchemaState.EMPTY


def test_schedulers_that_start_together_make_it_once(empty_url: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        ledgers = list(pool.map(open_ledger, [empty_url] * 4))
    ledgers[0].write([submission()])
    assert all(ledger.find("a") for ledger in ledgers)
    for ledger in ledgers:
        ledger.close()


def test_a_newer_schema_is_refused_with_what_to_do(empty_url: str) -> None:
    migrate.upgrade(empty_url)
    execute(empty_url, "UPDATE alembic_version SET version_num = '9999'")
    assert migrate.check(empty_url) is SchemaState.NEWER
    with pytest.raises(SchemaMismatch, match=f"schema 9999, which this release .* run `tokenmill db downgrade {migrate.head()}`"):
        open_ledger(empty_url)


def test_an_older_schema_is_refused_with_what_to_do(empty_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Against a copy of the migrations with one more: this release's schema is then the older one."""
    migrate.upgrade(empty_url)
    head = migrate.head()
    folder = migrate.migrations_folder()
    later = tmp_path / "migrations"
    (later / "versions").mkdir(parents=True)
    (later / "env.py").write_text((folder / "env.py").read_text())
    for path in (folder / "versions").glob("*.py"):
        (later / "versions" / path.name).write_text(path.read_text())
    (later / "versions" / "9999_later.py").write_text(
        f"revision = '9999'\ndown_revision = {head!r}\ndef upgrade(): pass\ndef downgrade(): pass\n"
    )
    monkeypatch.setattr(migrate, "migrations_folder", lambda: later)
    assert migrate.check(empty_url) is SchemaState.OLDER
    with pytest.raises(SchemaMismatch, match=f"schema {head}, older than this release's 9999: .* run `tokenmill db upgrade`"):
        open_ledger(empty_url)
    migrate.upgrade(empty_url)
    open_ledger(empty_url).close()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("nonsense", "no database URL"),
        ("mysql://h/d", "mysql is not supported"),
        ("sqlite://", "name a file"),
        ("sqlite:///:memory:", "name a file"),
    ],
)
def test_a_url_that_cannot_serve_is_refused(bad: str, message: str) -> None:
    with pytest.raises(UnsupportedDatabase, match=message):
        open_ledger(bad)


def test_a_database_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(LedgerUnavailable):
        open_ledger(f"sqlite:///{tmp_path}/no/such/folder/ledger.db")
    with pytest.raises(LedgerUnavailable):
        open_ledger(f"postgresql+psycopg://postgres@/none?host={tmp_path}")


def test_a_file_that_is_no_database_is_told_so(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("not a database " * 100)
    with pytest.raises(UnsupportedDatabase, match="is no SQLite database: name another file"):
        open_ledger(f"sqlite:///{other}")
    assert other.read_text() == "not a database " * 100
