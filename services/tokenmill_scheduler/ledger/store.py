"""Writes: what one transaction does with a batch of records, and pruning. Works in the transaction of the connection it is given.

Raises LedgerConflict when a guard did not hold; the caller then rolls everything back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any
from zlib import crc32

from sqlalchemy import Connection, and_, bindparam, delete, or_, select

from tokenmill_scheduler.core.effects import Transitioned
from tokenmill_scheduler.core.request import Request, State
from tokenmill_scheduler.ledger import actions, commands
from tokenmill_scheduler.ledger.batch import Batch, Change, Chunk, fold
from tokenmill_scheduler.ledger.codec import clean, pack_parameters, pack_tokens
from tokenmill_scheduler.ledger.engine import driver
from tokenmill_scheduler.ledger.records import Handover, Outcome, Record, Submission
from tokenmill_scheduler.ledger.statements import Statements
from tokenmill_scheduler.ledger.tables import requests

# A tail moves to `tokens` every so many tokens; sooner with log probabilities, whose tails are wide. PostgreSQL writes a tail that
# grows to its log as a whole: with half as many tokens to a tail it logs a quarter less.
TAIL_TOKENS = 32
TAIL_TOKENS_WITH_LOGPROBS = 8
# Requests that began together are spread over so many transactions: in fewer, each would hold up the tokens of all streams.
_TAIL_PHASES = TAIL_TOKENS
_DIGESTS = select(requests.c.request_id, requests.c.payload_digest).where(
    requests.c.request_id.in_(bindparam("request_ids", expanding=True))
)
# With every request: see `driver`.
_DIGEST_SQLITE = "SELECT request_id, payload_digest FROM requests WHERE request_id = ?"

Row = tuple[Any, ...]


def write(connection: Connection, statements: Statements, records: Sequence[Record], lease: int | None) -> list[Outcome]:
    """Answers for each record. Submissions first: the other records of the batch may be about them.

    Requests that are submitted become those of `lease`. Most batches are further tokens and nothing else.
    """
    batch = fold(records)
    outcomes = _submit(connection, statements, batch.submissions, lease) if batch.submissions else iter(())
    if batch.chunks:
        _append_tokens(connection, statements, batch)
    if batch.updates:
        updates = [(update.request_id, update.priority, update.deadline_s) for update in batch.updates.values()]
        statements.update_requests.run_all(connection, updates, "update")
    if batch.changes:
        _move(connection, statements, batch, lease)
    actions.record(connection, batch.actions)
    # When all else of these requests is written: their lease is another one then.
    handed_over = iter([commands.hand_over(connection, handover, lease) for handover in batch.handovers])
    return [_outcome(record, outcomes, handed_over) for record in records]


def _outcome(record: Record, submitted: Iterator[Outcome], handed_over: Iterator[Outcome]) -> Outcome:
    match record:
        case Submission():
            return next(submitted)
        case Handover():
            return next(handed_over)
        case _:
            return Outcome.WRITTEN


def _submit(
    connection: Connection, statements: Statements, submissions: Sequence[Submission], lease: int | None
) -> Iterator[Outcome]:
    """The first of an id is written, the others are told whether they are the same."""
    digests = _stored_digests(connection, [submission.request.request_id for submission in submissions])
    outcomes: list[Outcome] = []
    new: list[Submission] = []
    for submission in submissions:
        stored = digests.get(submission.request.request_id)
        if stored is None:
            digests[submission.request.request_id] = submission.payload_digest
            new.append(submission)
            outcomes.append(Outcome.WRITTEN)
        else:
            outcomes.append(Outcome.JOINED if stored == submission.payload_digest else Outcome.CONFLICT)
    rows = [(request, submission.payload_digest) for submission in new for request in submission.requests]
    statements.insert_requests.run_all(connection, [_request_row(request, digest, lease) for request, digest in rows], "submission")
    statements.insert_transitions.run_all(connection, [_arrival_row(request) for request, _ in rows], "submission")
    return iter(outcomes)


def _stored_digests(connection: Connection, request_ids: Sequence[str]) -> dict[str, bytes]:
    if connection.dialect.name == "sqlite":
        ask = driver(connection).execute
        return {found: digest for request_id in request_ids for found, digest in ask(_DIGEST_SQLITE, (request_id,))}
    rows = connection.execute(_DIGESTS, {"request_ids": request_ids})
    return {row.request_id: row.payload_digest for row in rows}


def _append_tokens(connection: Connection, statements: Statements, batch: Batch) -> None:
    """A tail that has become long moves to `tokens`; those of requests that end in this batch move in `_move`."""
    first = [_first_chunk_row(request_id, chunk) for request_id, chunk in batch.chunks.items() if chunk.first_index == 0]
    rest = [_next_chunk_row(request_id, chunk) for request_id, chunk in batch.chunks.items() if chunk.first_index > 0]
    statements.start_tails.run_all(connection, first, "first tokens")
    statements.grow_tails.run_all(connection, rest, "tokens")
    ended = set(batch.ended())
    full = [(id_,) for id_, chunk in batch.chunks.items() if id_ not in ended and _fills_tail(id_, chunk)]
    for statement in statements.move_tails:
        statement.run(connection, full)


def _fills_tail(request_id: str, chunk: Chunk) -> bool:
    limit = TAIL_TOKENS_WITH_LOGPROBS if chunk.logprobs else TAIL_TOKENS
    offset = limit - first_move(request_id, limit)
    return (chunk.first_index + offset) // limit < (chunk.end + offset) // limit


def first_move(request_id: str, limit: int) -> int:
    """After how many tokens, at most `limit`, a tail moves for the first time; from then on it does every `limit` tokens."""
    return limit - _phase(request_id) * limit // _TAIL_PHASES


@lru_cache(maxsize=4096)
def _phase(request_id: str) -> int:
    """Asked at every token."""
    return crc32(request_id.encode()) % _TAIL_PHASES


def _move(connection: Connection, statements: Statements, batch: Batch, lease: int | None) -> None:
    changes = [_change_row(id_, change, lease) for id_, change in batch.changes.items()]
    statements.change_states.run_all(connection, changes, "move")
    statements.insert_transitions.run_all(connection, [_transition_row(move) for move in batch.transitions], "transition")
    ended = [(request_id,) for request_id in batch.ended()]
    statements.sum_up_tails.run(connection, ended)
    statements.copy_tails.run(connection, ended)
    statements.delete_tails.run(connection, ended)


def prune(connection: Connection, before_s: float, limit: int) -> int:
    """Deletes up to `limit` requests that ended before then, oldest first, with all that belongs to them, and as many actions.

    The first choice of several goes, with all others, when none of them has ended later.
    """
    other = requests.alias("other")
    ended_later = or_(other.c.finished_s.is_(None), other.c.finished_s >= before_s)
    # The partial index is used where its condition is repeated.
    goes_on = select(other.c.number).where(other.c.parent != "", other.c.parent == requests.c.request_id, ended_later).exists()
    oldest = select(requests.c.request_id).where(requests.c.finished_s < before_s, requests.c.parent == "", ~goes_on)
    some = connection.scalars(oldest.order_by(requests.c.finished_s).limit(limit)).all()
    actions.prune(connection, before_s, limit)
    further = and_(requests.c.parent != "", requests.c.parent.in_(some))
    pruned = connection.execute(delete(requests).where(further)).rowcount
    return pruned + connection.execute(delete(requests).where(requests.c.request_id.in_(some))).rowcount


def _request_row(request: Request, payload_digest: bytes, lease: int | None) -> Row:
    return (
        request.request_id,
        b"" if request.parent else payload_digest,
        request.model,
        request.tenant,
        request.priority,
        State.WAITING.value,
        request.arrival_s,
        request.deadline_s,
        int(request.detached),
        "",
        0,
        0,
        "",
        0,
        lease,
        request.lane.name.lower(),
        request.queue_deadline_s,
        request.retry_of,
        request.parent,
        request.choice,
        0,
        pack_parameters(request),
        pack_tokens(request.prompt),
    )


def _arrival_row(request: Request) -> Row:
    return (request.request_id, None, State.WAITING.value, request.arrival_s, "", "")


def _transition_row(move: Transitioned) -> Row:
    return (move.request_id, move.before.value, move.after.value, move.at_s, clean(move.reason), move.executor)


def _first_chunk_row(request_id: str, chunk: Chunk) -> Row:
    return (request_id, chunk.end, chunk.token_ids, chunk.logprobs, chunk.at_s)


def _next_chunk_row(request_id: str, chunk: Chunk) -> Row:
    return (request_id, chunk.first_index, chunk.end - chunk.first_index, chunk.token_ids, chunk.logprobs)


def _change_row(request_id: str, change: Change, lease: int | None) -> Row:
    guard = (request_id, change.before.value, change.after.value, change.executor, change.preemptions, change.cached_tokens)
    ending = change.ending
    if ending is None:
        return (*guard, None, None, "", 0, lease)
    reason = ending.finish_reason.value if ending.finish_reason else None
    return (*guard, ending.at_s, reason, clean(ending.error), ending.error_code, lease)
