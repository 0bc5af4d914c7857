"""Epochs and leases: who drives an executor.

The database's clock decides when a lease has run out, so that schedulers whose clocks differ agree. What makes a lease safe is not
the clock but its epoch: `hold` locks the lease rows for the rest of a writing transaction, so that a lease is taken either before
the transaction, which then writes nothing, or after it. Works in the transaction of the connection it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Float, case, delete, literal_column, select, update
from sqlalchemy.dialects import postgresql, sqlite

from tokenmill_scheduler.ledger.port import Lease, LeaseLost
from tokenmill_scheduler.ledger.tables import executors, leases

_INSERT: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
_NOW_S: dict[str, ColumnElement[float]] = {
    "sqlite": literal_column("(julianday('now') - 2440587.5) * 86400.0", Float),
    "postgresql": literal_column("extract(epoch FROM clock_timestamp())::float8", Float),
}


def next_epoch(connection: Connection, executor: str, at_least: int) -> int:
    """A number never given before for this executor and ≥ `at_least`. Holds the executor's row until the transaction ends."""
    following = executors.c.epoch + 1
    statement = _INSERT[connection.dialect.name](executors).values(executor=executor, epoch=max(1, at_least))
    epoch = connection.scalar(
        statement.on_conflict_do_update(
            index_elements=["executor"], set_={"epoch": case((following < at_least, at_least), else_=following)}
        ).returning(executors.c.epoch)
    )
    assert isinstance(epoch, int)
    return epoch


def acquire(connection: Connection, executor: str, owner: str, lease_s: float, at_least: int) -> Lease | None:
    """A lease under a new epoch, or None while another owner's has not run out (the caller then rolls back)."""
    epoch = next_epoch(connection, executor, at_least)
    now_s = _NOW_S[connection.dialect.name]
    held = select(leases.c.owner).where(leases.c.executor == executor, leases.c.owner != owner, leases.c.expires_s > now_s)
    # The row lock waits for writes that this lease fences, see `hold`.
    if connection.execute(held.with_for_update()).first():
        return None
    values = {"owner": owner, "epoch": epoch, "expires_s": now_s + lease_s}
    statement = _INSERT[connection.dialect.name](leases).values(executor=executor, **values)
    connection.execute(statement.on_conflict_do_update(index_elements=["executor"], set_=values))
    return Lease(executor, owner, epoch)


def renew(connection: Connection, lease: Lease, lease_s: float) -> bool:
    """False when it was taken or given up. One that has only run out is renewed."""
    expires_s = _NOW_S[connection.dialect.name] + lease_s
    return connection.execute(update(leases).values(expires_s=expires_s).where(*_same(lease))).rowcount == 1


def release(connection: Connection, lease: Lease) -> None:
    """Gives the lease up; nothing happens if it was lost already."""
    connection.execute(delete(leases).where(*_same(lease)))


def hold(connection: Connection, held: Sequence[Lease]) -> None:
    """Raises LeaseLost unless all these leases hold; they then hold until the transaction ends."""
    for lease in held:
        statement = select(leases.c.epoch).where(*_same(lease)).with_for_update(read=True)
        if connection.execute(statement).first() is None:
            raise LeaseLost(f"executor {lease.executor}: the lease of {lease.owner} under epoch {lease.epoch} no longer holds")


def _same(lease: Lease) -> tuple[ColumnElement[bool], ...]:
    return (leases.c.executor == lease.executor, leases.c.owner == lease.owner, leases.c.epoch == lease.epoch)
