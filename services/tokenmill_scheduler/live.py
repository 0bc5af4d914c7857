"""The requests that have not ended, as the loop sees them: what the core last said of each, and its output.

Two views in one record: `state` and `feed.tokens` follow the core at once; `feed.committed` and `feed.ended` follow the ledger.
Must not know: protobuf, SQL, executors' connections.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from tokenmill_scheduler.core.choices import MAX_CHOICES, choice_id
from tokenmill_scheduler.core.effects import TokensGenerated, Transitioned
from tokenmill_scheduler.core.events import Updated
from tokenmill_scheduler.core.request import TERMINAL, Request, State
from tokenmill_scheduler.desk.errors import Unavailable
from tokenmill_scheduler.desk.records import Ended
from tokenmill_scheduler.ledger.records import Record
from tokenmill_scheduler.streams import Feed
from tokenmill_scheduler.tenants import TenantUsage
from tokenmill_scheduler.text.model import TextStream


@dataclass(slots=True)
class RequestView:
    """One of them; the core has its own of it (`core/live.py`), the ledger another (`StoredRequest`).

    `text` watches for stop strings; it has been fed the first `text_fed` tokens of `feed`.

    `read_elsewhere`: clients of another scheduler read it, as far as that one has said. `leaving`: it is to be another scheduler's,
    and can be neither changed nor read here any more.
    """

    request: Request
    state: State
    feed: Feed
    text: TextStream | None = None
    text_fed: int = 0
    read_elsewhere: bool = False
    cached_tokens: int = 0
    leaving: bool = False


class LiveRequests:
    def __init__(self) -> None:
        self._by_id: dict[str, RequestView] = {}
        # Requests that need a reader and have had none, by since when (Unix seconds), oldest first.
        self._orphans: dict[str, float] = {}
        self.with_stop_strings = 0
        # Those that need a reader and have one.
        self.attended: dict[str, RequestView] = {}
        self.tenants = TenantUsage()

    def __len__(self) -> int:
        return len(self._by_id)

    def has(self, request_id: str) -> bool:
        return request_id in self._by_id

    def get(self, request_id: str) -> RequestView | None:
        """None, too, for one that is leaving."""
        live = self._by_id.get(request_id)
        return None if live is None or live.leaving else live

    def choices(self, request_id: str) -> list[str]:
        """What of a request has not ended: its choices, or the one that is named."""
        return [name for choice in range(MAX_CHOICES) if self.runs(name := choice_id(request_id, choice))]

    def runs(self, request_id: str) -> bool:
        """Whether there is such a request and it has not ended, nor is it leaving."""
        live = self.get(request_id)
        return live is not None and live.state not in TERMINAL

    @property
    def num_readers(self) -> int:
        """O(requests)."""
        return sum(live.feed.readers for live in self._by_id.values())

    def add(self, live: RequestView, now_s: float) -> None:
        request_id = live.request.request_id
        before = self._by_id.get(request_id)
        # One that has ended and is still read can have been pruned, and its id be used again: its readers keep their feed.
        assert before is None or before.feed.ended is not None
        self._by_id[request_id] = live
        self.tenants.came(live.request, live.state)
        if not live.request.detached:
            self._orphans[request_id] = now_s
        self.with_stop_strings += bool(live.request.stop)

    def happened(self, records: Iterable[Record]) -> None:
        """The core said so; nothing of it may be told yet."""
        for record in records:
            match record:
                case Transitioned():
                    self._transitioned(record)
                case TokensGenerated():
                    self._generated(record)
                case Updated(request_id, priority, deadline_s):
                    live = self._by_id[request_id]
                    live.request = _updated(live.request, priority, deadline_s)

    def committed(self, records: Iterable[Record]) -> None:
        """It is durable: readers may see it."""
        for record in records:
            match record:
                case TokensGenerated():
                    for request_id, first, count in zip(record.request_ids, record.first_indexes, record.counts, strict=True):
                        self._by_id[request_id].feed.commit(first + count)
                case Transitioned() if record.after in TERMINAL:
                    self._ended(record)

    def reader_came(self, request_id: str) -> None:
        self._orphans.pop(request_id, None)
        live = self._by_id.get(request_id)
        if live is not None and not live.request.detached and live.state not in TERMINAL:
            self.attended[request_id] = live

    def reader_left(self, request_id: str, now_s: float) -> bool:
        """True if the request needs a reader to go on and this was its last. One that has ended is then forgotten."""
        live = self._by_id.get(request_id)
        if live is None or live.feed.readers:
            return False
        self.attended.pop(request_id, None)
        if live.feed.ended is not None:
            del self._by_id[request_id]
        if not _needs_reader(live):
            return False
        if live.read_elsewhere:
            self._orphans[request_id] = now_s
        return not live.read_elsewhere

    def read_elsewhere(self, request_id: str, now_s: float) -> None:
        """Clients of another scheduler read it: its grace begins anew."""
        live = self.get(request_id)
        if live is None or not _needs_reader(live):
            return
        live.read_elsewhere = True
        if not live.feed.readers:
            # Oldest first: to the end.
            self._orphans.pop(request_id, None)
            self._orphans[request_id] = now_s

    def left_elsewhere(self, request_id: str) -> bool:
        """True if the request needs a reader to go on and now has none."""
        live = self._by_id.get(request_id)
        if live is None:
            return False
        live.read_elsewhere = False
        return _needs_reader(live) and not live.feed.readers

    def orphans_since(self, before_s: float) -> list[str]:
        """Requests that have had no reader, though they need one, since before this time."""
        return [request_id for request_id, _ in takewhile(lambda item: item[1] < before_s, self._orphans.items())]

    def leave(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._by_id[request_id].leaving = True
            self._orphans.pop(request_id, None)
            self.attended.pop(request_id, None)

    def forget(self, request_id: str, reason: Unavailable) -> None:
        """Another scheduler's from here on; readers end with `reason`."""
        live = self._by_id.pop(request_id)
        self.tenants.left(live.request, live.state)
        self._orphans.pop(request_id, None)
        self.attended.pop(request_id, None)
        self.with_stop_strings -= bool(live.request.stop)
        live.feed.close(reason)

    def close_streams(self, reason: Unavailable) -> None:
        for live in self._by_id.values():
            live.feed.close(reason)

    def _transitioned(self, record: Transitioned) -> None:
        live = self._by_id[record.request_id]
        self.tenants.moved(live.request, live.state, record.after, record.at_s)
        live.state = record.after
        if record.cached_tokens is not None:
            live.cached_tokens = record.cached_tokens
        if record.after in TERMINAL:
            self.with_stop_strings -= bool(live.request.stop)
            live.text = None
            self._orphans.pop(record.request_id, None)
            self.attended.pop(record.request_id, None)

    def _generated(self, record: TokensGenerated) -> None:
        at = 0
        for request_id, count in zip(record.request_ids, record.counts, strict=True):
            self._by_id[request_id].feed.append(record.token_ids[at : at + count], record.logprobs.get(request_id, ()))
            at += count

    def _ended(self, record: Transitioned) -> None:
        live = self._by_id[record.request_id]
        assert record.finish_reason is not None
        feed = live.feed
        ending = (record.finish_reason, feed.committed, record.error, record.error_code, live.cached_tokens)
        feed.end(Ended(record.after, *ending))
        if not feed.readers:
            del self._by_id[record.request_id]


def may_wait(records: Sequence[Record]) -> bool:
    """Whether nobody loses much when `records` are durable a little later: they are further tokens of several requests, or requests
    are admitted, of which readers are told nothing.

    A first token comes with a move of its request, an end too. A single request's tokens are few enough to be told one by one.
    """
    return all(_may_wait(record) for record in records)


def _may_wait(record: Record) -> bool:
    if isinstance(record, TokensGenerated):
        return len(record.request_ids) > 1
    return isinstance(record, Transitioned) and record.after is State.PREFILL


def _needs_reader(live: RequestView) -> bool:
    return live.state not in TERMINAL and not live.request.detached


def _updated(request: Request, priority: int | None, deadline_s: float | None) -> Request:
    return replace(
        request,
        priority=request.priority if priority is None else priority,
        deadline_s=request.deadline_s if deadline_s is None else deadline_s,
    )
