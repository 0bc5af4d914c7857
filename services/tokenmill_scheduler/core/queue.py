"""The requests of one model that wait: lanes, in each a line or one for each tenant. Must not know: executors, blocks, plans.

Choices of one request that are to be admitted together have one entry, that of the first of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from tokenmill_scheduler.core.alarms import Alarms
from tokenmill_scheduler.core.line import Line
from tokenmill_scheduler.core.live import LiveRequest
from tokenmill_scheduler.core.ordering import Ordering
from tokenmill_scheduler.core.request import Lane, State
from tokenmill_scheduler.core.shares import FairShare


class LaneQueue:
    """The lines of one lane that are not empty, and the accounts of the tenants that share it. `passed_over` counts admissions of
    other lanes since one of this lane was admitted, while it waited."""

    def __init__(self, ordering: Ordering) -> None:
        self.ordering = ordering
        self.lines: dict[str, Line] = {}
        self.share = FairShare(ordering.weight)
        self.passed_over = 0

    def add(self, live: LiveRequest) -> None:
        name = self.ordering.line(live)
        line = self.lines.get(name)
        if line is None:
            line = self.lines[name] = Line(self.ordering)
            self.share.came(name)
        line.add(live)

    def remove(self, live: LiveRequest) -> None:
        name = self.ordering.line(live)
        line = self.lines[name]
        line.remove(live)
        if not line:
            del self.lines[name]
            self.share.left(name)

    def heads(self) -> Iterator[LiveRequest]:
        """The first of each line."""
        for _, name in self.share.order():
            yield self.lines[name].head

    def __contains__(self, live: LiveRequest) -> bool:
        line = self.lines.get(self.ordering.line(live))
        return line is not None and live in line

    def __iter__(self) -> Iterator[LiveRequest]:
        for _, name in self.share.order():
            yield from self.lines[name]


class WaitingQueue:
    """Iterates in composed order as it stands, as if nobody were charged. `num_resuming` counts the preempted ones."""

    def __init__(self, ordering: Ordering) -> None:
        self.ordering = ordering
        self.lanes = {lane: LaneQueue(ordering) for lane in Lane}
        self.num_resuming = 0
        self._arrivals = Alarms()
        self._num_requests = 0

    def __len__(self) -> int:
        """Requests, each choice of one counted."""
        return self._num_requests

    def __iter__(self) -> Iterator[LiveRequest]:
        for lane in self.lanes.values():
            yield from lane

    def __contains__(self, live: LiveRequest) -> bool:
        return live in self.lanes[live.request.lane]

    def add(self, live: LiveRequest) -> None:
        self.lanes[live.request.lane].add(live)
        self._num_requests += live.gang_size
        self.num_resuming += live.state is State.PREEMPTED
        self._arrivals.set(live.request_id, live.request.arrival_s, live.ordinal)

    def remove(self, live: LiveRequest) -> None:
        self.lanes[live.request.lane].remove(live)
        self._num_requests -= live.gang_size
        self.num_resuming -= live.state is State.PREEMPTED
        self._arrivals.discard(live.request_id)

    @property
    def oldest_arrival_s(self) -> float | None:
        earliest = self._arrivals.earliest()
        return None if earliest is None else earliest[0]

    def place(self, live: LiveRequest) -> tuple[float, ...]:
        """Sorts running requests as the queue is sorted: the last is the first to be given up."""
        lane = self.lanes[live.request.lane]
        account = lane.share.account(live.request.tenant) if self.ordering.fair_share else 0.0
        return (live.request.lane, account, *self.ordering.rank(live))

    def is_outranked(self, live: LiveRequest) -> bool:
        """Whether one that waits is before it for more than its arrival."""
        lane = live.request.lane
        if any(waiting.lines for other, waiting in self.lanes.items() if other < lane):
            return True
        return self.ordering.outranks(self.lanes[lane].lines[self.ordering.line(live)].head, live)

    # ---- what is counted ----

    def admitted(self, live: LiveRequest, now_s: float) -> None:
        """Before it is removed: its line's turn, its lane's turn, its tenant's account."""
        lane = self.lanes[live.request.lane]
        lane.lines[self.ordering.line(live)].admitted(live, now_s)
        for other in self.lanes.values():
            other.passed_over = other.passed_over + 1 if other.lines else 0
        lane.passed_over = 0
        self._charge(live, live.known + self.ordering.remaining(live))

    def settle(self, live: LiveRequest) -> None:
        """It runs no more: its tenant has paid for what it came to, no more."""
        self._charge(live, live.known)

    def _charge(self, live: LiveRequest, paid: int) -> None:
        if self.ordering.fair_share:
            self.lanes[live.request.lane].share.charge(live.request.tenant, paid - live.paid)
        live.paid = paid


def reordered(queue: WaitingQueue, ordering: Ordering) -> WaitingQueue:
    """The same requests in another order. Accounts go on where tenants share before and after."""
    after = WaitingQueue(ordering)
    for lane, before in queue.lanes.items():
        waiting = sorted(before, key=lambda live: live.ordinal)
        if ordering.fair_share and queue.ordering.fair_share:
            after.lanes[lane].share = before.share.renewed(ordering.weight)
        for live in waiting:
            after.add(live)
    return after
