"""Whether a transaction was carried out whose answer was lost with the connection. PostgreSQL only: SQLite answers in the process.

Each transaction of a scheduler's writer counts one up in the row of its lease; the count that is found later tells. The server's
own transaction numbers cannot: those of transactions that a crash took are given out again, and `pg_xact_status` then speaks of
another's. Since a lease's row is deleted together with this one, counting up holds the lease, too. Works in the transaction of the
connection it is given.
"""

from __future__ import annotations

from sqlalchemy import Connection, bindparam, select, update

from tokenmill_scheduler.ledger.errors import LeaseLost
from tokenmill_scheduler.ledger.records import Lease
from tokenmill_scheduler.ledger.tables import commits

_OF_LEASE = commits.c.lease == bindparam("of_lease")
_COUNT_UP = update(commits).values(number=commits.c.number + 1).where(_OF_LEASE).returning(commits.c.number)


def count_up(connection: Connection, lease: Lease) -> int:
    """Returns the count once this transaction is carried out; until it ends the lease holds. Raises LeaseLost."""
    return _found(connection.scalar(_COUNT_UP, {"of_lease": lease.number}), lease)


def count(connection: Connection, lease: Lease) -> int:
    """Raises LeaseLost, or the driver's OperationalError while a transaction that counts up has not ended: ask again."""
    statement = select(commits.c.number).where(commits.c.lease == lease.number).with_for_update(nowait=True)
    return _found(connection.scalar(statement), lease)


def _found(number: int | None, lease: Lease) -> int:
    if number is None:
        raise LeaseLost(f"lease {lease.number} of scheduler {lease.scheduler} no longer holds: another scheduler has taken over")
    return number
