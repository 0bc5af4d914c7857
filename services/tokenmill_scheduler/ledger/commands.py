"""Commands that one scheduler has for another. Works in the transaction of the connection it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select

from tokenmill_scheduler.ledger.codec import clean
from tokenmill_scheduler.ledger.port import Command, Lease, Verb
from tokenmill_scheduler.ledger.tables import commands


def send(connection: Connection, sent: Sequence[Command]) -> tuple[int, ...]:
    return tuple(connection.scalars(insert(commands).values(_row(one)).returning(commands.c.number)).one() for one in sent)


def pending(connection: Connection, numbers: Sequence[int]) -> frozenset[int]:
    return frozenset(connection.scalars(select(commands.c.number).where(commands.c.number.in_(numbers))))


def received(connection: Connection, lease: Lease) -> tuple[tuple[int, Command], ...]:
    rows = connection.execute(select(commands).where(commands.c.lease == lease.number).order_by(commands.c.number))
    return tuple((row.number, _command(row)) for row in rows)


def settle(connection: Connection, numbers: Sequence[int]) -> None:
    connection.execute(delete(commands).where(commands.c.number.in_(numbers)))


def _command(row: Row[Any]) -> Command:
    verb = Verb(row.verb)
    return Command(row.lease, row.request_id, verb, row.reason, row.priority, row.deadline_s, row.actor, row.detail)


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
    }
