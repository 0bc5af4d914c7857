"""Whether a transaction was carried out whose answer was lost with the connection. PostgreSQL only: SQLite answers in the process.

Each transaction of a scheduler's writer counts one up in the row of its lease; the count that is found later tells. The server's
own transaction numbers cannot: those of transactions that a crash took are given out again, and `pg_xact_status` then speaks of
another's. Works in the transaction of the connection it is given.
"""

from __future__ import annotations

from sqlalchemy import Connection, select, update

from tokenmill_scheduler.ledger.port import Lease, LeaseLost
from tokenmill_scheduler.ledger.tables import commits


def count_up(connection: Connection, lease: Lease) -> int:
    """Returns the count once this transaction is carried out; locks the row until then. `leases.hold` comes before it."""
    statement = update(commits).values(number=commits.c.number + 1).where(commits.c.lease == lease.number)
    return int(connection.execute(statement.returning(commits.c.number)).scalar_one())


def count(connection: Connection, lease: Lease) -> int:
    """Raises LeaseLost, or the driver's OperationalError while a transaction that counts up has not ended: ask again."""
    statement = select(commits.c.number).where(commits.c.lease == lease.number).with_for_update(nowait=True)
    number = connection.scalar(statement)
    if number is None:
        raise LeaseLost(f"lease {lease.number} of scheduler {lease.scheduler} no longer holds: another scheduler has taken over")
    return int(number)
