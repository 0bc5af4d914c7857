"""Steps as a journal has them: plans of one step and of several, and how early plans came."""

from __future__ import annotations

import pytest
from tokenmill_scheduler.core.plans import Blocks, Plan, Result, StepTimes
from tokenmill_simulator.cost import UNMEASURED, StepLoad
from tokenmill_simulator.recorded_steps import RecordedSteps, service_cost


def plan(number: int, most: dict[int, int], max_steps: int = 1) -> Plan:
    return Plan(1, number, (), (), tuple(most), tuple(most.values()), max_steps)


def result(number: int, computed: dict[int, int], *, forward_ms: float, queue_ms: float = 0.0, num_steps: int = 1) -> Result:
    times = StepTimes(queue_us=round(queue_ms * 1e3), forward_us=round(forward_ms * 1e3))
    counts, none = tuple(computed.values()), (0,) * len(computed)
    return Result(1, number, tuple(computed), counts, none, (), none, Blocks(9, 0, 0), times=times, num_steps=num_steps)


def test_a_plan_of_several_steps_is_so_many_steps() -> None:
    """Sequence 2 ends in the second of three."""
    steps = RecordedSteps()
    steps.issued(plan(1, {1: 10, 2: 5}), 0.0)
    assert steps.answered(result(1, {1: 10, 2: 5}, forward_ms=9), 0.0) == pytest.approx(0.009)
    steps.issued(plan(2, {1: 3, 2: 3}, max_steps=3), 0.0)
    assert steps.answered(result(2, {1: 3, 2: 2}, forward_ms=6, num_steps=3), 0.0) == pytest.approx(0.002)
    assert steps.loads[0] == StepLoad(15, 0, 15, 55 + 15, 2)
    assert steps.loads[1:] == [StepLoad(0, 2, 11 + 6, 0, 0), StepLoad(0, 2, 12 + 7, 0, 0), StepLoad(0, 1, 13, 0, 0)]
    assert steps.seconds == pytest.approx([0.009, 0.002, 0.002, 0.002])


def test_a_result_of_no_known_plan_is_no_step() -> None:
    steps = RecordedSteps()
    assert steps.answered(result(1, {1: 1}, forward_ms=1), 0.0) is None
    assert steps.loads == []


def answered(*plans: tuple[dict[int, int], int, int, float]) -> RecordedSteps:
    """Steps of 10 ms, of plans by what they advance, their most steps, the steps they had, and the milliseconds that they waited;
    each is issued while the one before it is out."""
    steps = RecordedSteps()
    for number, (most, max_steps, *_) in enumerate(plans):
        steps.issued(plan(number, most, max_steps), 0.0)
        if number:
            steps.answered(answer_to(number - 1, *plans[number - 1]), 0.0)
    steps.answered(answer_to(len(plans) - 1, *plans[-1]), 0.0)
    return steps


def answer_to(number: int, most: dict[int, int], max_steps: int, num_steps: int, queue_ms: float) -> Result:
    computed = dict.fromkeys(most, num_steps) if max_steps > 1 else most
    return result(number, computed, forward_ms=10 * num_steps, queue_ms=queue_ms, num_steps=num_steps)


def test_the_lead_is_what_plans_wait_for_the_end_of_the_one_ahead() -> None:
    """Not the first, of an idle executor, nor the last, that came to cut a longer one short. Of several steps each has its part."""
    steps = answered(({1: 1}, 1, 1, 99), ({1: 4}, 4, 4, 7), ({1: 1}, 1, 1, 3), ({1: 4}, 4, 2, 3), ({2: 9}, 1, 1, 8))
    found = service_cost([steps, RecordedSteps()])
    assert found.lead_s == pytest.approx(0.003 * 3 / (1 + 4 + 1 + 2))
    assert found.prefill_lead == UNMEASURED.prefill_lead


def test_behind_a_prompt_the_lead_is_a_share_of_its_step() -> None:
    steps = answered(({1: 8}, 1, 1, 0), ({1: 1, 2: 8}, 1, 1, 2), ({1: 1, 2: 1}, 1, 1, 4))
    assert service_cost([steps]).prefill_lead == pytest.approx(0.3)
    assert service_cost([steps]).lead_s == UNMEASURED.lead_s


def test_the_link_is_what_neither_the_queue_nor_the_steps_took() -> None:
    """A plan is 16 ms on its way and back, of which it waits for 3 and its step takes 9; its lead is from when it was asked for."""
    steps = RecordedSteps()
    for number, queue_ms in ((1, 0.0), (2, 3.0)):
        steps.issued(plan(number, {1: 1}), 0.0)
        steps.answered(result(number, {1: 1}, forward_ms=9, queue_ms=queue_ms), 0.013 + queue_ms / 1e3)
    assert service_cost([steps]).link_s == pytest.approx(0.002)


def test_what_no_result_tells_is_not_measured() -> None:
    assert service_cost([RecordedSteps()]) == UNMEASURED
