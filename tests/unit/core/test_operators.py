"""What operators do to the queue and to executors: pause, resume, drain, undrain."""

from __future__ import annotations

from tokenmill_scheduler.core.events import Expired
from tokenmill_scheduler.core.request import FinishReason, State
from tokenmill_scheduler.core.scheduler import SchedulerConfig

from tests.simulation.world import World, description


def test_a_paused_queue_admits_nobody_and_those_that_run_go_on() -> None:
    world = World(None, description())
    world.submit(1)
    world.turn()
    world.pause()
    world.submit(2)
    assert world.core.wait_reason("r2") == "the queue is paused by ann: a test"
    world.drain()
    assert [world.state(r) for r in ("r1", "r2")] == [State.DONE, State.WAITING]
    world.resume()
    world.drain()
    world.check_idle()


def test_a_request_that_has_run_goes_on_although_the_queue_is_paused() -> None:
    world = World(SchedulerConfig(policy="priority"), description())
    world.submit(1)
    world.turn()
    world.submit(2, priority=9)
    world.pause()
    world.lose()
    world.rejoin()
    world.drain()
    assert [world.state(r) for r in ("r1", "r2")] == [State.DONE, State.WAITING]


def test_a_paused_queue_starts_no_static_batch() -> None:
    world = World(SchedulerConfig(batching="static", max_num_seqs=2), description())
    world.pause()
    for seed in (1, 2, 3):
        world.submit(seed)
    world.drain()
    assert world.core.num_waiting == 3
    world.cancel("r3")
    world.resume()
    plan = world.turn()
    assert plan is not None
    assert [a.sampling.seed for a in plan.admit] == [1, 2]
    world.drain()
    world.check_idle()


def test_a_drained_executor_gives_its_work_to_another_and_none_fails() -> None:
    world = World(SchedulerConfig(max_num_seqs=2), description("x"), description("y"))
    for seed in (1, 2, 3):
        world.submit(seed, max_tokens=20)
    world.turn("x")
    world.plan("x")
    world.drain_executor("x")
    moves = [world.records[r].transitions[-1] for r in ("r1", "r2")]
    assert [(move.after, move.reason) for move in moves] == [(State.PREEMPTED, "executor drained by ann: a test")] * 2
    assert [view.drained for view in world.core.executors()] == [True, False]
    world.drain()
    assert all(view.running == 0 for view in world.core.executors())
    assert {t.executor for r in world.records.values() for t in r.transitions if t.after is State.DECODE} == {"x", "y"}
    assert all(world.output(r) == world.expected(r) for r in world.records), "the token of the plan that was out is kept"
    world.check_idle()


def test_with_every_executor_drained_requests_wait_and_say_why() -> None:
    world = World(None, description())
    world.submit(1)
    world.turn()
    world.drain_executor()
    assert world.turn() is not None, "the release"
    assert world.core.wait_reason("r1") == "executor x is drained by ann: a test"
    world.rejoin()
    assert world.turn() is None, "it stays drained when it joins anew"
    world.undrain_executor()
    world.drain()
    world.check_idle()
    assert world.output("r1") == world.expected("r1")


def test_what_ends_with_the_plans_that_are_out_is_not_moved() -> None:
    world = World(None, description())
    world.submit(1, max_tokens=1)
    world.plan()
    world.drain_executor()
    world.step()
    world.deliver()
    assert world.records["r1"].path == "waiting prefill done"


def test_an_executor_that_is_not_there_can_be_drained() -> None:
    world = World(None, description("x"), description("y"))
    world.lose("x")
    world.drain_executor("x")
    world.rejoin("x")
    world.submit(1)
    assert world.turn("x") is None
    assert world.turn("y") is not None


def test_a_time_limit_of_the_shell_ends_a_request_with_its_tokens() -> None:
    world = World(None, description())
    world.submit(1)
    world.turn()
    world.handle(Expired("r1", "its client reads nothing"))
    ended = world.records["r1"].ended
    assert ended is not None
    assert (ended.after, ended.finish_reason, ended.reason) == (State.EXPIRED, FinishReason.EXPIRED, "its client reads nothing")
    assert len(world.output("r1")) == 1
    assert world.handle(Expired("r1", "twice")) == []
    world.drain()
    world.check_idle()
