"""Static batches, and what the shell has to know to drive them."""

from __future__ import annotations

import pytest
from tokenmill_scheduler.core.request import State
from tokenmill_scheduler.core.scheduler import Scheduler, SchedulerConfig

from tests.simulation.world import World, description

_STATIC = SchedulerConfig(max_num_seqs=3, batching="static", max_waiting_time_s=0.5)


def test_a_full_static_batch_starts_at_once_and_runs_to_its_end_before_the_next() -> None:
    world = World(_STATIC, description())
    for seed, max_tokens in ((1, 2), (2, 5), (4, 1), (5, 1), (7, 1), (8, 1)):
        world.submit(seed, max_tokens=max_tokens)
    first = world.turn()
    assert first is not None
    assert len(first.admit) == 3
    world.turn()
    assert world.state("r1") is State.DONE
    assert world.state("r5") is State.WAITING
    assert world.core.wait_reason("r5") == "the running batch has not ended"
    while world.state("r2") is not State.DONE:
        plan = world.turn()
        assert plan is not None
        assert plan.admit == ()
    second = world.turn()
    assert second is not None
    assert [a.sampling.seed for a in second.admit] == [5, 7, 8]


def test_a_batch_that_is_not_full_starts_when_its_oldest_has_waited_long_enough() -> None:
    world = World(_STATIC, description())
    world.submit(1)
    world.tick(0.2)
    world.submit(2)
    assert world.plan() is None
    assert world.core.wait_reason("r1") == "the batch is not full"
    assert world.core.next_wakeup_s() == 1000.5
    world.tick(0.3)
    plan = world.plan()
    assert plan is not None
    assert len(plan.admit) == 2
    assert world.core.next_wakeup_s() is None


def test_the_oldest_counts_also_when_it_is_not_the_head() -> None:
    world = World(SchedulerConfig(3, batching="static", policy="priority", max_waiting_time_s=0.5), description())
    world.submit(1)
    world.tick(0.2)
    world.submit(2, priority=1)
    assert world.core.next_wakeup_s() == 1000.5


def test_a_batch_larger_than_the_token_budget_is_admitted_over_several_plans() -> None:
    world = World(SchedulerConfig(3, 8, batching="static", max_waiting_time_s=60), description())
    for seed in (1, 2, 4):
        world.submit(seed, prompt=7, max_tokens=6)
    world.drain()
    world.check_idle()
    assert [len(plan.admit) for plan in world.plans if plan.admit] == [2, 1]


def test_late_arrivals_do_not_join_a_running_batch() -> None:
    world = World(_STATIC, description())
    for seed in (1, 2, 4):
        world.submit(seed, max_tokens=4)
    world.turn()
    world.cancel("r1")
    world.submit(5)
    world.turn()
    assert world.state("r5") is State.WAITING


def test_a_preempted_member_comes_back_into_its_batch() -> None:
    world = World(SchedulerConfig(2, batching="static", max_waiting_time_s=60), description(num_blocks=5))
    world.submit(1, prompt=7, max_tokens=10)
    world.submit(2, prompt=7, max_tokens=10)
    world.drain()
    world.check_idle()
    assert world.core.counters.preemptions >= 1
    assert all(world.output(r) == world.expected(r) for r in world.records)


def test_wakeup_does_not_repeat_itself_once_a_plan_was_asked_for_at_that_time() -> None:
    world = World(_STATIC, description(num_blocks=4), description("y", num_blocks=16))
    world.submit(1, prompt=30)
    world.tick(0.5)
    assert world.core.next_wakeup_s() == 1000.5
    assert world.plan("x") is None, "it needs the larger executor"
    assert world.core.next_wakeup_s() == 1000.5, "y was not asked yet"
    assert world.plan("y") is not None
    assert world.core.next_wakeup_s() is None


@pytest.mark.parametrize("config", [SchedulerConfig(policy="lifo"), SchedulerConfig(batching="elastic")])
def test_unknown_choices_are_refused(config: SchedulerConfig) -> None:
    with pytest.raises(KeyError):
        Scheduler(config)
