"""When plans are due. A small executor model plays them out: time is a number, nothing sleeps."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from tokenmill_scheduler.core.plans import Plan, StepTimes
from tokenmill_scheduler.pacing import FIRST_MARGIN_S, GROW, MIN_MARGIN_S, SHRINK, Pacer, Repeats, StepShape, StepTimeModel

DECODE = StepShape(tokens=8, has_prefill=False)
PREFILL = StepShape(tokens=512, has_prefill=True)


@dataclass
class PlayedExecutor:
    """Executes plans one after another; `half_trip_s` each way. Answers are handed to the pacer at the time they arrive."""

    pacer: Pacer
    half_trip_s: float
    free_s: float = 0.0
    answers: list[tuple[float, StepTimes]] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)

    def send(self, shape: StepShape, step_s: float, now_s: float) -> None:
        self.pacer.sent(shape, now_s)
        arrived_s = now_s + self.half_trip_s
        started_s = max(arrived_s, self.free_s)
        idle_s = max(0.0, arrived_s - self.free_s)
        self.free_s = started_s + step_s
        self.waits_s.append(started_s - arrived_s)
        times = StepTimes(queue_us=_us(started_s - arrived_s), forward_us=_us(step_s), idle_us=_us(idle_s))
        self.answers.append((self.free_s + self.half_trip_s, times))

    def next_answer_s(self) -> float:
        return self.answers[0][0] if self.answers else float("inf")

    def answer(self) -> float:
        at_s, times = self.answers.pop(0)
        self.pacer.answered(times, at_s)
        return at_s


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def play(steps: list[tuple[StepShape, float]], half_trip_s: float = 0.0002, timer_lag_s: float = 0.0002) -> PlayedExecutor:
    """Every step is sent when the pacer says, a little late as timers are; there is always work."""
    pacer = Pacer(depth=2, joined_s=0.0)
    executor = PlayedExecutor(pacer, half_trip_s)
    now_s = 0.0
    for shape, step_s in steps:
        while (due_s := pacer.due_s(now_s)) is None or due_s > executor.next_answer_s():
            now_s = executor.answer()
        now_s = now_s if due_s <= now_s else min(due_s + timer_lag_s, max(now_s, executor.next_answer_s()))
        executor.send(shape, step_s, now_s)
    while executor.answers:
        executor.answer()
    return executor


def idle_of_busy(pacer: Pacer) -> float:
    return pacer.idle_s / (pacer.idle_s + pacer.busy_s)


def test_the_first_plan_is_due_at_once() -> None:
    assert Pacer(depth=2, joined_s=5.0).due_s(7.0) == 7.0


def test_no_plan_is_due_while_depth_plans_are_out() -> None:
    pacer = Pacer(depth=2, joined_s=0.0)
    pacer.sent(DECODE, 0.0)
    pacer.sent(DECODE, 0.0)
    assert pacer.plans_out == 2
    assert pacer.due_s(0.1) is None


def test_depth_one_waits_for_each_result() -> None:
    pacer = Pacer(depth=1, joined_s=0.0)
    pacer.sent(DECODE, 0.0)
    assert pacer.due_s(1.0) is None
    pacer.answered(StepTimes(forward_us=20_000), 0.02)
    assert pacer.due_s(0.02) == 0.02


def test_the_next_plan_leaves_late_in_the_step_before() -> None:
    pacer = Pacer(depth=2, joined_s=0.0)
    pacer.sent(DECODE, 0.0)
    pacer.answered(StepTimes(forward_us=20_000), 0.021)
    pacer.sent(DECODE, 0.021)
    due_s = pacer.due_s(0.021)
    assert due_s is not None
    # The step is expected back at 0.021 + round trip 0.001 + 0.020; the lead is the round trip and the first margin.
    assert due_s == pytest.approx(0.021 + 0.020 - FIRST_MARGIN_S)


def test_a_step_of_a_shape_never_seen_is_followed_at_once() -> None:
    pacer = Pacer(depth=2, joined_s=0.0)
    pacer.sent(DECODE, 0.0)
    pacer.answered(StepTimes(forward_us=20_000), 0.021)
    pacer.sent(PREFILL, 0.021)
    due_s = pacer.due_s(0.021)
    assert due_s is not None
    assert due_s <= 0.022


def test_steady_steps_leave_the_executor_no_idle_time_and_decisions_late() -> None:
    executor = play([(DECODE, 0.020)] * 400)
    assert idle_of_busy(executor.pacer) < 0.001
    late = executor.waits_s[-100:]
    assert sum(late) / len(late) < 0.004  # of 20 ms: the decision is taken in the last fifth of the step before


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("jitter", [0.05, 0.2, 0.5])
def test_jitter_costs_lateness_of_decision_but_not_idle_time(seed: int, jitter: float) -> None:
    rng = random.Random(seed)
    steps = [(DECODE, max(0.002, rng.gauss(0.020, 0.020 * jitter))) for _ in range(2_000)]
    assert idle_of_busy(play(steps).pacer) < 0.012


@pytest.mark.parametrize("seed", range(3))
def test_prefill_chunks_among_decodes_cost_little_idle_time(seed: int) -> None:
    rng = random.Random(seed)
    steps = []
    for _ in range(1_000):
        prefill = rng.random() < 0.3
        tokens = rng.randrange(32, 512) if prefill else 8
        steps.append((StepShape(tokens, prefill), (0.015 + tokens * 0.0003) * rng.uniform(0.9, 1.1)))
    assert idle_of_busy(play(steps).pacer) < 0.02


def test_idle_time_widens_the_margin_at_once_and_waiting_narrows_it_slowly() -> None:
    pacer = Pacer(depth=2, joined_s=0.0)
    pacer.sent(DECODE, 0.0)
    pacer.answered(StepTimes(forward_us=20_000), 0.02)
    pacer.sent(DECODE, 0.02)
    pacer.answered(StepTimes(forward_us=20_000, idle_us=2_000), 0.042)
    widened = pacer.margins_s[False]
    assert widened == pytest.approx(FIRST_MARGIN_S + 0.004)
    for _ in range(1_000):
        pacer.sent(DECODE, 1.0)
        pacer.answered(StepTimes(forward_us=20_000, queue_us=_us(pacer.margins_s[False])), 1.02)
    assert MIN_MARGIN_S <= pacer.margins_s[False] < 0.001


def test_a_stall_is_forgotten() -> None:
    executor = play([(DECODE, 0.020)] * 50 + [(DECODE, 2.0)] + [(DECODE, 0.020)] * 400)
    assert sum(executor.waits_s[-50:]) / 50 < 0.004


def test_time_without_work_is_no_idle_time() -> None:
    pacer = Pacer(depth=2, joined_s=0.0)
    pacer.sent(DECODE, 0.0)
    pacer.answered(StepTimes(forward_us=20_000), 0.02)
    pacer.declined()
    pacer.sent(DECODE, 10.0)
    pacer.answered(StepTimes(forward_us=20_000, idle_us=9_980_000), 10.02)
    assert pacer.idle_share(10.02) == 0.0
    assert pacer.margins_s[False] == FIRST_MARGIN_S


def test_idle_time_while_the_core_could_not_plan_counts_but_is_no_matter_of_pace() -> None:
    pacer = Pacer(depth=2, joined_s=0.0)
    pacer.sent(DECODE, 0.0)
    pacer.declined()
    pacer.answered(StepTimes(forward_us=20_000), 0.02)
    pacer.sent(DECODE, 0.02)
    pacer.answered(StepTimes(forward_us=20_000, idle_us=500), 0.04)
    assert pacer.idle_share(0.04) == pytest.approx(0.0005 / 0.04)
    assert pacer.margins_s[False] == FIRST_MARGIN_S


def test_the_line_through_step_times_follows_tokens() -> None:
    model = StepTimeModel()
    assert model.expect(10) is None
    rng = random.Random(1)
    for _ in range(200):
        tokens = rng.randrange(1, 512)
        model.observe(tokens, 0.01 + tokens * 0.0002)
    for tokens in (1, 100, 512):
        expected = model.expect(tokens)
        assert expected == pytest.approx(0.01 + tokens * 0.0002, rel=0.05)


def test_equal_shapes_teach_a_mean_and_no_slope() -> None:
    model = StepTimeModel()
    for _ in range(50):
        model.observe(8, 0.02)
    assert model.expect(8) == pytest.approx(0.02)
    assert model.expect(500) == pytest.approx(0.02)


def test_the_shape_of_a_plan() -> None:
    decode = Plan(1, 1, (), (), (1, 2, 3), (1, 1, 1))
    mixed = Plan(1, 2, (), (), (1, 2), (1, 64))
    assert StepShape.of(decode) == StepShape(3, has_prefill=False)
    assert StepShape.of(mixed) == StepShape(65, has_prefill=True)


# ---- plans of several steps ----------------------------------------------------------------------------------------------------


def repeating(max_steps: int = 8, patience_s: float = 0.045) -> Pacer:
    """One that has seen a decode take 10 ms."""
    pacer = Pacer(2, 0.0, Repeats(max_steps, patience_s))
    assert pacer.most_steps() == 1, "nobody knows yet how long a step is"
    pacer.sent(DECODE, 0.0)
    pacer.answered(StepTimes(forward_us=10_000), 0.0102)
    return pacer


@pytest.mark.parametrize(
    ("max_steps", "patience_s", "most"),
    [(8, 0.045, 6), (3, 0.045, 3), (8, 0.0, 1), (8, 0.009, 1), (8, 0.011, 2), (8, 0.029, 3), (8, 0.031, 5), (1, 9.0, 1)],
)
def test_steps_go_on_for_as_long_as_a_token_may_wait_and_a_quarter_in_reserve(max_steps: int, patience_s: float, most: int) -> None:
    assert repeating(max_steps, patience_s).most_steps() == most


def test_one_slow_step_makes_no_plan_much_shorter() -> None:
    pacer = repeating(16, 0.095)
    for step in range(30):
        pacer.sent(DECODE, 0.02 * step)
        pacer.answered(StepTimes(forward_us=30_000 if step == 29 else 10_000), 0.02 * step + 0.0102)
    assert pacer.most_steps() == 10


@pytest.mark.parametrize("steps", [5, 6])
def test_a_plan_of_several_steps_is_expected_to_take_as_many_times_as_long_as_fit(steps: int) -> None:
    """Five: one in reserve is not waited for."""
    pacer = repeating()
    pacer.sent(replace(DECODE, steps=steps), 0.02)
    due_s = pacer.due_s(0.02)
    assert due_s is not None
    assert 0.02 + 4 * 0.01 < due_s < 0.02 + 5 * 0.01
    # Cut short after two of them: steps are still of 10 ms.
    pacer.answered(StepTimes(forward_us=20_000), 0.0402, 2)
    assert (pacer.steps, pacer.plans, pacer.most_steps()) == (3, 2, 6)


def test_what_happens_in_the_middle_of_many_steps_is_planned_at_once_and_only_then() -> None:
    pacer = repeating()
    pacer.sent(replace(DECODE, steps=5), 0.02)
    pacer.hurry()
    assert pacer.due_s(0.021) == 0.021
    pacer.declined()
    assert (pacer.due_s(0.022) or 0.0) > 0.05
    pacer.hurry()
    pacer.sent(DECODE, 0.023)
    pacer.answered(StepTimes(forward_us=10_000), 0.031, 1)
    pacer.hurry()
    # The plan that is out is one step: the next leaves late in it, as ever.
    assert (pacer.due_s(0.0311) or 0.0) > 0.035


@pytest.mark.parametrize(("steps_done", "queue_us", "early_s"), [(6, 8_000, -0.002), (5, 3_000, 0.003), (3, 4_000, 0.024)])
def test_the_margin_is_balanced_by_steps_too_many_and_too_few(steps_done: int, queue_us: int, early_s: float) -> None:
    """Of a plan of five steps and one in reserve, cut short by the next one, that then waited for the end of the last."""
    pacer = repeating()
    pacer.sent(replace(DECODE, steps=6), 0.02)
    pacer.sent(DECODE, 0.06)
    pacer.answered(StepTimes(forward_us=steps_done * 10_000), 0.02 + steps_done * 0.01, steps_done)
    before_s = pacer.margins_s[False]
    pacer.answered(StepTimes(forward_us=10_000, queue_us=queue_us), 0.09)
    change_s = -early_s * (SHRINK if early_s > 0 else GROW)
    assert pacer.margins_s[False] - before_s == pytest.approx(change_s)


@pytest.mark.parametrize(("steps", "lets_finish"), [(1, False), (2, True), (4, True), (5, True), (6, False)])
def test_the_next_plan_lets_steps_finish_of_which_none_is_in_reserve(steps: int, lets_finish: bool) -> None:
    pacer = repeating()
    assert not pacer.lets_finish
    pacer.sent(replace(DECODE, steps=steps), 0.02)
    assert pacer.lets_finish is lets_finish
    # Its successor is due ahead of its last step, or of the last that fits.
    due_s = pacer.due_s(0.02)
    assert due_s is not None
    assert 0.02 + (min(steps, 5) - 1) * 0.01 < due_s < 0.02 + min(steps, 5) * 0.01
    pacer.hurry()
    assert not pacer.lets_finish, "what has happened waits for one step only"


def test_a_plan_as_long_as_can_be_that_reaches_an_end_takes_its_reserve_too() -> None:
    """Cut short, it would leave a sequence behind that the next plan, made on all of its steps, goes on without."""
    pacer = repeating()
    pacer.sent(replace(DECODE, steps=pacer.most_steps()), 0.02, reaches_end=True)
    assert pacer.lets_finish
    due_s = pacer.due_s(0.02)
    assert due_s is not None
    assert 0.02 + 5 * 0.01 < due_s < 0.02 + 6 * 0.01


def test_a_plan_that_was_hurried_was_not_early() -> None:
    pacer = repeating()
    pacer.sent(replace(DECODE, steps=6), 0.02)
    pacer.hurry()
    pacer.sent(DECODE, 0.025)
    pacer.answered(StepTimes(forward_us=10_000), 0.03, 1)
    pacer.answered(StepTimes(forward_us=10_000, queue_us=5_000), 0.04)
    assert pacer.margins_s[False] == FIRST_MARGIN_S


def test_a_plan_that_comes_when_all_steps_in_reserve_are_done_was_later_than_the_idle_time_tells() -> None:
    pacer = repeating()
    pacer.sent(replace(DECODE, steps=6), 0.02)
    pacer.answered(StepTimes(forward_us=60_000), 0.08, 6)
    pacer.sent(DECODE, 0.08)
    pacer.answered(StepTimes(forward_us=10_000, idle_us=1_000), 0.091)
    assert pacer.margins_s[False] == pytest.approx(min(FIRST_MARGIN_S + GROW * 0.011, 0.010))


def test_behind_a_prefill_there_is_a_margin_of_its_own() -> None:
    pacer = Pacer(depth=2, joined_s=0.0)
    pacer.sent(PREFILL, 0.0)
    pacer.answered(StepTimes(forward_us=100_000), 0.1)
    pacer.sent(DECODE, 0.1)
    pacer.answered(StepTimes(forward_us=20_000, idle_us=4_000), 0.124)
    assert pacer.margins_s == {False: FIRST_MARGIN_S, True: pytest.approx(FIRST_MARGIN_S + 0.008)}


def test_a_plan_of_many_steps_tells_as_much_of_their_time_as_as_many_plans() -> None:
    one_by_one, together = StepTimeModel(), StepTimeModel()
    for model in (one_by_one, together):
        for _ in range(50):
            model.observe(8, 0.02)
    for _ in range(5):
        one_by_one.observe(8, 0.03)
    together.observe(8, 0.03, 5)
    assert together.expect(8) == pytest.approx(one_by_one.expect(8))


def test_the_shape_of_a_plan_has_the_tokens_of_each_of_its_steps() -> None:
    assert StepShape.of(Plan(1, 1, (), (), (1, 2, 3), (4, 4, 4), 4)) == StepShape(3, has_prefill=False, steps=4)
