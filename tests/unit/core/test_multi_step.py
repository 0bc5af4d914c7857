"""Plans of several steps: when they are made, how long they are, and what a plan that was cut short leaves behind."""

from __future__ import annotations

import pytest
from tokenmill_scheduler.core.effects import PlanIssued
from tokenmill_scheduler.core.events import PlanDue, TextStop
from tokenmill_scheduler.core.plans import BlockGroup, Plan, SequenceFault
from tokenmill_scheduler.core.request import Lane, State
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


def test_a_plan_goes_on_to_the_first_end() -> None:
    world = running((3, 20), (5, 7), max_steps=9)
    assert plan(world).max_steps == 6
    behind = plan(world)
    assert (behind.advance_sequence_ids, behind.after_all_steps) == ((1,), False)
    finish(world)


@pytest.mark.parametrize(
    ("output", "steps"), [(6, [5]), (7, [3, 3]), (10, [5, 4]), (12, [4, 4, 3]), (16, [5, 5, 5]), (17, [4, 4, 4, 4])]
)
def test_an_end_is_reached_in_as_few_plans_as_can_be_all_of_a_length(output: int, steps: list[int]) -> None:
    """Each is made on the most that the one ahead may do: of a long one that does less, a few steps would be left at the end."""
    world = running((3, output))
    made = []
    while (turn := world.turn()) is not None:
        made.append(turn.max_steps)
    assert made == steps


@pytest.mark.parametrize(
    ("output", "most", "reaches_end"), [(20, 5, False), (7, 5, False), (6, 5, True), (5, 5, True), (2, 5, False)]
)
def test_a_plan_of_several_steps_says_whether_they_reach_an_end(output: int, most: int, reaches_end: bool) -> None:
    """The last has one step left: a plan of one step has nothing to leave behind."""
    effects = running((3, 20), (5, output)).handle(PlanDue("x", most))
    assert [effect.reaches_end for effect in effects if isinstance(effect, PlanIssued)] == [reaches_end]


def full(max_steps: int = 9) -> World:
    """All four slots are taken, and the second sequence, six tokens from its end, ends in the plan that is out."""
    world = running((3, 20), (5, 7), (3, 20), (3, 20), max_steps=max_steps)
    assert plan(world).max_steps == 6
    return world


def finish(world: World) -> None:
    world.drain()
    world.check_idle()
    whole = [request for request, record in world.records.items() if record.state is State.DONE]
    assert all(world.output(request) == world.expected(request) for request in whole)


def test_c36_a_slot_is_given_away_behind_the_plan_that_ends_its_sequence_which_takes_all_its_steps() -> None:
    world = full()
    world.submit(5, 3, 20)
    behind = plan(world)
    assert ([a.sampling.seed for a in behind.admit], behind.advance_sequence_ids) == ([5], (1, 3, 4, 5))
    assert behind.after_all_steps
    assert world.step().num_steps == 6
    world.deliver()
    assert world.records["r2"].state is State.DONE
    assert not plan(world).after_all_steps, "there is a slot for each again"
    finish(world)


def test_who_finds_a_slot_does_not_wait_for_one_that_others_need() -> None:
    """One of two that come has the slot of nobody: it waits for the step in progress, and the other is admitted later."""
    world = running((3, 20), (5, 7), (3, 20), max_steps=9)
    plan(world)
    world.submit(5, 3, 20)
    world.submit(6, 3, 20)
    behind = plan(world)
    assert ([a.sampling.seed for a in behind.admit], behind.after_all_steps) == ([5], False)
    assert world.step().num_steps == 1
    finish(world)


def test_the_slot_of_one_that_is_cancelled_is_free_after_the_step_in_progress() -> None:
    world = full()
    world.submit(5, 3, 20)
    world.submit(6, 3, 20)
    world.cancel("r3")
    behind = plan(world)
    assert (behind.release, [a.sampling.seed for a in behind.admit], behind.after_all_steps) == ((3,), [5], False)
    finish(world)


def test_what_takes_no_slot_cuts_the_plan_ahead_short() -> None:
    """A cancel while nobody waits: the second, not at its end then, goes on in the plan after the next."""
    world = full()
    world.cancel("r3")
    behind = plan(world)
    assert (behind.release, behind.advance_sequence_ids, behind.after_all_steps) == ((3,), (1, 4), False)
    assert world.step().num_steps == 1
    world.deliver()
    assert 2 in plan(world).advance_sequence_ids
    finish(world)


def test_who_outranks_takes_the_slot_that_is_about_to_be_free_and_nobody_is_preempted() -> None:
    world = full()
    world.submit(5, 3, 20, lane=Lane.REAL_TIME)
    behind = plan(world)
    assert ([a.sampling.seed for a in behind.admit], behind.after_all_steps) == ([5], True)
    assert world.core.counters.preemptions == 0
    finish(world)


@pytest.mark.parametrize("fault", SequenceFault)
def test_a_slot_given_away_is_free_however_its_sequence_leaves(fault: SequenceFault) -> None:
    world = full()
    world.submit(5, 3, 20)
    assert plan(world).after_all_steps
    world.executors["x"].inject[2] = fault
    world.step()
    world.deliver()
    assert world.records["r2"].state is (State.PREEMPTED if fault is SequenceFault.NO_BLOCKS else State.FAILED)
    assert len(plan(world).advance_sequence_ids) <= 4
    finish(world)


def test_a_stop_string_ends_the_sequence_whose_slot_was_given_away() -> None:
    world = full()
    world.submit(5, 3, 20)
    plan(world)
    world.step()
    world.deliver(text_stops={2: TextStop(1)})
    assert world.records["r2"].state is State.DONE
    assert len(world.output("r2")) == 2
    assert len(plan(world).advance_sequence_ids) == 4
    world.drain()
    world.check_idle()


def test_what_ends_with_the_plan_out_stays_on_a_drained_executor_though_that_is_cut_short() -> None:
    world = full()
    world.drain_executor()
    behind = plan(world)
    assert (behind.release, behind.after_all_steps) == ((1, 3, 4), False)
    assert world.step().num_steps == 1
    world.deliver()
    assert plan(world).advance_sequence_ids == (2,)
    world.undrain_executor()
    finish(world)


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
