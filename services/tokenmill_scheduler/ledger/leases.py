"""Leases: which scheduler processes may write, what they hold, and how a fallen one's holdings pass to another.

The database's clock alone decides when a lease has run out, so that schedulers whose clocks differ agree. What makes a lease safe
is not the clock but its row: `hold` locks it for the rest of a writing transaction, so that a takeover, which deletes it, comes
either before the transaction, which then writes nothing, or after it. (The writer on PostgreSQL locks the row beside it, see
commits.py.) Works in the transaction of the connection it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from sqlalchemy import ColumnElement, Connection, Float, bindparam, case, delete, insert, literal_column, or_, select, update

from tokenmill_scheduler.core.events import KnownExecutor
from tokenmill_scheduler.core.plans import MAX_EPOCH, ExecutorDescription
from tokenmill_scheduler.ledger import queries
from tokenmill_scheduler.ledger.codec import pack_description, unpack_description
from tokenmill_scheduler.ledger.engine import driver
from tokenmill_scheduler.ledger.errors import EpochsUsedUp, ExecutorTaken, LeaseLost
from tokenmill_scheduler.ledger.records import Estate, Lease, LeaseStatus, StoredOutput, StoredRequest
from tokenmill_scheduler.ledger.tables import commands, commits, executors, leases, requests

_NOW_S: dict[str, ColumnElement[float]] = {
    "sqlite": literal_column("(julianday('now') - 2440587.5) * 86400.0", Float),
    "postgresql": literal_column("extract(epoch FROM clock_timestamp())::float8", Float),
}
_GIVEN_UP_S = 0.0
_HOLD = select(leases.c.number).where(leases.c.number == bindparam("lease")).with_for_update(read=True, key_share=True)
# There a transaction has the whole database to itself, and this runs with every commit: see `driver`.
_HOLD_SQLITE = "SELECT 1 FROM leases WHERE number = ?"


def take(connection: Connection, scheduler: str, lease_s: float) -> Lease:
    expires_s = _NOW_S[connection.dialect.name] + lease_s
    statement = insert(leases).values(scheduler=scheduler, expires_s=expires_s).returning(leases.c.number)
    lease = Lease(connection.execute(statement).scalar_one(), scheduler)
    connection.execute(insert(commits).values(lease=lease.number, number=0))
    return lease


def renew(connection: Connection, lease: Lease, lease_s: float) -> None:
    """Raises LeaseLost, also when it was given up. Does not wait for writes under way: it changes no key, see `hold`."""
    expires_s = _NOW_S[connection.dialect.name] + lease_s
    still = (leases.c.number == lease.number, leases.c.expires_s != _GIVEN_UP_S)
    if connection.execute(update(leases).values(expires_s=expires_s).where(*still)).rowcount != 1:
        raise _lost(lease)


def give_up(connection: Connection, lease: Lease) -> None:
    connection.execute(update(leases).values(expires_s=_GIVEN_UP_S).where(leases.c.number == lease.number))


def hold(connection: Connection, lease: Lease) -> None:
    """Raises LeaseLost unless it holds; it then holds until the transaction ends."""
    if connection.dialect.name == "sqlite":
        found = driver(connection).execute(_HOLD_SQLITE, (lease.number,)).fetchone()
    else:
        found = connection.execute(_HOLD, {"lease": lease.number}).first()
    if found is None:
        raise _lost(lease)


def statuses(connection: Connection) -> tuple[LeaseStatus, ...]:
    expired = leases.c.expires_s <= _NOW_S[connection.dialect.name]
    rows = connection.execute(select(leases.c.number, leases.c.scheduler, expired, leases.c.expires_s).order_by(leases.c.number))
    return tuple(
        LeaseStatus(Lease(number, scheduler), bool(expired), expires_s == _GIVEN_UP_S)
        for number, scheduler, expired, expires_s in rows
    )


def take_over(connection: Connection, lease: Lease, fallen: Sequence[int], told: Sequence[str]) -> Estate:
    """Waits for writes of the fallen that are under way, and no later one finds its lease."""
    hold(connection, lease)
    ending = delete(leases).where(leases.c.number.in_(fallen), leases.c.number != lease.number)
    ended = connection.execute(ending.returning(leases.c.number, leases.c.scheduler)).all()
    numbers = [number for number, _ in ended]
    former = [number for number, scheduler in ended if scheduler == lease.scheduler]
    connection.execute(delete(commands).where(commands.c.lease.in_(numbers)))
    connection.execute(update(executors).values(connected=0).where(executors.c.lease.in_(numbers)))
    own = (executors.c.lease.in_(former), executors.c.inherited == 0)
    connection.execute(update(executors).values(lease=lease.number).where(*own, executors.c.address.in_(told)))
    connection.execute(update(executors).values(lease=None).where(*own))
    inherit = update(executors).values(lease=lease.number, inherited=1).where(executors.c.lease.in_(numbers))
    inherited = connection.execute(inherit.returning(executors.c.executor, executors.c.address)).all()
    theirs = or_(requests.c.lease.in_(numbers), requests.c.lease.is_(None))
    adopt = update(requests).values(lease=lease.number).where(requests.c.finished_s.is_(None), theirs)
    adopted = connection.scalars(adopt.returning(requests.c.request_id)).all()
    return Estate(queries.in_order(connection, adopted), tuple((executor, address) for executor, address in sorted(inherited)))


def held(connection: Connection, lease: Lease, request_ids: Sequence[str]) -> tuple[tuple[StoredRequest, StoredOutput], ...]:
    return queries.in_order(connection, request_ids, requests.c.lease == lease.number, requests.c.finished_s.is_(None))


def claim_executor(connection: Connection, lease: Lease, executor: str, address: str, inherited: bool, at_least: int) -> int:
    """Returns the new epoch. Raises ExecutorTaken, EpochsUsedUp, LeaseLost."""
    hold(connection, lease)
    epoch = _next_epoch(connection, executor, at_least)
    driver = select(leases.c.number, leases.c.scheduler, executors.c.inherited).join_from(
        executors, leases, leases.c.number == executors.c.lease
    )
    row = connection.execute(driver.where(executors.c.executor == executor)).first()
    if row is not None and row.number != lease.number and (inherited or not row.inherited):
        raise ExecutorTaken(f"scheduler {row.scheduler} drives executor {executor}")
    values = {"address": address, "lease": lease.number, "inherited": int(inherited), "connected": 0}
    connection.execute(update(executors).values(values).where(executors.c.executor == executor))
    return epoch


def has_executor(connection: Connection, lease: Lease, executor: str) -> bool:
    driver = connection.scalar(select(executors.c.lease).where(executors.c.executor == executor))
    return bool(driver == lease.number)


def tell_executors(connection: Connection, lease: Lease, connected: Sequence[ExecutorDescription]) -> None:
    own = executors.c.lease == lease.number
    names = [description.name for description in connected]
    connection.execute(update(executors).values(connected=0).where(own, executors.c.executor.not_in(names)))
    for description in connected:
        values = {"connected": 1, "description": pack_description(description)}
        connection.execute(update(executors).values(values).where(own, executors.c.executor == description.name))


def known_executors(connection: Connection, lease: Lease) -> tuple[KnownExecutor, ...]:
    driven = select(executors).join(leases, leases.c.number == executors.c.lease)
    rows = connection.execute(driven.where(executors.c.description != "").order_by(executors.c.executor))
    return tuple(KnownExecutor(unpack_description(r.description), bool(r.connected) and r.lease != lease.number) for r in rows)


def _next_epoch(connection: Connection, executor: str, at_least: int) -> int:
    """Holds the executor's row until the transaction ends."""
    following = executors.c.epoch + 1
    new = {"address": "", "inherited": 0, "connected": 0, "description": ""}
    values = {"executor": executor, "epoch": max(1, at_least), **new}
    # ON CONFLICT is in each dialect's own insert; the other one's module is not needed.
    statement = import_module(f"sqlalchemy.dialects.{connection.dialect.name}").insert(executors).values(values)
    epoch = connection.scalar(
        statement.on_conflict_do_update(
            index_elements=["executor"],
            set_={"epoch": case((following < at_least, at_least), else_=following)},
            where=executors.c.epoch < MAX_EPOCH,
        ).returning(executors.c.epoch)
    )
    if epoch is None:
        raise EpochsUsedUp(executor)
    assert isinstance(epoch, int)
    return epoch


def _lost(lease: Lease) -> LeaseLost:
    return LeaseLost(f"lease {lease.number} of scheduler {lease.scheduler} no longer holds: another scheduler has taken over")
