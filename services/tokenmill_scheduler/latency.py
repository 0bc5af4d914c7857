"""How long readers wait: latencies by lane and policy, and the gaps between a request's tokens at a few operations a step.

Must not know: records, states, who asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenmill_service.histogram import SECONDS, Histogram

from tokenmill_scheduler.core.request import Lane


class Latency:
    """One histogram for each lane under each policy that was in force."""

    def __init__(self, policy: str, bounds: tuple[float, ...] = SECONDS) -> None:
        self.histograms: dict[tuple[Lane, str], Histogram] = {}
        self._bounds = bounds
        self.use(policy)

    def use(self, policy: str) -> None:
        """From now on this policy is in force."""
        in_force = [self.histograms.setdefault((lane, policy), Histogram(self._bounds)) for lane in Lane]
        # By the lane's number: to hash a member of an enum takes longer than to observe.
        self._in_force = [in_force[0], *in_force]

    def observe(self, lane: Lane, seconds: float, times: int = 1) -> None:
        self._in_force[lane].observe(seconds, times)

    def total(self) -> Histogram:
        """All lanes and policies together."""
        total = Histogram(self._bounds)
        for histogram in self.histograms.values():
            total.counts = [mine + its for mine, its in zip(total.counts, histogram.counts, strict=True)]
            total.total += histogram.total
        return total


@dataclass(slots=True, eq=False)
class _Since:
    """From when the next token is timed: of one request from its arrival, of many of one lane from the step that they shared.

    `step` is None before the first token.
    """

    lane: Lane
    at_s: float
    step: _Step | None = None
    requests: int = 1


@dataclass(slots=True, eq=False)
class _Step:
    """Requests whose last token came together, and mostly the next will: a step of them all costs a few operations for each lane.

    `members` are in the order of their last time, and each can be taken out at once; `request_ids` are the same, or empty when one
    has gone since.
    """

    members: dict[str, None] = field(default_factory=dict)
    request_ids: tuple[str, ...] = ()
    since: dict[Lane, _Since] = field(default_factory=dict)

    def join(self, request_id: str, lane: Lane, at_s: float) -> _Since:
        """At the time of the step, which is `at_s`."""
        self.members[request_id] = None
        since = self.since.get(lane)
        if since is None:
            since = self.since[lane] = _Since(lane, at_s, self, requests=0)
        since.at_s = at_s
        since.requests += 1
        return since

    def leave(self, request_id: str, lane: Lane) -> None:
        self.request_ids = ()
        del self.members[request_id]
        self.since[lane].requests -= 1


class TokenGaps:
    """Observes `first`, from a request's arrival to its first token, and `between`, from each token to the next."""

    def __init__(self, first: Latency, between: Latency) -> None:
        self._first = first
        self._between = between
        self._since: dict[str, _Since] = {}

    def begin(self, request_id: str, lane: Lane, arrival_s: float) -> None:
        """A request without a token."""
        self._since[request_id] = _Since(lane, arrival_s)

    def resume(self, request_id: str, lane: Lane, now_s: float) -> None:
        """One that has had tokens, nobody here knows when."""
        self._since[request_id] = _Step().join(request_id, lane, now_s)

    def end(self, request_id: str) -> None:
        since = self._since.pop(request_id)
        if since.step is not None:
            since.step.leave(request_id, since.lane)

    def told(self, request_ids: tuple[str, ...], counts: tuple[int, ...], now_s: float) -> None:
        """One sample a token; requests that had their last token together are counted together.

        Tokens of one request that come at once have come one after the other, in equal parts of the time.
        """
        if counts.count(counts[0]) == len(counts):
            self._told(request_ids, counts[0], now_s)
            return
        for count in sorted(set(counts)):
            self._told(tuple([i for i, its in zip(request_ids, counts, strict=True) if its == count]), count, now_s)

    def _told(self, request_ids: tuple[str, ...], count: int, now_s: float) -> None:
        step = self._step_of(request_ids)
        came = self._changes(step, request_ids) if step.request_ids != request_ids else ()
        for since in step.since.values():
            if since.requests:
                self._between.observe(since.lane, (now_s - since.at_s) / count, since.requests * count)
                since.at_s = now_s
        for request_id in came:
            self._join(request_id, step, count, now_s)

    def _changes(self, step: _Step, request_ids: tuple[str, ...]) -> Sequence[str]:
        """Those that were not of this step; the ones that are not here leave it."""
        stayed = len(step.members)
        step.request_ids = request_ids
        # Those that ended have left already, and new ones are the last.
        if tuple(step.members) == request_ids[:stayed]:
            return request_ids[stayed:]
        here, before = set(request_ids), step.members
        for request_id in [member for member in before if member not in here]:
            self._sit_out(request_id, step)
        step.members = {request_id: None for request_id in request_ids if request_id in before}
        step.request_ids = request_ids
        return [request_id for request_id in request_ids if request_id not in before]

    def _step_of(self, request_ids: tuple[str, ...]) -> _Step:
        """The larger of those that the first and the last of them are of: most of the others are of it, too."""
        steps = [step for request_id in (request_ids[0], request_ids[-1]) if (step := self._since[request_id].step) is not None]
        return max(steps, key=lambda step: len(step.members)) if steps else _Step()

    def _sit_out(self, request_id: str, step: _Step) -> None:
        """The others go on without it."""
        since = self._since[request_id]
        step.leave(request_id, since.lane)
        self._since[request_id] = _Step().join(request_id, since.lane, since.at_s)

    def _join(self, request_id: str, step: _Step, count: int, now_s: float) -> None:
        """From its arrival, or from another step."""
        since = self._since[request_id]
        if since.step is None:
            self._first.observe(since.lane, now_s - since.at_s)
            self._between.observe(since.lane, 0.0, count - 1)
        else:
            self._between.observe(since.lane, (now_s - since.at_s) / count, count)
            since.step.leave(request_id, since.lane)
        self._since[request_id] = step.join(request_id, since.lane, now_s)
