"""A `Ledger` in memory with the same contract as the one on a database, for tests and simulations.

Set `unavailable` and every call raises LedgerUnavailable until it is cleared: the database is away. The data outlive a scheduler,
as a database does: give the same object to the next one. No code is shared with the SQL ledger, so that each checks the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tokenmill_scheduler.core.effects import TokensGenerated, Transitioned
from tokenmill_scheduler.core.events import KnownExecutor, Updated
from tokenmill_scheduler.core.plans import ExecutorDescription, TokenLogprobs
from tokenmill_scheduler.core.request import RUNNING, TERMINAL, TRANSITIONS, State
from tokenmill_scheduler.ledger.errors import LeaseLost, LedgerConflict, LedgerUnavailable
from tokenmill_scheduler.ledger.records import (
    Action,
    ActionPage,
    ActionQuery,
    Command,
    Estate,
    Handover,
    Hold,
    Lease,
    LeaseStatus,
    Outcome,
    Record,
    RequestPage,
    RequestQuery,
    StoredOutput,
    StoredRequest,
    StoredTransition,
    Submission,
    Verb,
)

from tests.fakes.memory_actions import MemoryActions
from tests.fakes.memory_leases import MemoryLeases


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

    def place(self, query: RequestQuery) -> tuple[float, ...]:
        """Less comes first."""
        sign = 1 if query.oldest_first else -1
        arrival = (sign * self.stored.request.arrival_s, float(sign * self.number))
        return (-self.stored.request.priority, *arrival) if query.by_priority else arrival


@dataclass
class MemoryLedger:
    """`writes` counts transactions carried out; `clock` tells which leases have run out."""

    unavailable: bool = False
    writes: int = 0
    clock: Callable[[], float] = time.time
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _leases: MemoryLeases = field(default_factory=MemoryLeases)
    _actions: MemoryActions = field(default_factory=MemoryActions)
    _accepted: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def write(self, records: Sequence[Record], lease: Lease | None = None) -> list[Outcome]:
        with self._available():
            if lease is not None:
                self._leases.hold(lease)
            staged: dict[str, _Entry] = {}
            # Submissions first: other records of the batch may be about them.
            outcomes = {
                index: self._submit(staged, record) for index, record in enumerate(records) if isinstance(record, Submission)
            }
            for record in records:
                if not isinstance(record, Submission | Action | Handover):
                    self._apply(staged, record)
            if lease is not None:
                for request_id in _owned(records, outcomes):
                    if staged[request_id].stored.lease not in (None, lease.number):
                        raise LedgerConflict(f"{request_id}: another scheduler has it")
                    staged[request_id] = _given(staged[request_id], lease)
            self._entries.update(staged)
            outcomes |= {
                index: self._hand_over(record, lease) for index, record in enumerate(records) if isinstance(record, Handover)
            }
            for record in records:
                if isinstance(record, Action):
                    self._actions.record(record)
            self.writes += 1
            return [outcomes.get(index, Outcome.WRITTEN) for index in range(len(records))]

    def _hand_over(self, handover: Handover, lease: Lease | None) -> Outcome:
        driver = self._leases.driver(handover.executor)
        if driver is None or driver == lease:
            return Outcome.CONFLICT
        for request_id, losses in zip(handover.request_ids, handover.losses, strict=True):
            entry = self._entries[request_id]
            if lease is not None and entry.stored.lease == lease.number:
                self._entries[request_id] = _given(entry, driver)
            self._leases.commands[self._leases.number()] = Command(driver.number, request_id, Verb.TAKE, losses=losses)
        return Outcome.WRITTEN

    def unfinished(self) -> Iterator[tuple[StoredRequest, StoredOutput]]:
        with self._available():
            open_entries = [entry for entry in self._entries.values() if entry.stored.state not in TERMINAL]
        for entry in sorted(open_entries, key=lambda entry: entry.arrival):
            yield self._named(entry.stored), StoredOutput(0, entry.token_ids, entry.logprobs)

    def find(self, request_id: str) -> StoredRequest | None:
        with self._available():
            entry = self._entries.get(request_id)
            return self._named(entry.stored) if entry else None

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
            found = [entry for entry in self._entries.values() if matches(entry.stored, query)]
            found.sort(key=lambda entry: entry.place(query))
            if query.page_token:
                last = _parse_page_token(query)
                found = [entry for entry in found if entry.place(query) > last]
            shown = found[: query.limit]
            token = " ".join(map(repr, shown[-1].place(query))) if len(found) > query.limit else ""
            return RequestPage(tuple(self._named(entry.stored) for entry in shown), token)

    def actions(self, query: ActionQuery) -> ActionPage:
        with self._available():
            return self._actions.query(query)

    def holds(self) -> tuple[Hold, ...]:
        with self._available():
            return self._actions.holds()

    def progress(self, counts: Mapping[str, int]) -> dict[str, tuple[StoredRequest, StoredOutput]]:
        with self._available():
            known = [(self._entries[request_id], count) for request_id, count in counts.items() if request_id in self._entries]
            return {
                entry.stored.request.request_id: (
                    self._named(entry.stored),
                    StoredOutput(count, entry.token_ids[count:], entry.logprobs[count:]),
                )
                for entry, count in known
                if entry.stored.state in TERMINAL or len(entry.token_ids) > count
            }

    def take_lease(self, scheduler: str, lease_s: float) -> Lease:
        with self._available():
            lease = Lease(self._leases.number(), scheduler)
            self._leases.names[lease.number] = scheduler
            self._leases.expires_s[lease.number] = self.clock() + lease_s
            return lease

    def renew_lease(self, lease: Lease, lease_s: float) -> None:
        with self._available():
            self._leases.hold(lease)
            if self._leases.expires_s[lease.number] is None:
                raise LeaseLost("it was given up")
            self._leases.expires_s[lease.number] = self.clock() + lease_s

    def give_up_lease(self, lease: Lease) -> None:
        with self._available():
            if lease.number in self._leases.names:
                self._leases.expires_s[lease.number] = None

    def leases(self) -> tuple[LeaseStatus, ...]:
        with self._available():
            return tuple(
                LeaseStatus(
                    Lease(number, self._leases.names[number]), expires_s is None or expires_s <= self.clock(), expires_s is None
                )
                for number, expires_s in self._leases.expires_s.items()
            )

    def take_over(self, lease: Lease, fallen: Sequence[int], told: Sequence[str] = ()) -> Estate:
        with self._available():
            ended = self._leases.end(lease, fallen, told)
            adopted = [
                entry
                for entry in self._entries.values()
                if entry.stored.state not in TERMINAL and (entry.stored.lease is None or entry.stored.lease in ended)
            ]
            for entry in adopted:
                self._entries[entry.stored.request.request_id] = _given(entry, lease)
            requests = self.held(lease, [entry.stored.request.request_id for entry in adopted])
            return Estate(requests, self._leases.inherit(lease, ended))

    def held(self, lease: Lease, request_ids: Sequence[str]) -> tuple[tuple[StoredRequest, StoredOutput], ...]:
        with self._available():
            named = [self._entries[request_id] for request_id in request_ids if request_id in self._entries]
            own = [entry for entry in named if entry.stored.lease == lease.number and entry.stored.state not in TERMINAL]
            return tuple(
                (self._named(entry.stored), StoredOutput(0, entry.token_ids, entry.logprobs))
                for entry in sorted(own, key=lambda entry: entry.arrival)
            )

    def claim_executor(self, lease: Lease, executor: str, address: str, *, inherited: bool, at_least: int) -> int:
        with self._available():
            return self._leases.claim(lease, executor, address, inherited, at_least)

    def has_executor(self, lease: Lease, executor: str) -> bool:
        with self._available():
            driven = self._leases.executors.get(executor)
            return driven is not None and driven.lease == lease.number

    def tell_executors(self, lease: Lease, connected: Sequence[ExecutorDescription]) -> None:
        with self._available():
            self._leases.tell(lease, connected)

    def known_executors(self, lease: Lease) -> tuple[KnownExecutor, ...]:
        with self._available():
            return self._leases.known(lease)

    def send(self, commands: Sequence[Command]) -> tuple[int, ...]:
        with self._available():
            sent = {self._leases.number(): command for command in commands}
            self._leases.commands.update(sent)
            return tuple(sent)

    def pending(self, numbers: Sequence[int]) -> frozenset[int]:
        with self._available():
            return frozenset(number for number in numbers if number in self._leases.commands)

    def received(self, lease: Lease) -> tuple[tuple[int, Command], ...]:
        with self._available():
            return tuple((number, command) for number, command in self._leases.commands.items() if command.lease == lease.number)

    def settle(self, numbers: Sequence[int]) -> None:
        with self._available():
            for number in numbers:
                self._leases.commands.pop(number, None)

    def prune(self, before_s: float, limit: int) -> int:
        with self._available():
            self._actions.prune(before_s, limit)
            ended = [
                (entry.stored.finished_s, request_id)
                for request_id, entry in self._entries.items()
                if not entry.stored.request.parent and all(_ended_before(e, before_s) for e in self._group(request_id))
            ]
            pruned = [entry for _, request_id in sorted(ended)[:limit] for entry in self._group(request_id)]
            for entry in pruned:
                del self._entries[entry.stored.request.request_id]
            return len(pruned)

    def close(self) -> None:
        pass

    def _group(self, request_id: str) -> list[_Entry]:
        """All choices of a request."""
        requests = [(entry, entry.stored.request) for entry in self._entries.values()]
        return [entry for entry, request in requests if request_id in (request.request_id, request.parent)]

    def _available(self) -> threading.RLock:
        if self.unavailable:
            raise LedgerUnavailable("the database is away")
        return self._lock

    def _named(self, stored: StoredRequest) -> StoredRequest:
        return stored if stored.lease is None else replace(stored, scheduler=self._leases.names.get(stored.lease, ""))

    def _submit(self, staged: dict[str, _Entry], submission: Submission) -> Outcome:
        request = submission.request
        entry = staged.get(request.request_id) or self._entries.get(request.request_id)
        if entry is not None:
            return Outcome.JOINED if entry.digest == submission.payload_digest else Outcome.CONFLICT
        for choice in submission.requests:
            self._accepted += 1
            staged[choice.request_id] = _Entry(
                self._accepted,
                b"" if choice.parent else submission.payload_digest,
                StoredRequest(choice, State.WAITING, 0),
                (StoredTransition(None, State.WAITING, choice.arrival_s, ""),),
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


def _owned(records: Sequence[Record], outcomes: Mapping[int, Outcome]) -> Iterator[str]:
    """Requests that this write made or moved."""
    for index, record in enumerate(records):
        if isinstance(record, Transitioned):
            yield record.request_id
        elif isinstance(record, Submission) and outcomes[index] is Outcome.WRITTEN:
            yield from (request.request_id for request in record.requests)


def _given(entry: _Entry, lease: Lease) -> _Entry:
    return replace(entry, stored=replace(entry.stored, lease=lease.number))


def _ended_before(entry: _Entry, before_s: float) -> bool:
    return entry.stored.finished_s is not None and entry.stored.finished_s < before_s


def _moved(entry: _Entry, move: Transitioned) -> _Entry:
    if entry.stored.state is not move.before:
        raise LedgerConflict(f"{move.request_id}: is {entry.stored.state}, not {move.before}")
    if move.after not in TRANSITIONS[move.before]:
        raise LedgerConflict(f"{move.request_id}: {move.before} → {move.after} is not in the table")
    stored = replace(
        entry.stored,
        state=move.after,
        executor=(move.executor or entry.stored.executor) if move.after in RUNNING else "",
        preemptions=entry.stored.preemptions + (move.after is State.PREEMPTED),
        cached_tokens=entry.stored.cached_tokens if move.cached_tokens is None else move.cached_tokens,
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


def matches(stored: StoredRequest, query: RequestQuery) -> bool:
    """Whether all conditions of the query hold."""
    request = stored.request
    return (
        (not query.states or stored.state in query.states)
        and query.tenant in ("", request.tenant)
        and query.model in ("", request.model)
        and (query.min_priority is None or request.priority >= query.min_priority)
        and (query.max_priority is None or request.priority <= query.max_priority)
        and (not query.lanes or request.lane in query.lanes)
        and (query.arrived_before_s is None or request.arrival_s <= query.arrived_before_s)
    )


def _parse_page_token(query: RequestQuery) -> tuple[float, ...]:
    last = tuple(map(float, query.page_token.split(" ")))
    if len(last) != 2 + query.by_priority:
        raise ValueError("a page token of another order")
    return last
