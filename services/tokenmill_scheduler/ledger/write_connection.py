"""The connection that a scheduler's records are written on, a transaction a write, fenced by its lease.

A commit whose answer was lost with the connection is in doubt. The same records are to be given again then, and it is found out
first whether they are there already (`commits`). Must not know: what the records mean, which errors pass with time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, IntegrityError

from tokenmill_scheduler.ledger import commits, leases, store
from tokenmill_scheduler.ledger.engine import Engines, begin, commit
from tokenmill_scheduler.ledger.errors import LedgerConflict
from tokenmill_scheduler.ledger.records import Lease, Outcome, Record
from tokenmill_scheduler.ledger.statements import Statements


@dataclass(frozen=True, slots=True)
class _InDoubt:
    """A commit whose answer was lost with the connection: it was carried out if the commits of `lease` have come to `number`."""

    lease: Lease
    number: int
    records: tuple[Record, ...]
    outcomes: list[Outcome]


class WriteConnection:
    """Kept from one write to the next, unless one fails. For one thread at a time."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._statements = Statements(engines.dialect)
        self._connection: Connection | None = None
        self._in_doubt: _InDoubt | None = None

    def write(self, records: Sequence[Record], lease: Lease | None) -> list[Outcome]:
        """As `Ledger.write`, with the driver's errors as they are."""
        settled = self._settle(records)
        if settled is not None:
            return settled
        try:
            return self._write(records, lease)
        except IntegrityError:
            # On PostgreSQL another scheduler may have accepted the same id in between: the second time it is seen.
            return self._write(records, lease)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _write(self, records: Sequence[Record], lease: Lease | None) -> list[Outcome]:
        connection, self._connection = self._connection or self._engines.write.connect(), None
        try:
            outcomes = self._write_on(connection, records, lease)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return outcomes

    def _write_on(self, connection: Connection, records: Sequence[Record], lease: Lease | None) -> list[Outcome]:
        begin(connection)
        count = None if lease is None else self._hold(connection, lease)
        outcomes = store.write(connection, self._statements, records, None if lease is None else lease.number)
        try:
            commit(connection)
        except DBAPIError:
            if lease is not None and count is not None:
                self._in_doubt = _InDoubt(lease, count, tuple(records), outcomes)
            raise
        return outcomes

    def _hold(self, connection: Connection, lease: Lease) -> int | None:
        """Raises LeaseLost. Returns what tells a commit in doubt; SQLite's cannot be: who asks is the process that does it."""
        if self._engines.dialect == "postgresql":
            return commits.count_up(connection, lease)
        leases.hold(connection, lease)
        return None

    def _settle(self, records: Sequence[Record]) -> list[Outcome] | None:
        """The outcomes, if the last write was carried out after all and this one repeats it."""
        doubt = self._in_doubt
        if doubt is None:
            return None
        with self._engines.write.begin() as connection:
            number = commits.count(connection, doubt.lease)
        self._in_doubt = None
        if number < doubt.number:
            return None
        if doubt.records != tuple(records):
            raise LedgerConflict("a write in doubt was not repeated as it was")
        return doubt.outcomes
