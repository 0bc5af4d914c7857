"""The requests of one model that wait, in the policy's order. Must not know: executors, blocks, plans.

A sorted list, not a heap: admission looks past a head that does not fit, a priority changes and a request is cancelled anywhere in
it, and moving ten thousand pointers costs a few microseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from tokenmill_scheduler.core.alarms import Alarms
from tokenmill_scheduler.core.live import LiveRequest
from tokenmill_scheduler.core.policy import Policy, Rank


class WaitingQueue:
    """Iterates soonest first. A request's rank must not change while it is queued: remove, change, add."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._ranks: list[Rank] = []
        self._queued: list[LiveRequest] = []
        self._arrivals = Alarms()

    def __len__(self) -> int:
        return len(self._queued)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._queued)

    def add(self, live: LiveRequest) -> None:
        rank = self._policy.rank(live)
        index = bisect_left(self._ranks, rank)
        self._ranks.insert(index, rank)
        self._queued.insert(index, live)
        self._arrivals.set(live.request_id, live.request.arrival_s, live.ordinal)

    def remove(self, live: LiveRequest) -> None:
        index = self._index(live)
        del self._ranks[index]
        del self._queued[index]
        self._arrivals.discard(live.request_id)

    def __contains__(self, live: LiveRequest) -> bool:
        index = bisect_left(self._ranks, self._policy.rank(live))
        return index < len(self._queued) and self._queued[index] is live

    @property
    def oldest_arrival_s(self) -> float | None:
        earliest = self._arrivals.earliest()
        return None if earliest is None else earliest[0]

    def _index(self, live: LiveRequest) -> int:
        index = bisect_left(self._ranks, self._policy.rank(live))
        assert self._queued[index] is live, "a request's rank changed while it was queued"
        return index
