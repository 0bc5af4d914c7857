"""One line of waiting requests: those of a lane, or of one tenant in it, in the policy's order. Must not know: other lines, plans.

A sorted list, not a heap: admission looks past a head that does not fit, a priority changes and a request is cancelled anywhere in
it, and moving ten thousand pointers costs a few microseconds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from tokenmill_scheduler.core.alarms import Alarms
from tokenmill_scheduler.core.live import LiveRequest
from tokenmill_scheduler.core.ordering import Ordering
from tokenmill_scheduler.core.policy import Rank


class Sorted:
    """Requests by rank; each rank is unique."""

    __slots__ = ("queued", "ranks")

    def __init__(self) -> None:
        self.ranks: list[Rank] = []
        self.queued: list[LiveRequest] = []

    def add(self, rank: Rank, live: LiveRequest) -> None:
        index = bisect_left(self.ranks, rank)
        self.ranks.insert(index, rank)
        self.queued.insert(index, live)

    def remove(self, rank: Rank, live: LiveRequest) -> None:
        index = bisect_left(self.ranks, rank)
        assert self.queued[index] is live, "the line is out of order"
        del self.ranks[index]
        del self.queued[index]

    def after(self, rank: Rank) -> int:
        """The place of the first that is behind `rank`."""
        return bisect_right(self.ranks, rank)


class Line:
    """Iterates soonest first. A request keeps the rank that it had when it was added. `turn` counts admissions of others since the
    oldest was last admitted. `of_tenant` has the same requests apart by tenant, where a line has those of several."""

    def __init__(self, ordering: Ordering) -> None:
        self.turn = 0
        self.all = Sorted()
        self.of_tenant: dict[str, Sorted] = {}
        self._ordering = ordering
        # For look-up only.
        self._rank_of: dict[LiveRequest, Rank] = {}
        self._ids: dict[str, LiveRequest] = {}
        self._arrivals = Alarms()

    def __len__(self) -> int:
        return len(self._rank_of)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self.all.queued)

    def __contains__(self, live: LiveRequest) -> bool:
        return live in self._rank_of

    @property
    def head(self) -> LiveRequest:
        return self.all.queued[0]

    @property
    def oldest(self) -> LiveRequest:
        earliest = self._arrivals.earliest()
        assert earliest is not None, "the line is empty"
        return self._ids[earliest[1]]

    def add(self, live: LiveRequest) -> None:
        rank = self._ordering.rank(live)
        self.all.add(rank, live)
        if not self._ordering.fair_share:
            self.of_tenant.setdefault(live.request.tenant, Sorted()).add(rank, live)
        self._rank_of[live] = rank
        self._ids[live.request_id] = live
        self._arrivals.set(live.request_id, live.request.arrival_s, live.ordinal)

    def remove(self, live: LiveRequest) -> None:
        rank = self._rank_of.pop(live)
        self.all.remove(rank, live)
        of_tenant = self.of_tenant.get(live.request.tenant)
        if of_tenant is not None:
            of_tenant.remove(rank, live)
            if not of_tenant.queued:
                del self.of_tenant[live.request.tenant]
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
        for part in (self.all, *self.of_tenant.values()):
            assert part.ranks == sorted(part.ranks), "a line is out of order"
            assert [self._rank_of[live] for live in part.queued] == part.ranks
        assert len(self._rank_of) == len(self._ids) == len(self._arrivals) == len(self.all.queued)
        assert self._ordering.fair_share or len(self) == sum(len(part.queued) for part in self.of_tenant.values())
