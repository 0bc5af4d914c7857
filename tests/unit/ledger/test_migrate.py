"""The schema: made by migrations, equal to the tables, and refused when it is not this release's."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text
from tokenmill_scheduler.ledger import leases, migrate
from tokenmill_scheduler.ledger.engine import UnsupportedDatabase, connect
from tokenmill_scheduler.ledger.errors import LedgerUnavailable, SchemaMismatch
from tokenmill_scheduler.ledger.lock import database_lock
from tokenmill_scheduler.ledger.migrate import SchemaState
from tokenmill_scheduler.ledger.records import Action, ActionVerb, RequestQuery, Submission
from tokenmill_scheduler.ledger.sql import SqlLedger, open_ledger
from tokenmill_scheduler.ledger.tables import metadata

from tests.fakes.ledger_records import decode, done, prefill, run_to_end, submission, tokens


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


def test_a_start_with_nothing_to_migrate_does_without_alembic() -> None:
    assert migrate.head() == ScriptDirectory(str(migrate.migrations_folder())).get_current_head()
    code = "import sys, tokenmill_scheduler.__main__; print([name for name in ('alembic', 'jinja2') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


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


@pytest.mark.parametrize("revision", ["0001", "0005", "0006"])
def test_requests_of_every_kind_and_their_output_come_through_down_and_up(empty_url: str, revision: str) -> None:
    ledger = open_ledger(empty_url)
    lease = ledger.take_lease("s1", 0)
    several = Submission(replace(submission("group").request, n=3, best_of=3), b"digest")
    ledger.write([submission("waiting"), several, prefill("group"), decode("group"), tokens("group", 0, 5, 6)], lease)
    run_to_end(ledger, "ended")
    ledger.write([Action(1.0, "ann", verb, "", "why") for verb in (ActionVerb.PAUSE_QUEUE, ActionVerb.SET_POLICY)])
    before = _contents(ledger)
    assert len(before) == 5
    ledger.close()
    migrate.downgrade(empty_url, revision)
    assert _rows_of_views(empty_url)["request_overview"] == 5
    migrate.upgrade(empty_url)
    ledger = open_ledger(empty_url)
    assert _contents(ledger) == before
    heir = ledger.take_lease("s2", 3600)
    estate = ledger.take_over(heir, [lease.number])
    assert [stored.request.request_id for stored, _ in estate.requests] == ["waiting", "group", "group/1", "group/2"]
    ledger.write([tokens("group", 2, 7), done("group")], heir)
    assert ledger.output("group").token_ids == (5, 6, 7)
    assert ledger.prune(1e12, 10) == 1, "the group goes as one, when all of it has ended"
    ledger.close()


def _contents(ledger: SqlLedger) -> list[object]:
    """All that is known of every request, but for whose it is."""
    page = ledger.query(RequestQuery(oldest_first=True)).requests
    return [
        (
            replace(stored, lease=None, scheduler=""),
            ledger.output(stored.request.request_id),
            ledger.transitions(stored.request.request_id),
            ledger.payload_digest(stored.request.request_id),
        )
        for stored in page
    ]


def _rows_of_views(url: str) -> dict[str, int]:
    """Each view of this revision answers."""
    engines = connect(url)
    with engines.read.connect() as connection:
        views = inspect(connection).get_view_names()
        rows = {view: len(connection.execute(text(f"SELECT * FROM {view}")).all()) for view in views}
    engines.dispose()
    return rows


def test_no_migration_under_a_running_scheduler(empty_url: str) -> None:
    with database_lock(empty_url):
        ledger = open_ledger(empty_url)
        ledger.take_lease("s1", 60.0)
        with pytest.raises(LedgerUnavailable, match=r"stop that one|in use by s1: stop every scheduler on it first"):
            migrate.downgrade(empty_url, "base")
        assert migrate.check(empty_url) is SchemaState.CURRENT
        ledger.close()


def test_no_migration_under_a_running_scheduler_of_an_older_release(empty_url: str) -> None:
    migrate.upgrade(empty_url, "0007")
    engines = connect(empty_url)
    with database_lock(empty_url):
        with engines.write.begin() as connection:
            leases.take(connection, "s1", 60.0)
        with pytest.raises(LedgerUnavailable, match=r"stop that one|in use by s1: stop every scheduler on it first"):
            migrate.upgrade(empty_url)
        assert migrate.current(empty_url) == "0007"
    engines.dispose()


def test_a_question_makes_no_file(tmp_path: Path) -> None:
    assert migrate.check(f"sqlite:///{tmp_path}/none.db") is SchemaState.EMPTY
    assert not list(tmp_path.iterdir())


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
    words = f"schema 9999, which this release .* run `tokenmill db downgrade {migrate.head()}`"
    for step in (open_ledger, migrate.upgrade, lambda url: migrate.downgrade(url, "base")):
        with pytest.raises(SchemaMismatch, match=words):
            step(empty_url)


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


def test_another_programs_tables_are_left_alone(empty_url: str) -> None:
    execute(empty_url, "CREATE TABLE requests (theirs INTEGER)")
    for step in (open_ledger, migrate.upgrade):
        with pytest.raises(SchemaMismatch, match=r"another program's, with tables of its own \(requests\): name another database"):
            step(empty_url)
    execute(empty_url, "INSERT INTO requests (theirs) VALUES (1)")


def test_what_blocks_a_scheduler_is_not_taken_for_another_one(tmp_path: Path) -> None:
    with pytest.raises(BlockingIOError), database_lock(f"sqlite:///{tmp_path}/ledger.db"):
        raise BlockingIOError
