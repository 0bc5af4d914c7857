"""What happens in the loop, as counts and histograms: told of records, results and commits, a few operations a step for each lane.

Latencies are those that readers see: a token counts from when it is durable. Methods belong to the event loop's thread, and are
called later than what they tell of, in the same order (`tally.py`). Must not know: SQL, gRPC, how figures are told
(`exposition.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tokenmill_service.histogram import SECONDS, SHARES, SHORT_SECONDS, TOKENS, Histogram

from tokenmill_scheduler.core.effects import TokensGenerated, Transitioned
from tokenmill_scheduler.core.plans import Result
from tokenmill_scheduler.core.request import QUEUED, FinishReason, Lane, Request, State
from tokenmill_scheduler.desk.records import LaneLoad
from tokenmill_scheduler.latency import Latency, TokenGaps
from tokenmill_scheduler.ledger.records import Record

# A tuple looks for the very object first; a set would hash it, which members of an enum do slowly.
_QUEUED = tuple(sorted(QUEUED))


@dataclass(slots=True, eq=False)
class _Life:
    """Of a request that has not ended; `accepted_s` is when this scheduler took it up, durable."""

    lane: Lane
    gauge: LaneGauge
    arrival_s: float
    accepted_s: float


@dataclass(slots=True)
class LaneGauge:
    """`waiting`: since when each request is in the queue, by id; one that was preempted waits anew."""

    waiting: dict[str, float] = field(default_factory=dict)

    def moved(self, request_id: str, before: State | None, after: State, at_s: float) -> None:
        if before in _QUEUED:
            del self.waiting[request_id]
        if after in _QUEUED:
            self.waiting[request_id] = at_s

    def oldest_wait_s(self, now_s: float) -> float:
        """0 when none waits."""
        return max(0.0, now_s - min(self.waiting.values(), default=now_s))


class Metrics:
    """Seconds throughout; times are Unix seconds of the loop's clock."""

    def __init__(self, policy: str) -> None:
        self.lanes = {lane: LaneGauge() for lane in Lane}
        self.scheduling_delay = Latency(policy, (*SHORT_SECONDS, *SECONDS[-6:]))
        self.queue_time = Latency(policy)
        self.time_to_first_token = Latency(policy)
        self.inter_token = Latency(policy)
        self.end_to_end = Latency(policy)
        self.batch_occupancy = Histogram(SHARES)
        self.iteration_tokens = Histogram(TOKENS)
        self.round_trip = Histogram(SHORT_SECONDS)
        self.ledger_lag = Histogram(SHORT_SECONDS)
        self.accepted = dict.fromkeys(Lane, 0)
        self.finished = dict.fromkeys(FinishReason, 0)
        self.refused: Counter[str] = Counter()
        # Of the last step, by executor.
        self.last_occupancy: dict[str, float] = {}
        self._lives: dict[str, _Life] = {}
        self._gaps = TokenGaps(self.time_to_first_token, self.inter_token)

    def use_policy(self, policy: str) -> None:
        for latency in (self.scheduling_delay, self.queue_time, self.time_to_first_token, self.inter_token, self.end_to_end):
            latency.use(policy)

    # ---- requests --------------------------------------------------------------------------------------------------------------

    def accept(self, request: Request, now_s: float) -> None:
        """It has just become durable."""
        self.accepted[request.lane] += 1
        self.take_up(request, State.WAITING, has_output=False, now_s=now_s)

    def take_up(self, request: Request, state: State, has_output: bool, now_s: float) -> None:
        """Also from another process, with what it had. The gap to a token of that process is not known: it counts from now."""
        request_id = request.request_id
        gauge = self.lanes[request.lane]
        self._lives[request_id] = _Life(request.lane, gauge, request.arrival_s, now_s)
        if has_output:
            self._gaps.resume(request_id, request.lane, now_s)
        else:
            self._gaps.begin(request_id, request.lane, request.arrival_s)
        gauge.moved(request_id, None, state, request.arrival_s)

    def moved(self, moves: Sequence[Transitioned]) -> None:
        """The core said so."""
        for move in moves:
            self._moved(move)

    def _moved(self, record: Transitioned) -> None:
        if record.before is State.PREFILL and record.after is State.DECODE:
            # As often as any other, and nothing that is counted.
            return
        life = self._lives[record.request_id]
        life.gauge.moved(record.request_id, record.before, record.after, record.at_s)
        if record.before is State.WAITING and record.after is State.PREFILL:
            self.queue_time.observe(life.lane, record.at_s - life.arrival_s)
            self.scheduling_delay.observe(life.lane, record.at_s - life.accepted_s)

    def committed(self, records: Sequence[Record], handed_over_s: float, now_s: float) -> None:
        """They are durable; they were handed to the writer at `handed_over_s`."""
        self.ledger_lag.observe(now_s - handed_over_s)
        for record in records:
            if isinstance(record, TokensGenerated):
                self._gaps.told(record.request_ids, record.counts, now_s)
            elif isinstance(record, Transitioned) and record.finish_reason is not None:
                self._ended(record, record.finish_reason, now_s)

    def _ended(self, record: Transitioned, reason: FinishReason, now_s: float) -> None:
        life = self._lives.pop(record.request_id)
        self._gaps.end(record.request_id)
        self.finished[reason] += 1
        if record.after is State.DONE:
            self.end_to_end.observe(life.lane, now_s - life.arrival_s)

    def forget(self, request_id: str) -> None:
        """Another scheduler goes on with it."""
        self._lives.pop(request_id).gauge.waiting.pop(request_id, None)
        self._gaps.end(request_id)

    def refuse(self, reason: str) -> None:
        """A submit; `reason` is one of the few that a status can have."""
        self.refused[reason] += 1

    def lane_loads(self, running: Mapping[Lane, int], now_s: float) -> tuple[LaneLoad, ...]:
        """The most urgent lane first; the core knows what is `running`."""
        return tuple(
            LaneLoad(lane, running[lane], len(gauge.waiting), gauge.oldest_wait_s(now_s)) for lane, gauge in self.lanes.items()
        )

    # ---- steps -----------------------------------------------------------------------------------------------------------------

    def stepped(self, executor: str, max_num_seqs: int, result: Result, round_trip_s: float) -> None:
        occupancy = len(result.sequence_ids) / max_num_seqs
        self.last_occupancy[executor] = occupancy
        steps = result.num_steps
        self.batch_occupancy.observe(occupancy, steps)
        self.iteration_tokens.observe(sum(result.num_computed) / steps, steps)
        self.round_trip.observe(round_trip_s)
