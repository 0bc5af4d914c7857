"""An in-memory Desk with the contract of `tokenmill_scheduler.desk`, for tests of what stands on top of it.

Nothing runs by itself: a test says how many tokens a request makes (`produce`). Which tokens is an oracle's word: a function of the
request and the index, so that a lost, doubled or crossed token shows. A request ends as the real ones do, at a stop token, a stop
string or its length.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Self

from tokenmill_scheduler.core.choices import choice_ids, further_choices
from tokenmill_scheduler.core.plans import Blocks, TokenLogprobs
from tokenmill_scheduler.core.request import QUEUED, FinishReason, Request, State
from tokenmill_scheduler.desk.errors import (
    IndexAhead,
    QueueFull,
    RequestEnded,
    RequestExists,
    RequestNotFailed,
    Unavailable,
    UnknownModel,
    UnknownRequest,
)
from tokenmill_scheduler.desk.port import Attachment
from tokenmill_scheduler.desk.records import Cancellation, Chunk, Ended, ExecutorStatus, Load, RequestStatus, ServedModel, Submitted
from tokenmill_scheduler.ledger.records import RequestPage, RequestQuery, StoredOutput, StoredRequest, StoredTransition
from tokenmill_scheduler.text.model import TextStream

from tests.fakes.memory_ledger import matches

Oracle = Callable[[Request, int], int]
_FINISH_REASONS = {State.CANCELLED: FinishReason.CANCELLED, State.EXPIRED: FinishReason.EXPIRED, State.FAILED: FinishReason.ERROR}


def oracle_token(request: Request, index: int) -> int:
    """A token of the first 100 ids, told by id and index."""
    return zlib.crc32(f"{request.request_id}/{index}".encode()) % 100


def oracle_logprobs(index: int, top: int) -> TokenLogprobs:
    return TokenLogprobs(-0.5 * index, tuple((rank, -1.0 * rank) for rank in range(top)))


@dataclass(slots=True)
class Entry:
    """A request and its life. `changed` is replaced at each change, so that every reader sees each one."""

    request: Request
    digest: bytes
    text: TextStream
    state: State = State.WAITING
    tokens: list[int] = field(default_factory=list)
    transitions: list[StoredTransition] = field(default_factory=list)
    ended: Ended | None = None
    finished_s: float | None = None
    first_token_s: float | None = None
    readers: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class FakeDesk:
    """`models_` by name. `queue_limit`: most requests that have not ended."""

    def __init__(self, *models_: ServedModel, oracle: Oracle = oracle_token, queue_limit: int = 1_000_000) -> None:
        self.served = {model.name: model for model in models_}
        self.entries: dict[str, Entry] = {}
        self.oracle = oracle
        self.queue_limit = queue_limit
        self.open_streams = 0
        self.shutting_down = False
        # (verb, request id, reason, actor) of each.
        self.changes: list[tuple[str, str, str, str]] = []
        self._clock = count(1_700_000_000)
        self._changed = asyncio.Event()

    # ---- what a test does ------------------------------------------------------------------------------------------------------

    def produce(self, request_id: str, num_tokens: int) -> None:
        """Commits up to so many more tokens, fewer when the request ends before."""
        entry = self.entries[request_id]
        for _ in range(num_tokens):
            if entry.ended is None:
                self._step(entry)
        self._wake(entry)

    def end(self, request_id: str, state: State, error: str = "", error_code: int = 0) -> None:
        entry = self.entries[request_id]
        self._end(entry, state, _FINISH_REASONS[state], error, error_code)
        self._wake(entry)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Returns once something holds of this desk."""
        while not holds():
            await self._changed.wait()

    def shut_down(self) -> None:
        self.shutting_down = True
        for entry in self.entries.values():
            self._wake(entry)

    # ---- Desk ------------------------------------------------------------------------------------------------------------------

    def model(self, name: str) -> ServedModel:
        if not self.served:
            raise Unavailable("no executor has joined yet", retry_delay_s=1.0)
        if not name and len(self.served) == 1:
            return next(iter(self.served.values()))
        if name not in self.served:
            raise UnknownModel(f"no model is called {name!r}")
        return self.served[name]

    def models(self) -> tuple[ServedModel, ...]:
        return tuple(self.served.values())

    def most_choices(self, model: str, num_prompt_tokens: int, max_tokens: int) -> int | None:
        return max(1, self.served[model].pool_tokens // (num_prompt_tokens + 1))

    async def submit(self, request: Request, payload_digest: bytes) -> Submitted:
        await asyncio.sleep(0)
        if self.shutting_down:
            raise Unavailable("the scheduler is shutting down", retry_delay_s=2.0)
        if (known := self.entries.get(request.request_id)) is not None:
            if known.digest != payload_digest:
                raise RequestExists(f"{request.request_id} exists with another payload")
            return Submitted(request.request_id, joined=True)
        if sum(entry.ended is None for entry in self.entries.values()) >= self.queue_limit:
            raise QueueFull("the queue is full", retry_delay_s=0.25, limit="max_queue_len")
        for choice in (request, *further_choices(request)):
            entry = Entry(choice, payload_digest, self.served[request.model].text.stream_of(choice))
            entry.transitions.append(StoredTransition(None, State.WAITING, request.arrival_s, "submitted"))
            self.entries[choice.request_id] = entry
            self._wake(entry)
        return Submitted(request.request_id, joined=False)

    async def attach(self, request_id: str, next_index: int) -> Attachment:
        await asyncio.sleep(0)
        entry = self._entry(request_id)
        if next_index > len(entry.tokens):
            raise IndexAhead(f"{request_id} has {len(entry.tokens)} tokens")
        return Attachment(entry.request, tuple(entry.tokens[:next_index]), FakeChunks(self, entry, next_index))

    async def attach_all(self, next_indexes: Mapping[str, int]) -> tuple[Attachment, ...]:
        for request_id, next_index in next_indexes.items():
            if next_index > len(self._entry(request_id).tokens):
                raise IndexAhead(f"{request_id} has fewer tokens")
        return tuple([await self.attach(request_id, next_index) for request_id, next_index in next_indexes.items()])

    async def cancel(self, request_id: str, reason: str, actor: str = "") -> Cancellation:
        await asyncio.sleep(0)
        choices = [self.entries[choice] for choice in choice_ids(self._entry(request_id).request)]
        running = [entry for entry in choices if entry.ended is None]
        if not running:
            cancelled = any(entry.state is State.CANCELLED for entry in choices)
            return Cancellation(State.CANCELLED if cancelled else choices[0].state, already_ended=True)
        self.changes.append(("cancel", request_id, reason, actor))
        for entry in running:
            self._end(entry, State.CANCELLED, FinishReason.CANCELLED, reason)
            self._wake(entry)
        return Cancellation(State.CANCELLED, already_ended=False)

    async def update(
        self, request_id: str, priority: int | None, deadline_s: float | None, reason: str = "", actor: str = ""
    ) -> RequestStatus:
        entry = self._entry(request_id)
        if entry.ended is not None:
            raise RequestEnded(f"{request_id} has ended")
        self.changes.append(("update", request_id, reason, actor))
        request = entry.request
        entry.request = replace(
            request,
            priority=request.priority if priority is None else priority,
            deadline_s=request.deadline_s if deadline_s is None else deadline_s,
        )
        return await self.status(request_id)

    async def retry(self, request_id: str, new_request_id: str, reason: str, actor: str) -> None:
        entry = self._entry(request_id)
        if entry.state is not State.FAILED:
            raise RequestNotFailed(f"{request_id} is {entry.state}")
        self.changes.append(("retry", request_id, reason, actor))
        await self.submit(replace(entry.request, request_id=new_request_id, retry_of=request_id), entry.digest)

    async def status(self, request_id: str) -> RequestStatus:
        return self.standing(self._stored(self._entry(request_id)))

    async def output(self, request_id: str) -> StoredOutput:
        entry = self._entry(request_id)
        top = entry.request.sampling.logprobs
        logprobs = () if top is None else tuple(oracle_logprobs(index, top) for index in range(len(entry.tokens)))
        return StoredOutput(0, tuple(entry.tokens), logprobs)

    async def transitions(self, request_id: str) -> tuple[StoredTransition, ...]:
        return tuple(self._entry(request_id).transitions)

    async def query(self, query: RequestQuery) -> RequestPage:
        if query.page_token and not query.page_token.startswith("after-"):
            raise ValueError("no page token of this desk")
        rows = list(enumerate(self.entries.values()))
        rows = rows if query.oldest_first else rows[::-1]
        if query.by_priority:
            rows.sort(key=lambda row: -row[1].request.priority)
        if query.page_token:
            last = int(query.page_token.removeprefix("after-"))
            rows = [row for row in rows if (row[0] > last) == query.oldest_first and row[0] != last]
        rows = [row for row in rows if matches(self._stored(row[1]), query)]
        page = rows[: query.limit]
        token = f"after-{page[-1][0]}" if len(rows) > len(page) else ""
        return RequestPage(tuple(self._stored(entry) for _, entry in page), token)

    def standing(self, stored: StoredRequest) -> RequestStatus:
        return RequestStatus(stored, "no free sequence", "no_slot") if stored.state in QUEUED else RequestStatus(stored)

    def executors(self) -> tuple[ExecutorStatus, ...]:
        blocks = Blocks(free=5, cached=2, held=3)
        return (ExecutorStatus("x1", "127.0.0.1:1", "tiny", True, 7, "simulated", 16, blocks, 2, 40, 0.25, 1_700_000_000.5),)

    def load(self) -> Load:
        return Load(1, 2, 8, 512, 0.25, 0.75, 3, 40, 50, 60, 4, 5, 6, "continuous", "fcfs", "", 70, 20)

    # ---- inside ----------------------------------------------------------------------------------------------------------------

    def come(self, entry: Entry) -> None:
        entry.readers += 1
        self.open_streams += 1
        self._wake(entry)

    def leave(self, entry: Entry) -> None:
        """A reader has gone; the last one takes a request that is not detached with it."""
        entry.readers -= 1
        self.open_streams -= 1
        if entry.readers == 0 and entry.ended is None and not entry.request.detached and not self.shutting_down:
            self._end(entry, State.CANCELLED, FinishReason.CANCELLED, "its last stream was dropped")
        self._wake(entry)

    def _wake(self, entry: Entry) -> None:
        entry.wake()
        self._changed.set()
        self._changed = asyncio.Event()

    def _entry(self, request_id: str) -> Entry:
        if request_id not in self.entries:
            raise UnknownRequest(f"no request has the id {request_id!r}")
        return self.entries[request_id]

    def _step(self, entry: Entry) -> None:
        for state in (State.PREFILL, State.DECODE) if entry.state is State.WAITING else ():
            self._move(entry, state)
        token_id = self.oracle(entry.request, len(entry.tokens))
        entry.tokens.append(token_id)
        entry.first_token_s = entry.first_token_s or float(next(self._clock))
        sampling = entry.request.sampling
        if entry.text.feed([token_id]).stopped_after is not None or token_id in sampling.stop_token_ids:
            self._end(entry, State.DONE, FinishReason.STOP)
        elif len(entry.tokens) == sampling.max_tokens:
            self._end(entry, State.DONE, FinishReason.LENGTH)

    def _end(self, entry: Entry, state: State, reason: FinishReason, error: str = "", error_code: int = 0) -> None:
        entry.ended = Ended(state, reason, len(entry.tokens), error, error_code)
        self._move(entry, state, error)
        entry.finished_s = entry.transitions[-1].at_s

    def _move(self, entry: Entry, after: State, reason: str = "") -> None:
        entry.transitions.append(StoredTransition(entry.state, after, float(next(self._clock)), reason))
        entry.state = after

    def _stored(self, entry: Entry) -> StoredRequest:
        ended = entry.ended
        return StoredRequest(
            request=entry.request,
            state=entry.state,
            num_output_tokens=len(entry.tokens),
            finish_reason=ended.finish_reason if ended else None,
            error=ended.error if ended else "",
            error_code=ended.error_code if ended else 0,
            executor="" if ended or entry.state in QUEUED else "x1",
            first_token_s=entry.first_token_s,
            finished_s=entry.finished_s,
        )


class FakeChunks:
    """One reader: a cursor into the request's tokens."""

    def __init__(self, desk: FakeDesk, entry: Entry, next_index: int) -> None:
        self._desk = desk
        self._entry = entry
        self._next_index = next_index
        self._told_end = False
        self._closed = False
        desk.come(entry)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk | Ended:
        if self._closed or self._told_end:
            raise StopAsyncIteration
        while True:
            entry = self._entry
            changed = entry.changed
            if self._desk.shutting_down:
                raise Unavailable("the scheduler is shutting down", retry_delay_s=2.0)
            if self._next_index < len(entry.tokens):
                return self._take()
            if entry.ended is not None:
                self._told_end = True
                return entry.ended
            await changed.wait()

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._desk.leave(self._entry)

    def _take(self) -> Chunk:
        first, top = self._next_index, self._entry.request.sampling.logprobs
        token_ids = tuple(self._entry.tokens[first:])
        self._next_index += len(token_ids)
        return Chunk(first, token_ids, () if top is None else tuple(oracle_logprobs(first + i, top) for i in range(len(token_ids))))
