"""A `Ledger` in memory with the same contract as the one on a database, for tests and simulations.

Set `unavailable` and every call raises LedgerUnavailable until it is cleared: the database is away. The data outlive a scheduler,
as a database does: give the same object to the next one. No code is shared with the SQL ledger, so that each checks the other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from tokenmill_scheduler.core.records import TokenLogprobs, TokensGenerated, Transitioned, Updated
from tokenmill_scheduler.core.request import RUNNING, TERMINAL, State
from tokenmill_scheduler.ledger.port import (
    Lease,
    LeaseLost,
    LedgerConflict,
    LedgerUnavailable,
    Outcome,
    Record,
    RequestPage,
    RequestQuery,
    StoredOutput,
    StoredRequest,
    StoredTransition,
    Submission,
)


@dataclass(frozen=True, slots=True)
class _Entry:
    number: int
    digest: bytes
    stored: StoredRequest
    transitions: tuple[StoredTransition, ...]
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def arrival(self) -> tuple[float, int]:
        return self.stored.request.arrival_s, self.number


@dataclass
class MemoryLedger:
    """`writes` counts transactions carried out."""

    unavailable: bool = False
    writes: int = 0
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _epochs: dict[str, int] = field(default_factory=dict)
    _accepted: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def write(self, records: Sequence[Record], leases: Sequence[Lease] = ()) -> list[Outcome]:
        with self._available():
            if leases:
                raise LeaseLost("the ledger in memory gives no leases")
            staged: dict[str, _Entry] = {}
            # Submissions first: other records of the batch may be about them.
            outcomes = {
                index: self._submit(staged, record) for index, record in enumerate(records) if isinstance(record, Submission)
            }
            for record in records:
                if not isinstance(record, Submission):
                    self._apply(staged, record)
            self._entries.update(staged)
            self.writes += 1
            return [outcomes.get(index, Outcome.WRITTEN) for index in range(len(records))]

    def unfinished(self) -> Iterator[tuple[StoredRequest, StoredOutput]]:
        with self._available():
            open_entries = [entry for entry in self._entries.values() if entry.stored.state not in TERMINAL]
        for entry in sorted(open_entries, key=lambda entry: entry.arrival):
            yield entry.stored, StoredOutput(0, entry.token_ids, entry.logprobs)

    def find(self, request_id: str) -> StoredRequest | None:
        with self._available():
            entry = self._entries.get(request_id)
            return entry.stored if entry else None

    def payload_digest(self, request_id: str) -> bytes | None:
        with self._available():
            entry = self._entries.get(request_id)
            return entry.digest if entry else None

    def output(self, request_id: str, first_index: int = 0) -> StoredOutput:
        with self._available():
            entry = self._entries.get(request_id)
            if entry is None:
                return StoredOutput(first_index, ())
            return StoredOutput(first_index, entry.token_ids[first_index:], entry.logprobs[first_index:])

    def transitions(self, request_id: str) -> tuple[StoredTransition, ...]:
        with self._available():
            entry = self._entries.get(request_id)
            return entry.transitions if entry else ()

    def query(self, query: RequestQuery) -> RequestPage:
        with self._available():
            found = [entry for entry in self._entries.values() if _matches(entry.stored, query)]
            found.sort(key=lambda entry: entry.arrival, reverse=not query.oldest_first)
            if query.page_token:
                last = _parse_page_token(query.page_token)
                found = [entry for entry in found if (entry.arrival > last if query.oldest_first else entry.arrival < last)]
            shown = found[: query.limit]
            token = f"{shown[-1].arrival[0]!r} {shown[-1].number}" if len(found) > query.limit else ""
            return RequestPage(tuple(entry.stored for entry in shown), token)

    def next_epoch(self, executor: str, at_least: int) -> int:
        with self._available():
            self._epochs[executor] = max(self._epochs.get(executor, 0) + 1, at_least)
            return self._epochs[executor]

    def prune(self, finished_before_s: float, limit: int) -> int:
        with self._available():
            ended = [
                (entry.stored.finished_s, request_id)
                for request_id, entry in self._entries.items()
                if entry.stored.finished_s is not None and entry.stored.finished_s < finished_before_s
            ]
            for _, request_id in sorted(ended)[:limit]:
                del self._entries[request_id]
            return min(len(ended), limit)

    def close(self) -> None:
        pass

    def _available(self) -> threading.RLock:
        if self.unavailable:
            raise LedgerUnavailable("the database is away")
        return self._lock

    def _submit(self, staged: dict[str, _Entry], submission: Submission) -> Outcome:
        request = submission.request
        entry = staged.get(request.request_id) or self._entries.get(request.request_id)
        if entry is not None:
            return Outcome.JOINED if entry.digest == submission.payload_digest else Outcome.CONFLICT
        self._accepted += 1
        staged[request.request_id] = _Entry(
            self._accepted,
            submission.payload_digest,
            StoredRequest(request, State.WAITING, 0),
            (StoredTransition(None, State.WAITING, request.arrival_s, ""),),
        )
        return Outcome.WRITTEN

    def _apply(self, staged: dict[str, _Entry], record: Transitioned | TokensGenerated | Updated) -> None:
        match record:
            case Transitioned():
                staged[record.request_id] = _moved(self._open(staged, record.request_id), record)
            case Updated():
                staged[record.request_id] = _updated(self._open(staged, record.request_id), record)
            case TokensGenerated():
                start = 0
                for request_id, first_index, count in zip(record.request_ids, record.first_indexes, record.counts, strict=True):
                    entry = self._open(staged, request_id)
                    staged[request_id] = _grown(entry, first_index, record.token_ids[start : start + count], record)
                    start += count

    def _open(self, staged: dict[str, _Entry], request_id: str) -> _Entry:
        entry = staged.get(request_id) or self._entries.get(request_id)
        if entry is None or entry.stored.state in TERMINAL:
            raise LedgerConflict(f"{request_id}: no such request, or it has ended")
        return entry


def _moved(entry: _Entry, move: Transitioned) -> _Entry:
    if entry.stored.state is not move.before:
        raise LedgerConflict(f"{move.request_id}: is {entry.stored.state}, not {move.before}")
    stored = replace(
        entry.stored,
        state=move.after,
        executor=(move.executor or entry.stored.executor) if move.after in RUNNING else "",
        preemptions=entry.stored.preemptions + (move.after is State.PREEMPTED),
    )
    if move.after in TERMINAL:
        stored = replace(
            stored, finished_s=move.at_s, finish_reason=move.finish_reason, error=move.error, error_code=move.error_code
        )
    moves = (*entry.transitions, StoredTransition(move.before, move.after, move.at_s, move.reason))
    return replace(entry, stored=stored, transitions=moves)


def _updated(entry: _Entry, update: Updated) -> _Entry:
    request = entry.stored.request
    priority = request.priority if update.priority is None else update.priority
    deadline_s = request.deadline_s if update.deadline_s is None else update.deadline_s
    return replace(entry, stored=replace(entry.stored, request=replace(request, priority=priority, deadline_s=deadline_s)))


def _grown(entry: _Entry, first_index: int, token_ids: tuple[int, ...], record: TokensGenerated) -> _Entry:
    if not token_ids:
        return entry
    if first_index != len(entry.token_ids):
        raise LedgerConflict(f"{entry.stored.request.request_id}: index {len(entry.token_ids)} comes next, not {first_index}")
    first_token_s = record.at_s if entry.stored.first_token_s is None else entry.stored.first_token_s
    return replace(
        entry,
        stored=replace(entry.stored, num_output_tokens=first_index + len(token_ids), first_token_s=first_token_s),
        token_ids=entry.token_ids + token_ids,
        logprobs=entry.logprobs + record.logprobs.get(entry.stored.request.request_id, ()),
    )


def _matches(stored: StoredRequest, query: RequestQuery) -> bool:
    request = stored.request
    return (
        (not query.states or stored.state in query.states)
        and query.tenant in ("", request.tenant)
        and query.model in ("", request.model)
        and (query.min_priority is None or request.priority >= query.min_priority)
        and (query.max_priority is None or request.priority <= query.max_priority)
    )


def _parse_page_token(page_token: str) -> tuple[float, int]:
    arrival_s, number = page_token.split(" ")
    return float(arrival_s), int(number)
