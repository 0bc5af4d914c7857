"""When an executor's next plan is due. Pure: times are passed in, in seconds of one monotonic clock.

A plan should leave as late as possible, so that an arrival or a cancel still catches it, yet reach the executor before the plan
ahead of it ends. `Pacer` asks for plan N + 1 a lead before the expected end of plan N. The lead is the measured round trip and a
margin, and the margin balances two observations that every result carries:

- the plan came after the end of the plan ahead (`idle_us`): the margin grows by GROW times that at once;
- it came before that end (`queue_us`): the margin shrinks by SHRINK of that.

At balance the two are equal, so idle time is at most SHRINK / GROW of the time that plans wait, whatever the jitter of the steps,
and a plan never waits longer than a step: the executor idles at most SHRINK / GROW, 0.8 %, of the time. Behind a plan with prefill
there is a margin of its own: how long such a step takes is not foreseen as well.

A plan of several steps costs one round trip. It is to end when as many are done as fit into the time that a token may wait for
others (`Repeats`). The next plan cuts it short, so what happens meanwhile (`hurry`) waits for one step only. It may have some more
steps than fit, for the executor to go on with while the next plan is late: in place of idle and waiting time, the margin is then
balanced by how much too many or too few steps were done. One that is shorter than it could be, ahead of an end, may finish.

Must not know: the core, connections, asyncio.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tokenmill_scheduler.core.plans import Plan, StepTimes

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

    def observe(self, tokens: int, seconds: float, times: int = 1) -> None:
        """`times` steps of so many tokens took `seconds` each."""
        self._steps += times
        weight = max(1 - (1 - NEWEST) ** times, times / self._steps)
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
    """`had_work`: work waited for it while the executor was free. `paced`: it came when it was thought best, and the core would
    have had a plan earlier.

    `steps`: how many of its shape's the executor is to take, going on only where the next plan is late. `follows`: the plan ahead.
    """

    shape: StepShape
    steps: int
    sent_s: float
    had_work: bool
    paced: bool
    follows: StepShape


class Pacer:
    """Paces the plans of one executor, from its joining on; at most `depth` are out at once."""

    def __init__(self, depth: int, joined_s: float, repeats: Repeats = ONE_STEP) -> None:
        self.depth = depth
        self._repeats = repeats
        self._decode_tokens = 0  # of the last step without prefill
        self._hurried = False
        self.joined_s = joined_s
        # By whether the plan ahead has prefill: how long that takes is not foreseen as well.
        self.margins_s = {False: FIRST_MARGIN_S, True: FIRST_MARGIN_S}
        self.round_trip_s = 0.0
        self.last_round_trip_s = 0.0
        self.steps = 0
        self.plans = 0
        self.idle_s = 0.0
        self.busy_s = 0.0
        self._models = {False: StepTimeModel(), True: StepTimeModel()}
        self._out: deque[_PlanOut] = deque()
        self._newest = StepShape(0, has_prefill=False)
        # How much sooner than intended the plan ahead of the oldest one out ended: that one came so much earlier than it need.
        self._cut_s = 0.0
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
        expected_s = [self._expect(plan) for plan in self._out]
        lead_s = self.round_trip_s + min(self.margins_s[self._newest.has_prefill], expected_s[-1])
        return self._started_s + sum(expected_s) - lead_s

    def hurry(self) -> None:
        """Something has happened that may change the next plan: it is due at once, if it can cut a longer one short."""
        self._hurried = True

    def most_steps(self) -> int:
        """Of the next plan, if it only decodes: some more than fit, for the executor to go on with while the one behind is late."""
        return min(self._repeats.max_steps, self._fitting_steps() * 5 // 4)

    def _fitting_steps(self) -> int:
        """So many that the first one's token waits for the others' no longer than it may."""
        step_s = self._models[False].expect(self._decode_tokens)
        return 1 if step_s is None else 1 + int(self._repeats.patience_s / max(step_s, _LEAST_STEP_S))

    @property
    def lets_finish(self) -> bool:
        """Whether the plan ahead may take all its steps before the next one: nothing has happened, and none is in reserve."""
        ahead = self._out[-1] if self._out else None
        return ahead is not None and not self._hurried and 1 < ahead.shape.steps == ahead.steps

    def sent(self, shape: StepShape, now_s: float, *, reaches_end: bool = False) -> None:
        """`reaches_end`: with all its steps it brings a sequence to its end."""
        if not self._out:
            self._started_s = now_s + self.round_trip_s
        # One that is shorter than it could be is on its way to an end, too: what it left undone would take a plan of its own.
        steps = shape.steps if reaches_end or shape.steps < self.most_steps() else min(shape.steps, self._fitting_steps())
        paced = not self._declined and not self._hurried
        self._out.append(_PlanOut(shape, steps, now_s, not self._workless, paced, self._newest))
        self._newest = shape
        self._hurried = self._declined = self._workless = False

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
            self._decode_tokens = plan.shape.tokens
        self._models[plan.shape.has_prefill].observe(plan.shape.tokens, step_s, num_steps)
        self._observe_round_trip(max(0.0, now_s - plan.sent_s - queue_s - steps_s))
        self._started_s = now_s
        if plan.had_work:
            self.idle_s += idle_s
        if plan.paced:
            self._adapt(plan.follows, queue_s - idle_s + self._cut_s)
        cut_s = (plan.steps - num_steps) * step_s
        # With none out that could have cut it short, its sequences ended.
        self._cut_s = cut_s if self._out else min(cut_s, 0.0)

    def idle_share(self, now_s: float) -> float:
        """Share of the time since it joined that the executor waited for a plan while work waited."""
        return self.idle_s / max(now_s - self.joined_s, 1e-9)

    def _expect(self, plan: _PlanOut) -> float:
        """A shape never seen counts as instant: its successor leaves at once, which costs lateness of decision, never idle time."""
        return plan.steps * (self._models[plan.shape.has_prefill].expect(plan.shape.tokens) or 0.0)

    def _observe_round_trip(self, seconds: float) -> None:
        self.last_round_trip_s = seconds
        weight = max(NEWEST, 1 / self.plans)
        self.round_trip_s += weight * (seconds - self.round_trip_s)

    def _adapt(self, ahead: StepShape, early_s: float) -> None:
        """`early_s`: how long before the intended end of the plan ahead of it a plan came; below zero: how long after."""
        margin_s = self.margins_s[ahead.has_prefill] - (early_s * SHRINK if early_s > 0 else early_s * GROW)
        most_s = self._models[ahead.has_prefill].expect(ahead.tokens) or 0.0
        self.margins_s[ahead.has_prefill] = max(MIN_MARGIN_S, min(margin_s, max(most_s, FIRST_MARGIN_S)))
