"""What operators did, and what they hold back. Works in the transaction of the connection it is given."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, delete, insert, select

from tokenmill_scheduler.ledger.codec import clean
from tokenmill_scheduler.ledger.records import Action, ActionPage, ActionQuery, ActionVerb, Hold
from tokenmill_scheduler.ledger.tables import actions, holds

_BEGINS_HOLD = frozenset({ActionVerb.PAUSE_QUEUE, ActionVerb.DRAIN_EXECUTOR, ActionVerb.SET_POLICY})
_ENDS_HOLD = frozenset({ActionVerb.RESUME_QUEUE, ActionVerb.UNDRAIN_EXECUTOR, ActionVerb.RESET_POLICY})


def record(connection: Connection, done: Sequence[Action]) -> None:
    """In order: of two holds on one target the later one holds."""
    for action in done:
        reason, detail = clean(action.reason), clean(action.detail)
        connection.execute(
            insert(actions).values(
                at_s=action.at_s,
                actor=action.actor,
                verb=action.verb.value,
                target=action.target,
                reason=reason,
                detail=detail,
            )
        )
        if action.verb in _BEGINS_HOLD | _ENDS_HOLD:
            connection.execute(delete(holds).where(holds.c.target == action.target))
        if action.verb in _BEGINS_HOLD:
            hold = {"target": action.target, "actor": action.actor, "reason": reason, "at_s": action.at_s, "detail": detail}
            connection.execute(insert(holds).values(hold))


def query(connection: Connection, query: ActionQuery) -> ActionPage:
    """Newest first. One row more than asked for tells whether there is a next page."""
    statement = select(actions).order_by(actions.c.number.desc()).limit(query.limit + 1)
    if query.target:
        statement = statement.where(actions.c.target == query.target)
    if query.page_token:
        statement = statement.where(actions.c.number < _parse_page_token(query.page_token))
    rows = connection.execute(statement).all()
    found = tuple(Action(row.at_s, row.actor, ActionVerb(row.verb), row.target, row.reason, row.detail) for row in rows)
    more = len(rows) > query.limit
    return ActionPage(found[: query.limit], str(rows[query.limit - 1].number) if more else "")


def in_force(connection: Connection) -> tuple[Hold, ...]:
    rows = connection.execute(select(holds).order_by(holds.c.target))
    return tuple(Hold(row.target, row.actor, row.reason, row.at_s, row.detail) for row in rows)


def prune(connection: Connection, before_s: float, limit: int) -> None:
    """A hold outlives the action that began it."""
    some = select(actions.c.number).where(actions.c.at_s < before_s).order_by(actions.c.at_s).limit(limit).scalar_subquery()
    connection.execute(delete(actions).where(actions.c.number.in_(some)))


def _parse_page_token(page_token: str) -> int:
    if not (page_token.isascii() and page_token.isdigit()) or int(page_token) >= 2**63:
        raise ValueError("the page token is not one that an earlier answer gave")
    return int(page_token)
