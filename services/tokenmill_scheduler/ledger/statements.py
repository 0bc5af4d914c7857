"""The statements that write, each over `v`, the table of its parameters (bulk.py), each with its guard in the WHERE.

A statement whose guard fails for a row writes nothing for it, which the caller sees in the row count.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Delete,
    Double,
    Insert,
    Integer,
    LargeBinary,
    Text,
    Update,
    cast,
    delete,
    func,
    insert,
    literal_column,
    or_,
    select,
    update,
)

from tokenmill_scheduler.ledger.bulk import Bulk, Columns, Types
from tokenmill_scheduler.ledger.tables import requests, tails, tokens, transitions

# Columns of a request that its row does not start with.
_SET_LATER = frozenset({"number", "first_token_s", "finished_s", "finish_reason"})
# In the text of the statement: only `v` has parameters.
_ZERO = literal_column("0", Integer)
_EMPTY = cast(literal_column("''"), LargeBinary)
_UNFINISHED = requests.c.finished_s.is_(None)

_REQUEST: Types = {name: column.type for name, column in requests.c.items() if name not in _SET_LATER}
_TRANSITION: Types = {name: column.type for name, column in transitions.c.items() if name != "number"}
_FIRST_CHUNK: Types = {
    "request_id": Text(),
    "count": Integer(),
    "token_ids": LargeBinary(),
    "logprobs": LargeBinary(),
    "first_token_s": Double(),
}
_NEXT_CHUNK: Types = {
    "request_id": Text(),
    "first_index": Integer(),
    "count": Integer(),
    "token_ids": LargeBinary(),
    "logprobs": LargeBinary(),
}
_UPDATE: Types = {"request_id": Text(), "priority": Integer(), "deadline_s": Double()}
_CHANGE: Types = {
    "request_id": Text(),
    "before_state": Text(),
    "after_state": Text(),
    "executor": Text(),
    "preemptions": Integer(),
    "cached_tokens": Integer(),
    "finished_s": Double(),
    "finish_reason": Text(),
    "error": Text(),
    "error_code": Integer(),
    "lease": BigInteger(),
}
_IDS: Types = {"request_id": Text()}


class Statements:
    """All of them for one dialect, built once."""

    def __init__(self, dialect: str) -> None:
        self.insert_requests = Bulk(dialect, _REQUEST, _insert_requests)
        self.insert_transitions = Bulk(dialect, _TRANSITION, _insert_transitions)
        self.start_tails = Bulk(dialect, _FIRST_CHUNK, _start_tails)
        self.grow_tails = Bulk(dialect, _NEXT_CHUNK, _grow_tails)
        self.copy_tails = Bulk(dialect, _IDS, _copy_tails)
        # On PostgreSQL both in one, for a round trip less in every commit; SQLite has no such statement.
        moves = (_move_tails,) if dialect == "postgresql" else (_copy_tails, _empty_tails)
        self.move_tails = [Bulk(dialect, _IDS, build) for build in moves]
        self.sum_up_tails = Bulk(dialect, _IDS, _sum_up_tails)
        self.delete_tails = Bulk(dialect, _IDS, _delete_tails)
        self.update_requests = Bulk(dialect, _UPDATE, _update_requests)
        self.change_states = Bulk(dialect, _CHANGE, _change_states)


def _insert_requests(v: Columns) -> Insert:
    return insert(requests).from_select(list(_REQUEST), select(*(v[name] for name in _REQUEST)))


def _insert_transitions(v: Columns) -> Insert:
    return insert(transitions).from_select(list(_TRANSITION), select(*(v[name] for name in _TRANSITION)))


def _start_tails(v: Columns) -> Insert:
    """The first tokens of a request: there must be such a request, not ended, and (the primary key says) no tail."""
    source = select(v["request_id"], _ZERO, v["count"], v["token_ids"], v["logprobs"], v["first_token_s"])
    guarded = source.select_from(requests).where(requests.c.request_id == v["request_id"], _UNFINISHED)
    return insert(tails).from_select(["request_id", "first_index", "count", "token_ids", "logprobs", "first_token_s"], guarded)


def _grow_tails(v: Columns) -> Update:
    """Further tokens: they must start at the index after the last one stored."""
    return (
        update(tails)
        .values(
            {
                "count": tails.c["count"] + v["count"],
                "token_ids": _joined(tails.c.token_ids, v["token_ids"]),
                "logprobs": _joined(tails.c.logprobs, v["logprobs"]),
            }
        )
        .where(tails.c.request_id == v["request_id"], tails.c.first_index + tails.c["count"] == v["first_index"])
    )


def _joined(left: ColumnElement[bytes], right: ColumnElement[bytes]) -> ColumnElement[bytes]:
    """SQLite's `||` makes text of two blobs, with the same bytes."""
    return cast(left.op("||")(right), LargeBinary)


def _copy_tails(v: Columns) -> Insert:
    logprobs = func.nullif(tails.c.logprobs, _EMPTY)
    source = select(tails.c.request_id, tails.c.first_index, tails.c["count"], tails.c.token_ids, logprobs)
    named = source.where(tails.c.request_id == v["request_id"], tails.c["count"] > _ZERO)
    return insert(tokens).from_select(["request_id", "first_index", "count", "token_ids", "logprobs"], named)


def _empty_tails(v: Columns) -> Update:
    return _emptied().where(tails.c.request_id == v["request_id"])


def _emptied() -> Update:
    end = tails.c.first_index + tails.c["count"]
    return update(tails).values({"first_index": end, "count": _ZERO, "token_ids": _EMPTY, "logprobs": _EMPTY})


def _move_tails(v: Columns) -> Update:
    copied = _copy_tails(v).returning(tokens.c.request_id).cte("copied")
    return _emptied().where(tails.c.request_id == copied.c.request_id)


def _sum_up_tails(v: Columns) -> Update:
    """What an ended request keeps of its tail."""
    return (
        update(requests)
        .values(num_output_tokens=tails.c.first_index + tails.c["count"], first_token_s=tails.c.first_token_s)
        .where(requests.c.request_id == v["request_id"], tails.c.request_id == v["request_id"])
    )


def _delete_tails(v: Columns) -> Delete:
    return delete(tails).where(tails.c.request_id.in_(select(v["request_id"])))


def _update_requests(v: Columns) -> Update:
    return (
        update(requests)
        .values(
            priority=func.coalesce(v["priority"], requests.c.priority),
            deadline_s=func.coalesce(v["deadline_s"], requests.c.deadline_s),
        )
        .where(requests.c.request_id == v["request_id"], _UNFINISHED)
    )


def _change_states(v: Columns) -> Update:
    """All moves of a request in one: it must be in the state that the first of them leaves, and no other scheduler's."""
    own = or_(v["lease"].is_(None), requests.c.lease.is_(None), requests.c.lease == v["lease"])
    return (
        update(requests)
        .values(
            state=v["after_state"],
            executor=func.coalesce(v["executor"], requests.c.executor),
            preemptions=requests.c.preemptions + v["preemptions"],
            cached_tokens=func.coalesce(v["cached_tokens"], requests.c.cached_tokens),
            finished_s=v["finished_s"],
            finish_reason=v["finish_reason"],
            error=v["error"],
            error_code=v["error_code"],
            lease=func.coalesce(v["lease"], requests.c.lease),
        )
        .where(requests.c.request_id == v["request_id"], requests.c.state == v["before_state"], own)
    )
