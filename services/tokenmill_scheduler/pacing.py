"""When an executor's next plan is due. Pure: times are passed in, in seconds of one monotonic clock.

A plan should leave as late as possible, so that an arrival or a cancel still catches it, yet reach the executor before the plan
ahead of it ends. `Pacer` asks for plan N + 1 a lead before the expected end of plan N. The lead is the measured round trip and a
margin, and the margin balances two observations that every result carries:

- the executor waited for this plan (`idle_us`): the margin grows by GROW times that at once;
- the plan waited for the executor (`queue_us`): the margin shrinks by SHRINK of that.

At balance the two are equal, so idle time is at most SHRINK / GROW of the time that plans wait, whatever the jitter of the steps,
and a plan never waits longer than a step: the executor idles at most SHRINK / GROW, 0.8 %, of the time.

A plan of several steps costs one round trip. It may have as many as fit into the time that a token may wait for others
(`Repeats`); since the next plan cuts it short, what happens meanwhile (`hurry`) waits for one step only.

Must not know: the core, connections, asyncio.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf

from tokenmill_scheduler.core.records import Plan, StepTimes

GROW = 2.0
SHRINK = 1 / 64
MIN_MARGIN_S = 0.0005
FIRST_MARGIN_S = 0.003
# Weight of the newest observation in what is remembered of round trips and step times.
NEWEST = 0.1
_LEAST_STEP_S = 1e-6


@dataclass(frozen=True, slots=True)
class Repeats:
    """How many steps a plan may have at most, and for how long they may go on, in seconds."""

    max_steps: int = 1
    patience_s: float = 0.0


ONE_STEP = Repeats()


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the time of a plan's steps depends on: the tokens of each, and how many there are at most."""

    tokens: int
    has_prefill: bool
    steps: int = 1

    @classmethod
    def of(cls, plan: Plan) -> StepShape:
        if plan.max_steps > 1:
            return cls(len(plan.advance_max_tokens), False, plan.max_steps)
        tokens = sum(plan.advance_max_tokens)
        return cls(tokens, has_prefill=tokens > len(plan.advance_max_tokens))


class StepTimeModel:
    """Expected step time as base + rate × tokens: a least-squares line through recent steps, old ones fading away."""

    def __init__(self) -> None:
        self._steps = 0
        self._tokens = self._seconds = self._tokens_var = self._covariance = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        self._steps += 1
        weight = max(NEWEST, 1 / self._steps)
        from_mean = tokens - self._tokens
        self._covariance = (1 - weight) * (self._covariance + weight * from_mean * (seconds - self._seconds))
        self._tokens_var = (1 - weight) * (self._tokens_var + weight * from_mean * from_mean)
        self._tokens += weight * from_mean
        self._seconds += weight * (seconds - self._seconds)

    def expect(self, tokens: int) -> float | None:
        """Seconds; None before the first observation. Never below zero, and more tokens never take less time."""
        if not self._steps:
            return None
        # One squared token of doubt: shapes that hardly differ teach no slope.
        rate = max(0.0, self._covariance / (self._tokens_var + 1.0))
        return max(0.0, self._seconds + rate * (tokens - self._tokens))


@dataclass(frozen=True, slots=True)
class _PlanOut:
    """`had_work`: work waited for it while the executor was free. `paced`: and the core would have had a plan earlier."""

    shape: StepShape
    sent_s: float
    had_work: bool
    paced: bool


class Pacer:
    """Paces the plans of one executor, from its joining on; at most `depth` are out at once."""

    def __init__(self, depth: int, joined_s: float, repeats: Repeats = ONE_STEP) -> None:
        self.depth = depth
        self._repeats = repeats
        self._decode_step_s = inf
        self._hurried = False
        self.joined_s = joined_s
        self.margin_s = FIRST_MARGIN_S
        self.round_trip_s = 0.0
        self.last_round_trip_s = 0.0
        self.steps = 0
        self.plans = 0
        self.idle_s = 0.0
        self.busy_s = 0.0
        self._models = {False: StepTimeModel(), True: StepTimeModel()}
        self._out: deque[_PlanOut] = deque()
        # When the oldest plan out started, as a result of no duration would have told us.
        self._started_s = joined_s
        # No plan could be made when one was last asked for: at all, and when none was out.
        self._declined = True
        self._workless = True

    @property
    def plans_out(self) -> int:
        return len(self._out)

    def due_s(self, now_s: float) -> float | None:
        """When the next plan should be asked for (maybe in the past); None while `depth` plans are out."""
        if len(self._out) >= self.depth:
            return None
        if not self._out or (self._hurried and self._out[-1].shape.steps > 1):
            return now_s
        expected_s = [self._expect(plan.shape) for plan in self._out]
        lead_s = self.round_trip_s + min(self.margin_s, expected_s[-1])
        return self._started_s + sum(expected_s) - lead_s

    def hurry(self) -> None:
        """Something has happened that may change the next plan: it is due at once, if it can cut a longer one short."""
        self._hurried = True

    def most_steps(self) -> int:
        """Of the next plan, if it only decodes."""
        fitting = int(self._repeats.patience_s / max(self._decode_step_s, _LEAST_STEP_S))
        return max(1, min(self._repeats.max_steps, fitting))

    def sent(self, shape: StepShape, now_s: float) -> None:
        self._hurried = False
        if not self._out:
            self._started_s = now_s + self.round_trip_s
        self._out.append(_PlanOut(shape, now_s, had_work=not self._workless, paced=not self._declined))
        self._declined = self._workless = False

    def declined(self) -> None:
        """Asked for a plan, the core had none to give."""
        self._hurried = False
        self._declined = True
        self._workless = self._workless or not self._out

    def answered(self, times: StepTimes, now_s: float, num_steps: int = 1) -> None:
        """The oldest plan out came back, after so many steps."""
        plan = self._out.popleft()
        steps_s = times.steps_s
        step_s = steps_s / num_steps
        queue_s = times.queue_us / 1e6
        idle_s = times.idle_us / 1e6
        self.steps += num_steps
        self.plans += 1
        self.busy_s += steps_s
        if not plan.shape.has_prefill:
            self._decode_step_s = step_s
        self._models[plan.shape.has_prefill].observe(plan.shape.tokens, step_s)
        self._observe_round_trip(max(0.0, now_s - plan.sent_s - queue_s - steps_s))
        self._started_s = now_s
        if plan.had_work:
            self.idle_s += idle_s
        if plan.paced:
            self._adapt(idle_s, queue_s, step_s)

    def idle_share(self, now_s: float) -> float:
        """Share of the time since it joined that the executor waited for a plan while work waited."""
        return self.idle_s / max(now_s - self.joined_s, 1e-9)

    def _expect(self, shape: StepShape) -> float:
        """A shape never seen counts as instant: its successor leaves at once, which costs lateness of decision, never idle time."""
        return shape.steps * (self._models[shape.has_prefill].expect(shape.tokens) or 0.0)

    def _observe_round_trip(self, seconds: float) -> None:
        self.last_round_trip_s = seconds
        weight = max(NEWEST, 1 / self.plans)
        self.round_trip_s += weight * (seconds - self.round_trip_s)

    def _adapt(self, idle_s: float, queue_s: float, step_s: float) -> None:
        margin_s = self.margin_s + GROW * idle_s - SHRINK * queue_s
        self.margin_s = max(MIN_MARGIN_S, min(margin_s, max(step_s, FIRST_MARGIN_S)))
