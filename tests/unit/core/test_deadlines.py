"""Deadlines, for those that wait and those that run."""

from __future__ import annotations

from tokenmill_scheduler.core.request import FinishReason, State
from tokenmill_scheduler.core.scheduler import SchedulerConfig

from tests.simulation.world import World, description


def test_c39_a_waiting_request_expires_without_entering_a_plan() -> None:
    world = World(SchedulerConfig(max_num_seqs=1), description())
    world.submit(1, max_tokens=50)
    world.turn()
    world.submit(2, deadline_s=world.now_s + 0.2)
    assert world.core.next_wakeup_s() == world.now_s + 0.2
    world.tick(0.1)
    assert world.state("r2") is State.WAITING
    world.tick(0.1)
    ended = world.records["r2"].ended
    assert ended is not None
    assert (ended.after, ended.finish_reason, ended.reason) == (State.EXPIRED, FinishReason.EXPIRED, "deadline passed")
    assert world.records["r2"].path == "waiting expired"
    assert world.core.next_wakeup_s() is None
    world.drain()
    assert all(admission.sampling.seed != 2 for plan in world.plans for admission in plan.admit)


def test_c39_a_running_request_ends_within_one_step_with_its_tokens_so_far() -> None:
    world = World(None, description())
    world.submit(1, max_tokens=50, deadline_s=world.now_s + 5)
    for _ in range(3):
        world.turn()
    world.now_s += 5
    plan = world.turn()
    assert plan is not None
    assert (plan.release, plan.advance_sequence_ids) == ((1,), ())
    assert world.state("r1") is State.EXPIRED
    assert world.output("r1") == world.expected("r1")[:3]
    world.drain()
    world.check_idle()


def test_c39_a_token_that_arrives_after_the_deadline_was_seen_is_dropped() -> None:
    world = World(None, description())
    world.submit(1, max_tokens=50, deadline_s=world.now_s + 5)
    world.turn()
    world.plan()
    world.tick(5)
    world.step()
    assert world.deliver() == []
    assert len(world.output("r1")) == 1
    world.drain()
    world.check_idle()


def test_a_new_deadline_replaces_the_old_one() -> None:
    world = World(SchedulerConfig(), description())
    world.submit(1, deadline_s=world.now_s + 1)
    world.update("r1", deadline_s=world.now_s + 10)
    world.tick(2)
    assert world.state("r1") is State.WAITING
    world.update("r1", deadline_s=world.now_s - 1)
    world.tick()
    assert world.state("r1") is State.EXPIRED


def test_deadlines_pass_in_order_however_many_there_are() -> None:
    world = World(None)
    for seed in (1, 2, 4, 5):
        world.submit(seed, deadline_s=world.now_s + 10 - seed)
    world.effects.clear()
    world.tick(20)
    assert [effect.request_id for effect in world.effects if hasattr(effect, "request_id")] == ["r5", "r4", "r2", "r1"]


def test_a_queue_timeout_ends_a_request_that_has_not_run() -> None:
    world = World(SchedulerConfig(max_num_seqs=1), description())
    world.submit(1, max_tokens=40)
    world.turn()
    world.submit(2, queue_deadline_s=world.now_s + 5)
    world.submit(3, queue_deadline_s=world.now_s + 7, deadline_s=world.now_s + 6)
    assert world.core.next_wakeup_s() == world.now_s + 5
    world.tick(5)
    ended = world.records["r2"].ended
    assert ended is not None
    assert (ended.after, ended.reason) == (State.EXPIRED, "waited in the queue as long as its queue timeout allows")
    world.tick(1)
    ended = world.records["r3"].ended
    assert ended is not None
    assert (ended.after, ended.reason) == (State.EXPIRED, "deadline passed"), "whichever comes first"


def test_a_queue_timeout_is_over_once_a_request_has_run() -> None:
    world = World(None, description())
    world.submit(1, queue_deadline_s=world.now_s + 5)
    world.turn()
    assert world.core.next_wakeup_s() is None
    world.lose()
    world.tick(10)
    assert world.state("r1") is State.PREEMPTED
    world.rejoin()
    world.restart_scheduler()
    world.drain()
    assert world.state("r1") is State.DONE


def test_a_paused_queue_does_not_stop_the_clock() -> None:
    world = World(None, description())
    world.pause()
    world.submit(1, queue_deadline_s=world.now_s + 5)
    world.tick(5)
    assert world.state("r1") is State.EXPIRED
