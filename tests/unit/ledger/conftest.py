"""Ledgers on every database there is."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from psycopg import sql
from tokenmill_scheduler.ledger import migrate
from tokenmill_scheduler.ledger.port import Ledger
from tokenmill_scheduler.ledger.sql import SqlLedger, open_ledger

from tests.fakes.memory_ledger import MemoryLedger
from tests.fakes.postgres import PostgresServer


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the newest schema: copying it is faster than migrating."""
    path = tmp_path_factory.mktemp("template") / "ledger.db"
    migrate.upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def migrated_postgres(postgres: PostgresServer) -> str:
    """The name of a database with the newest schema."""
    name = postgres.create_database()
    migrate.upgrade(postgres.url(name))
    return name


@pytest.fixture
def sqlite_url(sqlite_template: Path, tmp_path: Path) -> str:
    shutil.copy(sqlite_template, tmp_path / "ledger.db")
    return f"sqlite:///{tmp_path}/ledger.db"


@pytest.fixture
def postgres_url(postgres: PostgresServer, migrated_postgres: str) -> str:
    """Emptied rather than made anew: a new database is a folder of a thousand files."""
    for table in ("requests", "executors", "leases", "commands", "actions", "holds"):
        postgres.execute(sql.SQL("DELETE FROM {}").format(sql.Identifier(table)), migrated_postgres)
    return postgres.url(migrated_postgres)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    """A database with the newest schema and nothing in it."""
    value = request.getfixturevalue(f"{request.param}_url")
    assert isinstance(value, str)
    return value


@pytest.fixture(params=["sqlite", "postgres"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database without any tables; for SQLite a file that does not exist."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/new.db"
        return
    postgres: PostgresServer = request.getfixturevalue("postgres")
    name = postgres.create_database()
    yield postgres.url(name)
    postgres.drop_database(name)


@pytest.fixture
def sql_ledger(url: str) -> Iterator[SqlLedger]:
    ledger = open_ledger(url, durable=False)
    yield ledger
    ledger.close()


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def ledger(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    if request.param == "memory":
        yield MemoryLedger()
        return
    ledger = open_ledger(request.getfixturevalue(f"{request.param}_url"), durable=False)
    yield ledger
    ledger.close()
