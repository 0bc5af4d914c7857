"""One line of waiting requests: those of a lane, or of one tenant in it, in the policy's order. Must not know: other lines, plans.

A sorted list, not a heap: admission looks past a head that does not fit, a priority changes and a request is cancelled anywhere in
it, and moving ten thousand pointers costs a few microseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from tokenmill_scheduler.core.alarms import Alarms
from tokenmill_scheduler.core.live import LiveRequest
from tokenmill_scheduler.core.ordering import Ordering
from tokenmill_scheduler.core.policy import Rank


class Line:
    """Iterates soonest first. A request keeps the rank that it had when it was added. `turn` counts admissions of others since the
    oldest was last admitted."""

    def __init__(self, ordering: Ordering) -> None:
        self.turn = 0
        self._ordering = ordering
        self._ranks: list[Rank] = []
        self._queued: list[LiveRequest] = []
        # For look-up only.
        self._rank_of: dict[LiveRequest, Rank] = {}
        self._ids: dict[str, LiveRequest] = {}
        self._arrivals = Alarms()

    def __len__(self) -> int:
        return len(self._queued)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._queued)

    def __contains__(self, live: LiveRequest) -> bool:
        return live in self._rank_of

    def copy(self) -> list[LiveRequest]:
        return self._queued.copy()

    @property
    def head(self) -> LiveRequest:
        return self._queued[0]

    @property
    def oldest(self) -> LiveRequest:
        earliest = self._arrivals.earliest()
        assert earliest is not None, "the line is empty"
        return self._ids[earliest[1]]

    def add(self, live: LiveRequest) -> None:
        rank = self._ordering.rank(live)
        index = bisect_left(self._ranks, rank)
        self._ranks.insert(index, rank)
        self._queued.insert(index, live)
        self._rank_of[live] = rank
        self._ids[live.request_id] = live
        self._arrivals.set(live.request_id, live.request.arrival_s, live.ordinal)

    def remove(self, live: LiveRequest) -> None:
        index = bisect_left(self._ranks, self._rank_of.pop(live))
        assert self._queued[index] is live, "the line is out of order"
        del self._ranks[index]
        del self._queued[index]
        del self._ids[live.request_id]
        self._arrivals.discard(live.request_id)

    def admitted(self, live: LiveRequest, now_s: float) -> None:
        """Before it is removed: counts turns, and notes who runs for its age."""
        if live is not self.oldest:
            self.turn += 1
            return
        live.aged = live.aged or (live is not self.head and self._ordering.ages(live, self.turn, now_s))
        self.turn = 0

    def check(self) -> None:
        """Raises AssertionError when it is out of order."""
        assert self._ranks == sorted(self._ranks), "a line is out of order"
        assert [self._rank_of[live] for live in self._queued] == self._ranks
        assert len(self._rank_of) == len(self._ids) == len(self._arrivals) == len(self._queued)
