"""Connections to SQLite or PostgreSQL.

Two pools a database: one for writes (on SQLite `BEGIN IMMEDIATE`, so that a busy database is waited for) and one for reads, each
read transaction seeing one snapshot. Must not know: tables.
"""

from __future__ import annotations

import os
import sqlite3
import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError

from tokenmill_scheduler.ledger.errors import LedgerUnavailable

BUSY_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 5
WAL_RETRY_S = 0.01
# SQLite copies its log into the database within a commit, whenever the log has so many pages: some 5 ms. The same few hundred pages
# change all the time, so that it costs as much at SQLite's own 1,000 pages, twice a second at 50,000 tokens/s.
CHECKPOINT_PAGES = 4000
# A stopped scheduler must not hold its row locks for ever: PostgreSQL ends its transaction after this long.
STALL_TIMEOUT_S = 10.0

_BEGIN_WRITING = "BEGIN IMMEDIATE"


class UnsupportedDatabase(ValueError):
    """The URL names no database that the ledger can use; the message says which it can."""


@dataclass(frozen=True, slots=True)
class Engines:
    """The two pools on one database."""

    write: Engine
    read: Engine

    @property
    def dialect(self) -> str:
        """`sqlite` or `postgresql`."""
        return self.write.dialect.name

    def dispose(self) -> None:
        self.write.dispose()
        self.read.dispose()


@dataclass(frozen=True, slots=True)
class DatabaseFile:
    """Of SQLite, which goes on with a file that is removed or replaced under it: all that it commits from then on is lost."""

    path: str
    device: int
    inode: int

    @classmethod
    def at(cls, url: URL) -> DatabaseFile | None:
        """None where there is no such file, as for PostgreSQL."""
        path = str(url.database)
        if url.get_backend_name() != "sqlite" or not os.path.exists(path):
            return None
        status = os.stat(path)
        return cls(path, status.st_dev, status.st_ino)

    def check(self) -> None:
        """Raises LedgerUnavailable unless it is there still. 2 µs."""
        try:
            status = os.stat(self.path)
        except OSError as error:
            raise LedgerUnavailable(f"{self.path}: {error.strerror}: put it back, or start the scheduler again") from error
        if (status.st_dev, status.st_ino) != (self.device, self.inode):
            raise LedgerUnavailable(f"{self.path} is another file than it was: put that one back, or start the scheduler again")


def parse_url(url: str) -> URL:
    """Raises UnsupportedDatabase."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        # Not quoted: there may be a password in it.
        raise UnsupportedDatabase("this is no database URL: use sqlite:///FILE or postgresql+psycopg://HOST/NAME") from None
    backend = parsed.get_backend_name()
    if backend == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise UnsupportedDatabase(f"{backend} is not supported: use sqlite:///FILE or postgresql+psycopg://HOST/NAME")
    if parsed.database in (None, "", ":memory:"):
        raise UnsupportedDatabase("a SQLite database in memory is lost with the process: name a file, sqlite:///FILE")
    return parsed


def connect(url: str, *, durable: bool = True, stall_timeout_s: float = STALL_TIMEOUT_S) -> Engines:
    """Opens no connection yet. `durable` False trades the last commits before a power cut, never consistency, for speed."""
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        return Engines(_sqlite(parsed, durable, _BEGIN_WRITING), _sqlite(parsed, durable, "BEGIN"))
    return Engines(
        _postgresql(parsed, durable, stall_timeout_s),
        # A connection that died while idle would fail a reader; the writer repeats its writes anyhow.
        _postgresql(parsed, durable, stall_timeout_s, isolation_level="REPEATABLE READ", pool_pre_ping=True),
    )


def _sqlite(url: URL, durable: bool, begin: str) -> Engine:
    # Parameters are what clients sent: they do not belong in messages and logs.
    engine = create_engine(url, hide_parameters=True, connect_args={"timeout": BUSY_TIMEOUT_S})

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _record: object) -> None:
        # The driver begins no transactions; `begin` below does.
        connection.isolation_level = None
        try:
            _switch_to_wal(connection)
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_NOTADB:
                raise
            raise UnsupportedDatabase(f"{url.database} is no SQLite database: name another file") from error
        connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")

    @event.listens_for(engine, "begin")
    def start(connection: Connection) -> None:
        # It may be under way already, without SQLAlchemy.
        if not driver(connection).in_transaction:
            driver(connection).execute(begin)

    return engine


def _switch_to_wal(connection: Any) -> None:
    """SQLite does not wait for others here, whatever its busy timeout: of several that open a new file at once all but one fail."""
    give_up = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                raise
        time.sleep(WAL_RETRY_S)


def _postgresql(url: URL, durable: bool, stall_timeout_s: float, **options: Any) -> Engine:
    engine = create_engine(
        url,
        hide_parameters=True,
        connect_args={
            "connect_timeout": CONNECT_TIMEOUT_S,
            # A database made in the C locale has no encoding of its own (SQL_ASCII): the driver would give bytes for text.
            "client_encoding": "utf8",
            # A server that vanished without a goodbye is noticed within about 20 s.
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 2,
            "tcp_user_timeout": 20_000,
        },
        **options,
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _record: object) -> None:
        connection.autocommit = True
        connection.execute(f"SET synchronous_commit = {'on' if durable else 'off'}")
        connection.execute(f"SET idle_in_transaction_session_timeout = {round(stall_timeout_s * 1000)}")
        connection.autocommit = False

    return engine


def driver(connection: Connection) -> Any:
    """SQLite's own connection below this one: what runs with every commit spends longer in SQLAlchemy than in the database."""
    return connection.connection.dbapi_connection


def begin(connection: Connection) -> None:
    """As `connection.begin()`; of SQLite's, SQLAlchemy learns only if it is asked for something in between."""
    if connection.dialect.name == "sqlite":
        driver(connection).execute(_BEGIN_WRITING)
    else:
        connection.begin()


def commit(connection: Connection) -> None:
    """What `begin` began. A connection that is closed instead rolls back."""
    if connection.in_transaction():
        connection.commit()
    else:
        driver(connection).commit()
