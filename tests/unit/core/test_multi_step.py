"""Plans of several steps: when they are made, how long they are, and what a plan that was cut short leaves behind."""

from __future__ import annotations

import pytest
from tokenmill_scheduler.core.plans import BlockGroup, Plan
from tokenmill_scheduler.core.request import State
from tokenmill_scheduler.core.scheduler import SchedulerConfig

from tests.simulation.world import World, description


def running(*requests: tuple[int, int], max_steps: int = 5, **shape: object) -> World:
    """A world in which requests of so many prompt and output tokens have been computed and sampled once."""
    world = World(SchedulerConfig(max_num_seqs=4, watermark=0.0), description(multi_step=True, **shape))  # type: ignore[arg-type]
    world.max_steps = max_steps
    for seed, (prompt, max_tokens) in enumerate(requests, 1):
        world.submit(seed, prompt, max_tokens)
    first = world.plan()
    assert first is not None
    assert first.max_steps == 1, "a prompt's step is one"
    world.step()
    world.deliver()
    return world


def plan(world: World) -> Plan:
    made = world.plan()
    assert made is not None
    return made


def test_decodes_alone_go_on_for_as_many_steps_as_are_asked_for() -> None:
    made = plan(running((3, 20), (5, 20)))
    assert (made.max_steps, made.advance_max_tokens) == (5, (5, 5))


def test_while_nobody_waits_a_plan_goes_on_to_the_first_end() -> None:
    world = running((3, 20), (5, 7), max_steps=9)
    assert plan(world).max_steps == 6
    behind = plan(world)
    assert (behind.max_steps, behind.advance_sequence_ids) == (9, (1,))
    world.drain()
    world.check_idle()
    assert all(world.output(request) == world.expected(request) for request in world.records)


def test_while_others_wait_a_last_token_is_one_of_a_step_that_is_certain() -> None:
    """Six tokens are left to the second: five in this plan, or else its slot could be planned with before it is free."""
    world = running((3, 20), (5, 7), (3, 20), (3, 20), max_steps=9)
    world.submit(5, 3, 20)
    assert plan(world).max_steps == 5
    last = plan(world)
    assert (last.max_steps, last.advance_sequence_ids) == (1, (1, 2, 3, 4))


def test_the_slot_of_a_sequence_whose_last_steps_may_be_cut_short_is_not_planned_with() -> None:
    world = running((3, 20), (5, 7), (3, 20), (3, 20), max_steps=9)
    assert plan(world).max_steps == 6
    world.submit(5, 3, 20)
    behind = plan(world)
    assert (behind.admit, behind.advance_sequence_ids) == ((), (1, 3, 4))
    assert world.step().num_steps == 1, "cut short: the second is not at its end"
    world.deliver()
    world.drain()
    world.check_idle()
    assert max(len(made.advance_sequence_ids) for made in world.plans) == 4
    assert all(world.output(request) == world.expected(request) for request in world.records)


def test_c36_the_slot_of_a_sequence_in_its_last_step_is_planned_with_at_once() -> None:
    world = World(SchedulerConfig(max_num_seqs=1), description(multi_step=True))
    world.max_steps = 4
    world.submit(1, 3, 3)
    world.submit(2, 3, 3)
    for _ in range(20):
        world.turn()
    world.drain()
    world.check_idle()
    assert all(world.output(request) == world.expected(request) for request in world.records)
    assert world.core.counters.occupancy_sum == world.core.counters.steps, "no step went by with a slot empty"


def test_a_prompt_in_the_plan_makes_it_one_step() -> None:
    world = running((3, 20))
    world.submit(7, 30, 4)
    made = plan(world)
    assert (len(made.admit), made.max_steps) == (1, 1)


def test_behind_a_prompt_that_ends_in_the_plan_ahead_steps_go_on() -> None:
    world = World(None, description(multi_step=True))
    world.max_steps = 5
    world.submit(1, 3, 20)
    assert [plan(world).max_steps, plan(world).max_steps] == [1, 5]


def test_the_token_budget_bounds_all_steps_together() -> None:
    assert plan(running((3, 20), (5, 20), max_num_batched_tokens=8)).max_steps == 4


def test_blocks_for_all_steps_are_promised_or_there_is_one() -> None:
    """Eight tokens of each are two blocks of each; with three in all, one step has to do."""
    enough = running((3, 20), (3, 20), num_blocks=4)
    assert plan(enough).max_steps == 5
    assert enough.core.executors()[0].free_blocks == 0
    assert plan(running((3, 20), (3, 20), num_blocks=3)).max_steps == 1


@pytest.mark.parametrize(("shape", "steps"), [({"pipeline_depth": 3}, 1), ({"pipeline_depth": 1}, 5)])
def test_a_third_plan_behind_one_that_may_be_cut_short_would_be_made_on_guesses(shape: dict[str, int], steps: int) -> None:
    assert plan(running((3, 20), **shape)).max_steps == steps


def test_an_executor_that_does_not_know_of_steps_gets_one_a_plan() -> None:
    world = World(None, description(multi_step=False))
    world.max_steps = 5
    world.submit(1, 3, 20)
    world.turn()
    assert plan(world).max_steps == 1


def test_what_a_plan_that_is_cut_short_has_not_done_is_planned_again() -> None:
    world = running((3, 20))
    long, behind = plan(world), plan(world)
    assert (long.max_steps, behind.max_steps) == (5, 5)
    # Another plan waits: the executor stops after one step.
    assert world.step().num_steps == 1
    world.deliver()
    world.drain()
    world.check_idle()
    assert world.output("r1") == world.expected("r1")


def test_an_arrival_goes_into_the_plan_behind_and_a_cancel_frees_the_slot() -> None:
    world = running((3, 60), (3, 60))
    plan(world)
    world.submit(8, 4, 4)
    world.cancel("r1")
    behind = plan(world)
    assert (behind.release, [a.sampling.seed for a in behind.admit], behind.max_steps) == ((1,), [8], 1)
    world.drain()
    world.check_idle()
    assert world.output("r8") == world.expected("r8")
    assert world.records["r1"].state is State.CANCELLED


@pytest.mark.parametrize("groups", [(BlockGroup(),), (BlockGroup(), BlockGroup(6, 2)), (BlockGroup(5),)])
@pytest.mark.parametrize("num_blocks", [12, 20, 40])
def test_tokens_are_right_and_blocks_come_back_however_layers_see(groups: tuple[BlockGroup, ...], num_blocks: int) -> None:
    world = World(SchedulerConfig(max_num_seqs=3), description(num_blocks=num_blocks * len(groups), groups=groups, multi_step=True))
    world.max_steps = 6
    for seed in range(1, 8):
        world.submit(seed, 3 + seed, 5 * seed)
    world.drain()
    world.check_idle()
    assert all(world.output(request) == world.expected(request) for request in world.records)
    assert any(made.max_steps > 1 for made in world.plans)
