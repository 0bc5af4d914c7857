"""The ledger on a SQL database: transactions, turns and errors around the statements of the modules beside it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from tokenmill_scheduler.core.events import KnownExecutor
from tokenmill_scheduler.core.plans import ExecutorDescription
from tokenmill_scheduler.ledger import actions as action_rows
from tokenmill_scheduler.ledger import commands as command_rows
from tokenmill_scheduler.ledger import leases as lease_rows
from tokenmill_scheduler.ledger import queries, store
from tokenmill_scheduler.ledger.driver_errors import driver_errors
from tokenmill_scheduler.ledger.engine import STALL_TIMEOUT_S, DatabaseFile, Engines, connect, parse_url
from tokenmill_scheduler.ledger.errors import LedgerConflict
from tokenmill_scheduler.ledger.migrate import prepare
from tokenmill_scheduler.ledger.records import (
    ActionPage,
    ActionQuery,
    Command,
    Estate,
    Hold,
    Lease,
    LeaseStatus,
    Outcome,
    Record,
    RequestPage,
    RequestQuery,
    StoredOutput,
    StoredRequest,
    StoredTransition,
)
from tokenmill_scheduler.ledger.write_connection import WriteConnection


def open_ledger(url: str, *, durable: bool = True, create: bool = True, stall_timeout_s: float = STALL_TIMEOUT_S) -> SqlLedger:
    """Opens the database at `url`: `sqlite:///FILE` or `postgresql+psycopg://…`.

    An empty database (for SQLite also a file that does not exist) gets its tables, unless `create` is False. `durable` False lets
    a power cut, but no crash of a process, take the last commits. `stall_timeout_s` is how long a transaction may stand still
    before PostgreSQL ends it, so that a stopped process does not hold its locks for ever. Raises UnsupportedDatabase,
    SchemaMismatch, LedgerUnavailable.
    """
    engines = connect(url, durable=durable, stall_timeout_s=stall_timeout_s)
    try:
        prepare(engines.write, create=create)
    except BaseException:
        engines.dispose()
        raise
    return SqlLedger(engines, DatabaseFile.at(parse_url(url)))


class SqlLedger:
    """Implements `Ledger`. Made by `open_ledger`."""

    def __init__(self, engines: Engines, file: DatabaseFile | None) -> None:
        self._engines = engines
        self._file = file
        self._write_connection = WriteConnection(engines)
        # SQLite has one writer at a time: waiting here is fair and wakes at once, unlike its busy timeout.
        self._turn = threading.Lock()

    def write(self, records: Sequence[Record], lease: Lease | None = None) -> list[Outcome]:
        with self._turn, driver_errors():
            self._check_file()
            return self._write_connection.write(records, lease)

    def unfinished(self) -> Iterator[tuple[StoredRequest, StoredOutput]]:
        with self._read() as connection:
            yield from queries.unfinished(connection)

    def find(self, request_id: str) -> StoredRequest | None:
        with self._read() as connection:
            return queries.find(connection, request_id)

    def payload_digest(self, request_id: str) -> bytes | None:
        with self._read() as connection:
            return queries.payload_digest(connection, request_id)

    def output(self, request_id: str, first_index: int = 0) -> StoredOutput:
        with self._read() as connection:
            return queries.output(connection, request_id, first_index)

    def transitions(self, request_id: str) -> tuple[StoredTransition, ...]:
        with self._read() as connection:
            return queries.stored_transitions(connection, request_id)

    def query(self, query: RequestQuery) -> RequestPage:
        with self._read() as connection:
            return queries.query(connection, query)

    def actions(self, query: ActionQuery) -> ActionPage:
        with self._read() as connection:
            return action_rows.query(connection, query)

    def holds(self) -> tuple[Hold, ...]:
        with self._read() as connection:
            return action_rows.in_force(connection)

    def progress(self, counts: Mapping[str, int]) -> dict[str, tuple[StoredRequest, StoredOutput]]:
        with self._read() as connection:
            return queries.progress(connection, counts)

    def take_lease(self, scheduler: str, lease_s: float) -> Lease:
        with self._change() as connection:
            return lease_rows.take(connection, scheduler, lease_s)

    def renew_lease(self, lease: Lease, lease_s: float) -> None:
        with self._change() as connection:
            lease_rows.renew(connection, lease, lease_s)

    def give_up_lease(self, lease: Lease) -> None:
        with self._change() as connection:
            lease_rows.give_up(connection, lease)

    def leases(self) -> tuple[LeaseStatus, ...]:
        with self._read() as connection:
            return lease_rows.statuses(connection)

    def take_over(self, lease: Lease, fallen: Sequence[int], told: Sequence[str] = ()) -> Estate:
        with self._turn, driver_errors(), self._engines.write.connect() as connection:
            transaction = connection.begin()
            estate = lease_rows.take_over(connection, lease, fallen, told)
            try:
                transaction.commit()
            except DBAPIError as error:
                raise LedgerConflict("whether a takeover was carried out is not known: its connection broke") from error
            return estate

    def held(self, lease: Lease, request_ids: Sequence[str]) -> tuple[tuple[StoredRequest, StoredOutput], ...]:
        with self._read() as connection:
            return lease_rows.held(connection, lease, request_ids)

    def claim_executor(self, lease: Lease, executor: str, address: str, *, inherited: bool, at_least: int) -> int:
        with self._change() as connection:
            return lease_rows.claim_executor(connection, lease, executor, address, inherited, at_least)

    def has_executor(self, lease: Lease, executor: str) -> bool:
        with self._read() as connection:
            return lease_rows.has_executor(connection, lease, executor)

    def tell_executors(self, lease: Lease, connected: Sequence[ExecutorDescription]) -> None:
        with self._change() as connection:
            lease_rows.tell_executors(connection, lease, connected)

    def known_executors(self, lease: Lease) -> tuple[KnownExecutor, ...]:
        with self._read() as connection:
            return lease_rows.known_executors(connection, lease)

    def send(self, commands: Sequence[Command]) -> tuple[int, ...]:
        with self._change() as connection:
            return command_rows.send(connection, commands)

    def pending(self, numbers: Sequence[int]) -> frozenset[int]:
        with self._read() as connection:
            return command_rows.pending(connection, numbers)

    def received(self, lease: Lease) -> tuple[tuple[int, Command], ...]:
        with self._read() as connection:
            return command_rows.received(connection, lease)

    def settle(self, numbers: Sequence[int]) -> None:
        with self._change() as connection:
            command_rows.settle(connection, numbers)

    def prune(self, before_s: float, limit: int) -> int:
        with self._turn, driver_errors(), self._engines.write.begin() as connection:
            return store.prune(connection, before_s, limit)

    def close(self) -> None:
        self._write_connection.close()
        self._engines.dispose()

    @contextmanager
    def _change(self) -> Iterator[Connection]:
        """A short transaction beside the writer's; one that fails changes nothing. On SQLite they take turns."""
        turn = self._turn if self._engines.dialect == "sqlite" else nullcontext()
        with turn, driver_errors():
            self._check_file()
            with self._engines.write.begin() as connection:
                yield connection

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        self._check_file()
        with driver_errors(), self._engines.read.connect() as connection:
            yield connection

    def _check_file(self) -> None:
        if self._file is not None:
            self._file.check()
