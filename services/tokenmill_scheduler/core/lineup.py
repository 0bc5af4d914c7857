"""In what order one plan looks at the waiting requests; it is told who is admitted, and counts that on copies of its own.

    lane     one of which nothing runs and that was passed over too often, then those below their guarantee, then as they are
    tenant   where tenants share fairly: whoever's account is the lowest, with all that this plan has admitted charged to it
    request  the oldest when it is its turn (see `ordering.py`), else the policy's order, or the longest predicted prefix hit

Longest prefix match is SGLang's (Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", NeurIPS 2024).
Here it looks at WINDOW requests of a plan only, so that a step's cost is bounded. Must not know: executors, blocks, budgets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from heapq import heapify, heappop, heappush, heapreplace

from tokenmill_scheduler.core.lanes import guaranteed_slots
from tokenmill_scheduler.core.line import Line
from tokenmill_scheduler.core.live import LiveRequest
from tokenmill_scheduler.core.ordering import Ordering
from tokenmill_scheduler.core.policy import Rank
from tokenmill_scheduler.core.queue import LaneQueue, WaitingQueue
from tokenmill_scheduler.core.request import Lane, State

WINDOW = 128

Hit = Callable[[LiveRequest], int]


class Lineup:
    """Iterates over `queue`, soonest first. `running` has each lane's slots taken, of `slots`; `hit` predicts prefix hits.

    With `resumed_only` none but preempted requests take part. The queue may lose what was given out meanwhile, and nothing else.
    """

    def __init__(
        self,
        queue: WaitingQueue,
        running: Mapping[Lane, int],
        slots: int,
        now_s: float,
        hit: Hit | None = None,
        resumed_only: bool = False,
    ) -> None:
        guaranteed = guaranteed_slots(queue.ordering.lane_shares, slots)
        looks = _Looks(hit if queue.ordering.policy.prefers_hits else None, now_s, resumed_only)
        self._lanes = [
            _Lane(lane, queue.lanes[lane], running[lane], guaranteed[lane], looks) for lane in Lane if queue.lanes[lane].lines
        ]
        self._looks = looks
        self._last: _Lane | None = None

    def __iter__(self) -> Iterator[LiveRequest]:
        while self._lanes:
            lane = self._last = min(self._lanes, key=_Lane.place)
            live = lane.next()
            if live is None:
                self._lanes.remove(lane)
            else:
                yield live

    def admits(self, live: LiveRequest) -> None:
        """The one given out last, before it leaves the queue."""
        assert self._last is not None
        for lane in self._lanes:
            lane.passed_over += 1
        self._last.admits(live)

    def passes(self) -> None:
        """The one given out last does not fit now: its lane's guarantee is for who can run, and no more for this plan."""
        assert self._last is not None
        self._last.waives = True

    def skip_lane(self, lane: Lane) -> None:
        """Nobody of it any more."""
        self._lanes = [other for other in self._lanes if other.lane is not lane]

    def skip_tenant(self, tenant: str) -> None:
        """Nobody of it any more."""
        self._looks.skipped[tenant] = None


class _Looks:
    """What all lines of a plan have in common. `left` is how many hits may still be predicted; `skipped` is for look-up only."""

    def __init__(self, hit: Hit | None, now_s: float, resumed_only: bool) -> None:
        self.hit = hit
        self.now_s = now_s
        self.left = WINDOW
        self.resumed_only = resumed_only
        self.skipped: dict[str, None] = {}

    def takes(self, live: LiveRequest) -> bool:
        return live.request.tenant not in self.skipped and (not self.resumed_only or live.state is State.PREEMPTED)


