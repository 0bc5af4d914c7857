"""Folds the records of one transaction into few rows: one chunk of tokens and one update of its row a request.

Pure. What contradicts itself within the batch, or the table of legal moves, is refused here; what contradicts the database is
refused by the guards of store.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tokenmill_scheduler.core.effects import TokensGenerated, Transitioned
from tokenmill_scheduler.core.events import Updated
from tokenmill_scheduler.core.request import RUNNING, TERMINAL, TRANSITIONS, State
from tokenmill_scheduler.ledger.codec import pack_logprobs, pack_tokens
from tokenmill_scheduler.ledger.errors import LedgerConflict
from tokenmill_scheduler.ledger.records import Action, Handover, Record, Submission


@dataclass(slots=True)
class Chunk:
    """All new tokens of one request, from `first_index` to before `end`; `at_s` is when the first of them was made."""

    first_index: int
    end: int
    token_ids: bytes
    logprobs: bytes
    at_s: float


@dataclass(slots=True)
class Change:
    """All moves of one request, as one update of its row: guarded by `before`, the state ahead of the first move.

    `executor` and `cached_tokens` None leave them as they are. `ending` is the move into a terminal state.
    """

    before: State
    after: State
    executor: str | None = None
    preemptions: int = 0
    cached_tokens: int | None = None
    ending: Transitioned | None = None


@dataclass(slots=True)
class Batch:
    """Keyed by request id, in order of first appearance."""

    submissions: list[Submission] = field(default_factory=list)
    chunks: dict[str, Chunk] = field(default_factory=dict)
    updates: dict[str, Updated] = field(default_factory=dict)
    changes: dict[str, Change] = field(default_factory=dict)
    transitions: list[Transitioned] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    handovers: list[Handover] = field(default_factory=list)

    def ended(self) -> list[str]:
        return [request_id for request_id, change in self.changes.items() if change.ending]


def fold(records: Iterable[Record]) -> Batch:
    """Raises LedgerConflict when the records of one request do not follow from each other, or TRANSITIONS lacks a move."""
    batch = Batch()
    for record in records:
        match record:
            case TokensGenerated():
                _add_tokens(batch, record)
            case Transitioned():
                _add_transition(batch, record)
            case Submission():
                batch.submissions.append(record)
            case Updated():
                _add_update(batch, record)
            case Action():
                batch.actions.append(record)
            case Handover():
                batch.handovers.append(record)
    return batch


def _add_tokens(batch: Batch, record: TokensGenerated) -> None:
    blob = pack_tokens(record.token_ids)
    start = 0
    for request_id, first_index, count in zip(record.request_ids, record.first_indexes, record.counts, strict=True):
        stop = start + 4 * count
        logprobs = pack_logprobs(record.logprobs[request_id]) if request_id in record.logprobs else b""
        _add_chunk(batch, request_id, Chunk(first_index, first_index + count, blob[start:stop], logprobs, record.at_s))
        start = stop


def _add_chunk(batch: Batch, request_id: str, chunk: Chunk) -> None:
    _check_not_ended(batch, request_id)
    if not chunk.token_ids:
        return
    earlier = batch.chunks.setdefault(request_id, chunk)
    if earlier is chunk:
        return
    if earlier.end != chunk.first_index:
        raise LedgerConflict(f"{request_id}: tokens from index {chunk.first_index} do not follow index {earlier.end - 1}")
    earlier.end = chunk.end
    earlier.token_ids += chunk.token_ids
    earlier.logprobs += chunk.logprobs


def _add_transition(batch: Batch, move: Transitioned) -> None:
    if move.after not in TRANSITIONS[move.before]:
        raise LedgerConflict(f"{move.request_id}: no request moves from {move.before} to {move.after}")
    batch.transitions.append(move)
    change = batch.changes.setdefault(move.request_id, Change(before=move.before, after=move.before))
    if change.ending or change.after != move.before:
        raise LedgerConflict(f"{move.request_id}: a move from {move.before} follows a move to {change.after}")
    change.after = move.after
    if move.after not in RUNNING:
        change.executor = ""
    elif move.executor:
        change.executor = move.executor
    if move.after is State.PREEMPTED:
        change.preemptions += 1
    if move.cached_tokens is not None:
        change.cached_tokens = move.cached_tokens
    if move.after in TERMINAL:
        change.ending = move


def _add_update(batch: Batch, update: Updated) -> None:
    _check_not_ended(batch, update.request_id)
    earlier = batch.updates.get(update.request_id, update)
    batch.updates[update.request_id] = Updated(
        update.request_id,
        priority=earlier.priority if update.priority is None else update.priority,
        deadline_s=earlier.deadline_s if update.deadline_s is None else update.deadline_s,
    )


def _check_not_ended(batch: Batch, request_id: str) -> None:
    change = batch.changes.get(request_id)
    if change and change.ending:
        raise LedgerConflict(f"{request_id}: a record follows its move to {change.after}")
