"""The statements that write, each over a table expression `v` of parameter rows (bulk.py), each with its guard in the WHERE.

A statement whose guard fails for a row writes nothing for it, which the caller sees in the row count.
"""

from __future__ import annotations

from sqlalchemy import (
    ColumnElement,
    Delete,
    Double,
    FromClause,
    Insert,
    Integer,
    LargeBinary,
    Text,
    Update,
    cast,
    delete,
    func,
    insert,
    literal,
    select,
    update,
)

from tokenmill_scheduler.ledger.bulk import Bulk, Columns
from tokenmill_scheduler.ledger.tables import requests, tails, tokens, transitions

# Columns of a request that its row does not start with.
_SET_LATER = frozenset({"number", "first_token_s", "finished_s", "finish_reason"})
_EMPTY = literal(b"", LargeBinary)
_UNFINISHED = requests.c.finished_s.is_(None)

_REQUEST: Columns = {name: column.type for name, column in requests.c.items() if name not in _SET_LATER}
_TRANSITION: Columns = {name: column.type for name, column in transitions.c.items() if name != "number"}
_FIRST_CHUNK: Columns = {
    "request_id": Text(),
    "count": Integer(),
    "token_ids": LargeBinary(),
    "logprobs": LargeBinary(),
    "first_token_s": Double(),
}
_NEXT_CHUNK: Columns = {
    "request_id": Text(),
    "first_index": Integer(),
    "count": Integer(),
    "token_ids": LargeBinary(),
    "logprobs": LargeBinary(),
}
_UPDATE: Columns = {"request_id": Text(), "priority": Integer(), "deadline_s": Double()}
_CHANGE: Columns = {
    "request_id": Text(),
    "before_state": Text(),
    "after_state": Text(),
    "executor": Text(),
    "preemptions": Integer(),
    "finished_s": Double(),
    "finish_reason": Text(),
    "error": Text(),
    "error_code": Integer(),
}
_IDS: Columns = {"request_id": Text()}


class Statements:
    """All of them for one dialect, built once."""

    def __init__(self, dialect: str) -> None:
        self.insert_requests = Bulk(dialect, _REQUEST, _insert_requests)
        self.insert_transitions = Bulk(dialect, _TRANSITION, _insert_transitions)
        self.start_tails = Bulk(dialect, _FIRST_CHUNK, _start_tails)
        self.grow_tails = Bulk(dialect, _NEXT_CHUNK, _grow_tails)
        self.copy_tails = Bulk(dialect, _IDS, _copy_tails)
        self.empty_tails = Bulk(dialect, _IDS, _empty_tails)
        self.sum_up_tails = Bulk(dialect, _IDS, _sum_up_tails)
        self.delete_tails = Bulk(dialect, _IDS, _delete_tails)
        self.update_requests = Bulk(dialect, _UPDATE, _update_requests)
        self.change_states = Bulk(dialect, _CHANGE, _change_states)


def _insert_requests(v: FromClause) -> Insert:
    return insert(requests).from_select(list(_REQUEST), select(*(v.c[name] for name in _REQUEST)))


def _insert_transitions(v: FromClause) -> Insert:
    return insert(transitions).from_select(list(_TRANSITION), select(*(v.c[name] for name in _TRANSITION)))


def _start_tails(v: FromClause) -> Insert:
    """The first tokens of a request: there must be such a request, not ended, and (the primary key says) no tail."""
    source = select(v.c.request_id, literal(0), v.c["count"], v.c.token_ids, v.c.logprobs, v.c.first_token_s)
    guarded = source.join_from(v, requests, requests.c.request_id == v.c.request_id).where(_UNFINISHED)
    return insert(tails).from_select(["request_id", "first_index", "count", "token_ids", "logprobs", "first_token_s"], guarded)


def _grow_tails(v: FromClause) -> Update:
    """Further tokens: they must start at the index after the last one stored."""
    return (
        update(tails)
        .values(
            {
                "count": tails.c["count"] + v.c["count"],
                "token_ids": _joined(tails.c.token_ids, v.c.token_ids),
                "logprobs": _joined(tails.c.logprobs, v.c.logprobs),
            }
        )
        .where(tails.c.request_id == v.c.request_id, tails.c.first_index + tails.c["count"] == v.c.first_index)
    )


def _joined(left: ColumnElement[bytes], right: ColumnElement[bytes]) -> ColumnElement[bytes]:
    """SQLite's `||` makes text of two blobs, with the same bytes."""
    return cast(left.op("||")(right), LargeBinary)


def _copy_tails(v: FromClause) -> Insert:
    logprobs = func.nullif(tails.c.logprobs, _EMPTY)
    source = select(tails.c.request_id, tails.c.first_index, tails.c["count"], tails.c.token_ids, logprobs)
    named = source.join_from(v, tails, tails.c.request_id == v.c.request_id).where(tails.c["count"] > 0)
    return insert(tokens).from_select(["request_id", "first_index", "count", "token_ids", "logprobs"], named)


def _empty_tails(v: FromClause) -> Update:
    return (
        update(tails)
        .values({"first_index": tails.c.first_index + tails.c["count"], "count": 0, "token_ids": _EMPTY, "logprobs": _EMPTY})
        .where(tails.c.request_id == v.c.request_id)
    )


def _sum_up_tails(v: FromClause) -> Update:
    """What an ended request keeps of its tail."""
    return (
        update(requests)
        .values(num_output_tokens=tails.c.first_index + tails.c["count"], first_token_s=tails.c.first_token_s)
        .where(requests.c.request_id == v.c.request_id, tails.c.request_id == v.c.request_id)
    )


def _delete_tails(v: FromClause) -> Delete:
    return delete(tails).where(tails.c.request_id.in_(select(v.c.request_id)))


def _update_requests(v: FromClause) -> Update:
    return (
        update(requests)
        .values(
            priority=func.coalesce(v.c.priority, requests.c.priority),
            deadline_s=func.coalesce(v.c.deadline_s, requests.c.deadline_s),
        )
        .where(requests.c.request_id == v.c.request_id, _UNFINISHED)
    )


def _change_states(v: FromClause) -> Update:
    """All moves of a request in one: it must be in the state that the first of them leaves."""
    return (
        update(requests)
        .values(
            state=v.c.after_state,
            executor=func.coalesce(v.c.executor, requests.c.executor),
            preemptions=requests.c.preemptions + v.c.preemptions,
            finished_s=v.c.finished_s,
            finish_reason=v.c.finish_reason,
            error=v.c.error,
            error_code=v.c.error_code,
        )
        .where(requests.c.request_id == v.c.request_id, requests.c.state == v.c.before_state)
    )
