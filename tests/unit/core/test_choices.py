"""Choices of one request: admitted together or not at all, one prompt computed for all, each a sequence of its own after that."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenmill_scheduler.core.choices import MAX_CHOICES, choice_ids, choice_seed, further_choices
from tokenmill_scheduler.core.effects import Transitioned
from tokenmill_scheduler.core.plans import BlockGroup, Plan, SequenceFault
from tokenmill_scheduler.core.request import Request, Sampling, State
from tokenmill_scheduler.core.scheduler import SchedulerConfig

from tests.simulation.world import World, description

WAITING, PREFILL, DECODE, DONE, CANCELLED = State.WAITING, State.PREFILL, State.DECODE, State.DONE, State.CANCELLED


def world_of(max_num_seqs: int = 8, num_blocks: int = 64, block_size: int = 4, **config: object) -> World:
    return World(
        SchedulerConfig(max_num_seqs, **config),  # type: ignore[arg-type]
        description(num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs),
    )


def states(world: World, request_id: str) -> list[State]:
    return [record.state for record in world.group(world.records[request_id])]


def prompt_tokens_computed(plans: list[Plan], prompt: int) -> int:
    """At most: what the plans say until the first decode of each sequence."""
    first: dict[int, int] = {}
    for plan in plans:
        for sequence_id, count in zip(plan.advance_sequence_ids, plan.advance_max_tokens, strict=True):
            first.setdefault(sequence_id, count)
    assert max(first.values()) <= prompt
    return sum(first.values())


# ---- ids and seeds -------------------------------------------------------------------------------------------------------------


def test_the_first_choice_is_the_request_itself_and_the_others_differ_in_id_and_seed_alone() -> None:
    request = Request("r", "m", (1, 2), Sampling(5, seed=7), 10.0, priority=3, n=2, best_of=3)
    others = further_choices(request)
    assert choice_ids(request) == ("r", *(other.request_id for other in others)) == ("r", "r/1", "r/2")
    assert [(other.parent, other.choice, other.group_id) for other in others] == [("r", 1, "r"), ("r", 2, "r")]
    assert [other.sampling.seed for other in others] == [choice_seed(7, 1), choice_seed(7, 2)]
    assert {(other.prompt, other.priority, other.arrival_s, other.n, other.best_of) for other in others} == {
        ((1, 2), 3, 10.0, 2, 3)
    }
    assert further_choices(others[0]) == ()
    assert choice_ids(others[0]) == ("r/1",)


def test_seeds_of_choices_are_a_documented_function_of_seed_and_choice() -> None:
    """Stored requests rely on it: it must never change."""
    assert choice_seed(5, 0) == 5
    assert [choice_seed(5, choice) for choice in (1, 2)] == [736134446648681493, 11437640101369710341]
    seeds = {choice_seed(seed, choice) for seed in range(50) for choice in range(1, MAX_CHOICES)}
    assert len(seeds) == 50 * (MAX_CHOICES - 1)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert choice_seed(2**64 - 1, 3) != choice_seed(0, 3)


# ---- admission -----------------------------------------------------------------------------------------------------------------


def test_c10_four_choices_and_three_free_slots_wait_whole_and_a_cancel_ends_all_four() -> None:
    world = world_of(max_num_seqs=4)
    running = world.submit(1, max_tokens=50)
    group = world.submit(2, n=4, max_tokens=50)
    for _ in range(3):
        world.turn()
    assert states(world, group) == [WAITING] * 4
    assert world.core.wait_reason("r2/3") == "its 4 choices are admitted together, and there are not so many free slots"
    for record in world.group(world.records[group]):
        world.cancel(record.request.request_id)
    assert states(world, group) == [CANCELLED] * 4
    assert world.core.num_waiting == 0
    world.cancel(running)
    world.drain()
    world.check_idle()


def test_c10_once_the_fourth_slot_is_free_all_four_are_admitted_in_one_plan_and_a_cancel_ends_all_four() -> None:
    world = world_of(max_num_seqs=4)
    running = world.submit(1, max_tokens=50)
    group = world.submit(2, n=4, max_tokens=50)
    world.turn()
    world.cancel(running)
    world.effects.clear()
    world.plan()
    admitted = [e.request_id for e in world.effects if isinstance(e, Transitioned) and e.after is PREFILL]
    assert admitted == ["r2", "r2/1", "r2/2", "r2/3"]
    for request_id in admitted:
        world.cancel(request_id)
    assert states(world, group) == [CANCELLED] * 4
    world.drain()
    world.check_idle()


def test_blocks_of_all_choices_are_needed_as_if_none_were_shared() -> None:
    """Prompt of 8 and one more token: 3 blocks each. 11 free blocks do not do for 4 choices."""
    world = world_of(num_blocks=12, watermark=0.0)
    small = world.submit(1, prompt=4, max_tokens=60)
    world.turn()
    group = world.submit(2, prompt=8, n=4, max_tokens=2)
    world.turn()
    assert states(world, group) == [WAITING] * 4
    assert world.core.wait_reason(group) == "not enough free KV blocks"
    world.cancel(small)
    world.turn()
    world.turn()
    assert WAITING not in states(world, group)
    world.drain()
    world.check_idle()


def test_a_group_that_does_not_fit_is_passed_a_bounded_number_of_times() -> None:
    world = world_of(max_num_seqs=4, max_overtakes=2)
    world.submit(1, max_tokens=40)
    world.turn()
    group = world.submit(2, n=4, max_tokens=1)
    later = [world.submit(seed, max_tokens=1) for seed in (4, 5, 7, 8)]
    for _ in range(6):
        world.turn()
    assert [world.state(request_id) for request_id in later] == [DONE, DONE, WAITING, WAITING]
    world.drain()
    assert states(world, group) == [DONE] * 4
    world.check_idle()


def test_when_the_first_of_a_group_is_cancelled_the_others_are_passed_no_more_often_for_it() -> None:
    """How often the group was passed is not forgotten."""
    world = world_of(max_num_seqs=4, max_overtakes=2)
    world.submit(1, max_tokens=40)
    world.submit(8, max_tokens=40)
    world.turn()
    world.submit(2, n=4, max_tokens=1)
    world.submit(4, max_tokens=1)
    world.submit(5, max_tokens=1)
    for _ in range(3):
        world.turn()
    assert [world.state(request_id) for request_id in ("r4", "r5")] == [DONE, DONE]
    world.cancel("r2")
    assert states(world, "r2") == [CANCELLED, WAITING, WAITING, WAITING]
    late = world.submit(7, max_tokens=1)
    world.turn()
    assert world.state(late) is WAITING
    world.drain()
    assert states(world, "r2") == [CANCELLED, DONE, DONE, DONE]
    assert world.state(late) is DONE


def test_a_group_counts_as_so_many_waiting_requests() -> None:
    world = World(SchedulerConfig())
    world.submit(1, n=3)
    world.submit(2)
    assert world.core.num_waiting == 4
    world.cancel("r1/1")
    assert world.core.num_waiting == 3


def test_a_static_batch_that_has_no_room_for_a_group_ends_and_the_group_begins_the_next() -> None:
    world = world_of(max_num_seqs=4, batching="static", max_waiting_time_s=0.5)
    for seed in (1, 2, 4):
        world.submit(seed, max_tokens=2)
    group = world.submit(5, n=3, max_tokens=2)
    world.drain()
    assert states(world, group) == [DONE] * 3
    assert all(world.state(f"r{seed}") is DONE for seed in (1, 2, 4))
    world.check_idle()


def test_a_group_of_higher_priority_takes_as_many_slots_as_it_lacks_or_none() -> None:
    world = world_of(max_num_seqs=4, policy="priority")
    low = [world.submit(seed, max_tokens=30) for seed in (1, 2)]
    high = [world.submit(seed, max_tokens=30, priority=2) for seed in (4, 5)]
    world.turn()
    three = world.submit(7, n=3, max_tokens=2, priority=1)
    world.turn()
    assert [world.state(request_id) for request_id in low + high] == [DECODE] * 4
    world.cancel(three)
    world.cancel("r7/1")
    assert states(world, three) == [CANCELLED, CANCELLED, WAITING]
    world.cancel("r7/2")
    two = world.submit(8, n=2, max_tokens=2, priority=1)
    world.turn()
    world.turn()
    assert [world.state(request_id) for request_id in low] == [State.PREEMPTED] * 2
    assert WAITING not in states(world, two)
    world.drain()
    world.check_idle()


def test_a_group_that_no_executor_can_hold_fails_whole() -> None:
    world = world_of(max_num_seqs=2)
    group = world.submit(1, n=3)
    world.turn()
    assert states(world, group) == [State.FAILED] * 3
    ended = world.records[group].ended
    assert ended is not None
    assert "3 choices of 4 tokens are more than any executor has slots or KV blocks for" in ended.error


@pytest.mark.parametrize(("prompt", "max_tokens", "most"), [(4, 8, 8), (8, 8, 5), (60, 8, 1), (64, 8, 0), (3, 1, 8), (4, 1, 8)])
def test_how_many_choices_can_ever_run_at_once(prompt: int, max_tokens: int, most: int) -> None:
    world = world_of(max_num_seqs=8, num_blocks=16)
    assert world.core.most_choices("tiny", prompt, max_tokens) == most
    assert world.core.most_choices("other", prompt, max_tokens) is None


# ---- one prompt ----------------------------------------------------------------------------------------------------------------


def test_four_choices_of_a_prompt_of_200_tokens_compute_it_once() -> None:
    world = world_of(block_size=16)
    group = world.submit(1, prompt=200, n=4, max_tokens=3)
    world.drain()
    assert states(world, group) == [DONE] * 4
    # 12 of 13 blocks are shared: 200 tokens once, and 8 for each of the others.
    assert prompt_tokens_computed(world.plans, 200) == 200 + 3 * 8
    assert world.executors["x"].forked == 3 * 12
    cached = [record.transitions[1].cached_tokens for record in world.group(world.records[group])]
    assert cached == [None, 192, 192, 192]
    world.check_idle()


def test_a_prompt_in_chunks_is_computed_once_too() -> None:
    world = world_of(block_size=16, max_num_batched_tokens=64)
    world.submit(1, prompt=200, n=4, max_tokens=3)
    world.drain()
    assert prompt_tokens_computed(world.plans[:4], 200) < 200
    assert sum(sum(plan.advance_max_tokens) for plan in world.plans) <= 200 + 3 * 8 + 4 * 3
    assert world.executors["x"].forked == 3 * 12


def test_a_prompt_within_one_block_is_not_waited_for() -> None:
    world = world_of(block_size=16)
    world.submit(1, prompt=16, n=3, max_tokens=2)
    plan = world.plan()
    assert plan is not None
    assert plan.advance_max_tokens == (16, 16, 16)


def test_if_the_first_is_cancelled_before_it_has_computed_the_prompt_the_next_one_leads() -> None:
    world = world_of(block_size=16, max_num_batched_tokens=64)
    group = world.submit(1, prompt=200, n=3, max_tokens=2)
    world.turn()
    world.cancel("r1")
    world.drain()
    assert states(world, group) == [CANCELLED, DONE, DONE]
    assert world.executors["x"].forked == 12
    world.check_idle()


def test_if_the_first_fails_the_others_compute_what_it_did_not() -> None:
    world = world_of(block_size=16)
    world.executors["x"].inject[1] = SequenceFault.ERROR
    group = world.submit(1, prompt=40, n=3, max_tokens=2)
    world.drain()
    assert states(world, group) == [State.FAILED, DONE, DONE]
    world.check_idle()


def test_c20_a_choice_that_is_preempted_comes_back_alone() -> None:
    world = world_of(num_blocks=12, max_num_seqs=3, watermark=0.0)
    group = world.submit(1, prompt=8, n=3, max_tokens=30)
    world.drain()
    assert world.core.counters.preemptions > 0
    for record in world.group(world.records[group]):
        assert record.state is DONE
        assert record.output == world.expected(record.request.request_id)
    world.check_idle()


def test_after_a_restart_a_group_that_waits_is_whole_and_choices_that_ran_come_back_one_by_one() -> None:
    world = world_of(max_num_seqs=3)
    ran = world.submit(1, n=3, max_tokens=9)
    world.turn()
    waits = world.submit(2, n=3, max_tokens=9)
    world.cancel("r2/1")
    world.restart_scheduler()
    resumed = [record for record in world.group(world.records[ran]) if record.state is State.PREEMPTED]
    assert resumed
    assert world.core.num_waiting == len(resumed) + 2
    world.turn()
    assert all(record.state in (PREFILL, DECODE, DONE) for record in resumed)
    world.drain()
    assert states(world, ran) == [DONE] * 3
    assert states(world, waits) == [DONE, CANCELLED, DONE]
    assert all(record.output == world.expected(r) for r, record in world.records.items() if record.state is DONE)
    world.check_idle()


def test_the_deadline_of_a_waiting_group_ends_all_of_it() -> None:
    world = world_of(max_num_seqs=2)
    world.submit(1, max_tokens=50)
    world.turn()
    group = world.submit(2, n=2, deadline_s=world.now_s + 1)
    world.tick(2)
    assert states(world, group) == [State.EXPIRED] * 2


def test_a_new_priority_for_one_choice_that_waits_moves_the_group_no_more_than_its_first_does() -> None:
    world = world_of(max_num_seqs=2, policy="priority")
    world.submit(1, max_tokens=3, priority=9)
    world.turn()
    group = world.submit(2, n=2, max_tokens=1)
    other = world.submit(4, max_tokens=1, priority=1)
    world.update("r2/1", priority=5)
    world.turn()
    assert world.state(other) is DONE
    assert states(world, group) == [WAITING] * 2
    world.drain()
    assert states(world, group) == [DONE] * 2


@pytest.mark.parametrize(("window", "shared"), [(64, 3 * 2), (20, 0)])
def test_a_prompt_that_outgrows_a_window_is_not_waited_for(window: int, shared: int) -> None:
    """Of 40 tokens, 2 blocks of 16 can be shared, unless they are gone when the rest is computed."""
    executor = replace(description(block_size=16), block_groups=(BlockGroup(window),))
    world = World(SchedulerConfig(), executor)
    world.submit(1, prompt=40, n=4, max_tokens=2)
    world.drain()
    assert world.executors["x"].forked == shared
    assert (world.plans[0].advance_max_tokens == (40, 40, 40, 40)) == (shared == 0)
    world.check_idle()
