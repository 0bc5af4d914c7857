"""Commands that one scheduler has for another. Works in the transaction of the connection it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select, update

from tokenmill_scheduler.ledger.codec import clean
from tokenmill_scheduler.ledger.records import Command, Handover, Lease, Outcome, Verb
from tokenmill_scheduler.ledger.tables import commands, executors, leases, requests

# Parameters of one IN list: SQLite takes 32,766.
_IDS_A_QUERY = 1000


def send(connection: Connection, sent: Sequence[Command]) -> tuple[int, ...]:
    return tuple(connection.scalars(insert(commands).values(_row(one)).returning(commands.c.number)).one() for one in sent)


def pending(connection: Connection, numbers: Sequence[int]) -> frozenset[int]:
    return frozenset(connection.scalars(select(commands.c.number).where(commands.c.number.in_(numbers))))


def received(connection: Connection, lease: Lease) -> tuple[tuple[int, Command], ...]:
    rows = connection.execute(select(commands).where(commands.c.lease == lease.number).order_by(commands.c.number))
    return tuple((row.number, _command(row)) for row in rows)


def settle(connection: Connection, numbers: Sequence[int]) -> None:
    connection.execute(delete(commands).where(commands.c.number.in_(numbers)))


def hand_over(connection: Connection, handover: Handover, lease: int | None) -> Outcome:
    """From `lease` to whoever drives the executor, whose lease cannot end before the requests are its own."""
    driver = select(leases.c.number).join(executors, executors.c.lease == leases.c.number)
    driver = driver.where(executors.c.executor == handover.executor, leases.c.number != lease)
    number = connection.scalar(driver.with_for_update(read=True, key_share=True, of=leases))
    if number is None:
        return Outcome.CONFLICT
    takes = [
        Command(number, request_id, Verb.TAKE, losses=losses)
        for request_id, losses in zip(handover.request_ids, handover.losses, strict=True)
    ]
    for start in range(0, len(takes), _IDS_A_QUERY):
        some = takes[start : start + _IDS_A_QUERY]
        theirs = requests.c.request_id.in_([take.request_id for take in some])
        connection.execute(update(requests).values(lease=number).where(theirs, requests.c.lease == lease))
        connection.execute(insert(commands), [_row(take) for take in some])
    return Outcome.WRITTEN


def _command(row: Row[Any]) -> Command:
    verb = Verb(row.verb)
    return Command(row.lease, row.request_id, verb, row.reason, row.priority, row.deadline_s, row.actor, row.detail, row.losses)


def _row(command: Command) -> dict[str, object]:
    return {
        "lease": command.lease,
        "request_id": command.request_id,
        "verb": command.verb.value,
        "reason": clean(command.reason),
        "priority": command.priority,
        "deadline_s": command.deadline_s,
        "actor": clean(command.actor),
        "detail": clean(command.detail),
        "losses": command.losses,
    }
