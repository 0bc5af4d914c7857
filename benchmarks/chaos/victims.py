"""What can be killed and stopped: service processes, which a supervisor starts again, and databases.

Their methods block for as long as a process takes to start; call them on a thread. Must not know: when, and what clients do.
"""

from __future__ import annotations

import re
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tests.fakes.postgres import PostgresServer, postgres_server
from tests.fakes.processes import Processes, ServiceProcess

START_LIMIT_S = 120.0
_RESTART_PAUSE_S = 0.2
_LAST_WORDS_CHARS = 4_000


class Victim(Protocol):
    def kill(self) -> None: ...

    def end(self) -> None:
        """By SIGTERM, in good order."""

    def start(self) -> None:
        """Again; returns when it serves."""

    def stop(self) -> None: ...

    def go_on(self) -> None: ...


@dataclass
class Service:
    """A scheduler or an executor.

    `crashes` has the last words of each time that it ended without being told to. `fenced` counts how often it did because another
    scheduler had taken over from it, as it must.
    """

    name: str
    begin: Callable[[], ServiceProcess]
    crashes: list[str] = field(default_factory=list)
    fenced: int = 0
    # Of its last process; a new one listens there too.
    address: str = ""
    _process: ServiceProcess | None = None

    def kill(self) -> None:
        assert self._process is not None
        if self._process.runs:
            self._process.kill()
        self._process = None

    def end(self) -> None:
        assert self._process is not None
        if self._process.runs and (code := self._process.stop()) != 0:
            self._keep_last_words(f"{self.name} ended with {code} when it was told to", self._process)
        self._process = None

    def start(self) -> None:
        """As a supervisor does: once more when it ends before it serves, as it must while the database is away."""
        give_up_s = time.monotonic() + START_LIMIT_S
        while self._process is None:
            try:
                self._process = self.begin()
                self.address = self._process.address
            except AssertionError:
                if time.monotonic() > give_up_s:
                    raise
                time.sleep(_RESTART_PAUSE_S)

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def revive(self) -> None:
        """Starts it again if it has ended by itself, and keeps its last words."""
        process = self._process
        if process is not None and not process.runs:
            self._keep_last_words(f"{self.name} ended by itself with {process.wait()}", process)
            self._process = None
            self.start()

    def _keep_last_words(self, what: str, process: ServiceProcess) -> None:
        # The log has those of earlier processes as well.
        words = process.log.read_text().rpartition("lease taken")[2][-_LAST_WORDS_CHARS:]
        if re.search(r"\] fenced +reason=", words):
            self.fenced += 1
        else:
            self.crashes.append(f"{what}:\n{words}")

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.runs:
            self._process.signal(number)


class SqliteDatabase:
    """A file. No process to kill: it is locked by another writer instead."""

    dialect = "sqlite"

    def __init__(self, file: Path) -> None:
        self.url = f"sqlite:///{file}"
        self._file = file
        self._lock: sqlite3.Connection | None = None

    def kill(self) -> None:
        raise NotImplementedError

    end = start = kill

    def stop(self) -> None:
        """Waits for the lock as long as any writer would."""
        lock = sqlite3.connect(self._file, timeout=START_LIMIT_S, isolation_level=None, check_same_thread=False)
        lock.execute("BEGIN IMMEDIATE")
        self._lock = lock

    def go_on(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


class PostgresDatabase:
    """A server of its own. `url` leads straight to it."""

    dialect = "postgresql"

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._name = server.create_database()
        self.url = server.url(self._name)
        self.kill, self.start = server.kill, server.start

    def end(self) -> None:
        raise NotImplementedError

    @property
    def socket(self) -> str:
        return str(self._server.socket)

    def url_at(self, address: str) -> str:
        """Through a proxy there."""
        return f"postgresql+psycopg://postgres@{address}/{self._name}"

    def stop(self) -> None:
        self._server.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._server.signal(signal.SIGCONT)


Database = SqliteDatabase | PostgresDatabase


@contextmanager
def open_database(dialect: str, processes: Processes) -> Iterator[Database]:
    """`dialect` is sqlite or postgresql."""
    if dialect == "sqlite":
        yield SqliteDatabase(processes.folder / "chaos.db")
        return
    with postgres_server() as server:
        database = PostgresDatabase(server)
        try:
            yield database
        finally:
            database.go_on()