class _Lane:
    def __init__(self, lane: Lane, queue: LaneQueue, running: int, guaranteed: int, looks: _Looks) -> None:
        self.lane = lane
        self.passed_over = queue.passed_over
        self.waives = False
        self._queue = queue
        self._ordering = queue.ordering
        self._running = running
        self._guaranteed = guaranteed
        self._looks = looks
        # Lines not looked at yet, soonest first, and those that were, as a heap of accounts.
        self._order = queue.share.order()
        self._next_in_order = 0
        self._open: list[tuple[float, str]] = []
        self._lines: dict[str, _Line] = {}

    def place(self) -> tuple[int, Lane]:
        """The least comes first."""
        if self.waives:
            return 2, self.lane
        if self._running == 0 and 0 < self._ordering.ageing_turn <= self.passed_over:
            return 0, self.lane
        return (1 if self._running < self._guaranteed else 2), self.lane

    def next(self) -> LiveRequest | None:
        """The next request of the line whose account is the lowest; None: no line has one."""
        while name := self._lowest():
            line = self._lines.get(name[1])
            if line is None:
                line = self._lines[name[1]] = _Line(self._queue.lines[name[1]], self._ordering, self._looks)
            live = None if self._ordering.fair_share and name[1] in self._looks.skipped else line.next()
            if live is not None:
                return live
            heappop(self._open)
        return None

    def admits(self, live: LiveRequest) -> None:
        self._running += live.gang_size
        self.passed_over = 0
        account, name = self._open[0]
        self._lines[name].admits()
        if self._ordering.fair_share:
            heapreplace(self._open, (self._queue.share.after(account, name, self._ordering.cost(live)), name))

    def _lowest(self) -> tuple[float, str] | None:
        order = self._order
        while self._next_in_order < len(order) and (not self._open or order[self._next_in_order] < self._open[0]):
            heappush(self._open, order[self._next_in_order])
            self._next_in_order += 1
        return self._open[0] if self._open else None


class _Line:
    """What is left of one line: first the window, sorted by hits, then all behind it, by rank, so that the line may change."""

    def __init__(self, line: Line, ordering: Ordering, looks: _Looks) -> None:
        self._line = line
        self._ordering = ordering
        self._looks = looks
        self._turn = line.turn
        self._rank: Rank = ()
        self._window = self._look_for_hits()
        # Those of each tenant that is not skipped, by rank, once one is.
        self._apart: list[tuple[Rank, str]] | None = None
        # Those given out: one that was passed may be the oldest still; for look-up only.
        self._given: dict[LiveRequest, None] = {}
        self._first: LiveRequest | None = None
        self._last_is_oldest = False

    def next(self) -> LiveRequest | None:
        first = self._peek()
        if first is None:
            return None
        oldest = self._line.oldest if self._ordering.policy.overtakes else None
        given = oldest if oldest is not None and self._goes_before(first, oldest) else first
        self._last_is_oldest = given is oldest
        self._given[given] = None
        return given

    def admits(self) -> None:
        """The one given out last."""
        self._turn = 0 if self._last_is_oldest else self._turn + 1

    def _goes_before(self, first: LiveRequest, oldest: LiveRequest) -> bool:
        """For its age; not before a preempted one, which has waited its turn once."""
        if first.state is State.PREEMPTED or oldest in self._given or not self._looks.takes(oldest):
            return False
        return first is not oldest and self._ordering.ages(oldest, self._turn, self._looks.now_s)

    def _peek(self) -> LiveRequest | None:
        while self._first is None or self._first in self._given or not self._looks.takes(self._first):
            self._first = self._window.pop() if self._window else self._behind()
            if self._first is None:
                return None
        return self._first

    def _behind(self) -> LiveRequest | None:
        """The next one behind `_rank`, of a tenant that is not skipped."""
        if self._looks.skipped and self._line.of_tenant:
            return self._behind_of_others()
        index = self._line.all.after(self._rank)
        if index == len(self._line.all.queued):
            return None
        self._rank = self._line.all.ranks[index]
        return self._line.all.queued[index]

    def _behind_of_others(self) -> LiveRequest | None:
        """A merge, so that ten thousand requests of one tenant are skipped at once."""
        if self._apart is None:
            of_others = ((name, part) for name, part in self._line.of_tenant.items() if name not in self._looks.skipped)
            self._apart = [(part.ranks[at], name) for name, part in of_others if (at := part.after(self._rank)) < len(part.ranks)]
            heapify(self._apart)
        while self._apart:
            rank, name = heappop(self._apart)
            part = self._line.of_tenant.get(name)
            if part is None or name in self._looks.skipped:
                continue
            at = part.after(rank)
            if at < len(part.ranks):
                heappush(self._apart, (part.ranks[at], name))
            # It may have left meanwhile.
            if at and part.ranks[at - 1] == rank:
                self._rank = rank
                return part.queued[at - 1]
        return None

    def _look_for_hits(self) -> list[LiveRequest]:
        """Those of the window, longest hit last, as they are popped; preempted ones are popped first."""
        hit = self._looks.hit
        if hit is None:
            return []
        window = self._line.all.queued[: self._looks.left]
        if window:
            self._looks.left -= len(window)
            self._rank = self._line.all.ranks[len(window) - 1]
        order = sorted([(live.state is not State.PREEMPTED, -hit(live), place) for place, live in enumerate(window)], reverse=True)
        return [window[place] for _, _, place in order]
