"""Executors that fail, vanish, come back, or are several; and a scheduler that starts anew."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenmill_scheduler.core.events import (
    ExecutorGone,
    ExecutorJoined,
    ExecutorLost,
    ExecutorsAwaited,
    ExecutorsKnown,
    HandedOver,
    KnownExecutor,
    PlanDue,
    ResultArrived,
    Submitted,
)
from tokenmill_scheduler.core.plans import ExecutorDescription, Result, SequenceFault
from tokenmill_scheduler.core.request import FinishReason, Request, Sampling, State
from tokenmill_scheduler.core.scheduler import SchedulerConfig

from tests.simulation.world import Record, World, description


def test_c43_an_error_fails_the_affected_request_alone() -> None:
    world = World(None, description())
    for seed in (1, 2, 4):
        world.submit(seed)
    world.turn()
    world.executors["x"].inject[2] = SequenceFault.ERROR
    world.drain()
    world.check_idle()
    ended = world.records["r2"].ended
    assert ended is not None
    assert (ended.after, ended.finish_reason, ended.error_code) == (State.FAILED, FinishReason.ERROR, 13)
    assert ended.error == "from the model executor"
    assert world.output("r2") == world.expected("r2")[:1]
    assert [world.output(r) == world.expected(r) for r in ("r1", "r4")] == [True, True]


def test_c47_an_executor_lost_while_a_plan_is_dispatched_leaves_no_booking() -> None:
    world = World(None, description(num_blocks=16))
    world.submit(1, prompt=20)
    world.submit(2, prompt=20)
    world.turn()
    world.plan()
    world.plan(send=False)
    world.lose()
    assert [world.state(r) for r in ("r1", "r2")] == [State.PREEMPTED, State.PREEMPTED]
    assert (world.core.num_running, world.core.num_waiting) == (0, 2)
    assert world.plan() is None
    assert world.core.wait_reason("r1") == "no executor serves 'tiny' now"

    world.rejoin()
    assert world.core.executors()[0].free_blocks == 16
    world.drain()
    world.check_idle()
    assert all(world.output(r) == world.expected(r) for r in world.records)
    assert world.core.counters.prompt_tokens == 40, "a prompt is counted once"
    assert world.core.counters.preemptions == 2


def test_a_release_not_yet_sent_is_forgotten_with_its_executor() -> None:
    world = World(None, description())
    world.submit(1)
    world.turn()
    world.cancel("r1")
    world.lose()
    world.rejoin()
    assert world.plan() is None, "the new epoch knows nothing to release"
    world.check_idle()


def test_a_preempted_request_does_not_wait_for_a_lost_executor() -> None:
    world = World(SchedulerConfig(max_num_seqs=1, policy="priority"), description("x"), description("y"))
    world.submit(1)
    world.plan("x")
    world.submit(2, priority=1)
    world.plan("x")
    assert world.plan("y") is None, "the token of the plan that is out at x has to be waited for"
    world.lose("x")
    plan = world.plan("y")
    assert plan is not None
    assert [a.sampling.seed for a in plan.admit] == [2]
    world.drain()
    assert [world.output(r) == world.expected(r, "y") for r in ("r1", "r2")] == [True, True]


def test_results_of_another_epoch_plan_or_executor_are_dropped_and_counted() -> None:
    world = World(None, description())
    world.submit(1)
    world.plan()
    result = world.step()
    stale = [replace(result, epoch=2), replace(result, plan_id=2), replace(result, plan_id=0)]
    for other in stale:
        assert world.handle(ResultArrived("x", other)) == []
    assert world.handle(ResultArrived("nobody", result)) == []
    assert world.core.counters.stale_results == 4
    world.deliver()
    assert world.handle(ResultArrived("x", result)) == [], "doubled"
    assert world.core.counters.stale_results == 5
    world.drain()
    world.check_idle()
    assert world.output("r1") == world.expected("r1")


def test_a_result_with_rows_of_its_own_is_read_by_sequence() -> None:
    world = World(None, description())
    world.submit(1)
    world.submit(2)
    world.submit(4)
    world.plan()
    result = world.step()
    a, _, c = result.token_ids
    world.arriving["x"][0] = replace(
        result,
        sequence_ids=(3, 77, 1),
        num_computed=(4, 4, 4),
        num_sampled=(1, 1, 1),
        token_ids=(c, 1234, a),
        finishes=(0, 0, 0),
    )
    world.deliver()
    assert [len(world.output(r)) for r in ("r1", "r2", "r4")] == [1, 0, 1]
    plan = world.plan()
    assert plan is not None
    assert dict(zip(plan.advance_sequence_ids, plan.advance_max_tokens, strict=True)) == {1: 1, 2: 4, 3: 1}


def test_a_higher_epoch_ends_the_lower_one_and_late_news_of_the_lower_is_ignored() -> None:
    world = World(None, description())
    world.submit(1)
    world.turn()
    world.rejoin()
    assert world.state("r1") is State.PREEMPTED
    view = world.core.executors()[0]
    assert world.handle(ExecutorLost("x", 1, "late")) == []
    assert world.handle(ExecutorJoined(description(), 1, world.executors["x"].blocks)) == []
    assert world.core.executors()[0] == view
    plan = world.plan()
    assert plan is not None
    assert (plan.epoch, plan.plan_id, plan.admit[0].sequence_id) == (2, 1, 2)


def test_each_model_has_its_own_queue() -> None:
    world = World(SchedulerConfig(max_num_seqs=1), description("x", model="a"), description("y", model="b"))
    world.submit(1, model="a")
    world.submit(2, model="a")
    world.submit(4, model="b")
    world.submit(5, model="c")
    assert [len(p.admit) for p in (world.plan("x"), world.plan("y")) if p] == [1, 1]
    assert world.core.wait_reason("r2") == "all slots are taken"
    assert world.core.wait_reason("r5") == "no executor serves 'c' now"
    world.drain()
    assert world.unfinished == ["r5"]


def test_a_request_too_long_for_one_executor_waits_for_the_larger_and_holds_up_nobody() -> None:
    world = World(None, description("x", num_blocks=4), description("y", num_blocks=16))
    world.lose("y")
    world.submit(1, prompt=40)
    world.submit(2)
    world.turn("x")
    assert world.state("r2") is State.DECODE
    assert world.core.wait_reason("r1") == "it needs a larger executor: y, which is lost"
    world.rejoin("y")
    world.drain()
    world.check_idle()
    assert world.output("r1") == world.expected("r1", "y")


def test_a_request_too_long_for_who_is_there_waits_for_those_that_have_not_been_here_yet() -> None:
    world = World(None, description("x", num_blocks=4))
    world.handle(ExecutorsAwaited(("10.0.0.2:7601",)))
    world.submit(1, prompt=40)
    world.submit(2)
    world.turn("x")
    assert (world.state("r1"), world.state("r2")) == (State.WAITING, State.DECODE)
    assert world.core.wait_reason("r1") == "it needs a larger executor: maybe that at 10.0.0.2:7601, which has not been here yet"
    world.handle(ExecutorsAwaited(()))
    world.drain()
    world.check_idle()
    assert (world.state("r1"), world.state("r2")) == (State.FAILED, State.DONE)


def known(*executors: ExecutorDescription, elsewhere: bool = True) -> ExecutorsKnown:
    return ExecutorsKnown(tuple([KnownExecutor(executor, elsewhere) for executor in executors]))


def test_what_only_an_executor_that_another_scheduler_has_now_can_hold_goes_with_it_at_once() -> None:
    y = description("y", num_blocks=16)
    world = World(None, description("x", num_blocks=4), y)
    world.submit(1, prompt=40)
    world.submit(2)
    world.submit(4, prompt=20, n=2)
    world.turn("y")
    world.handle(ExecutorGone(description("z")))
    assert world.core.strays(10) == {}, "y is here"
    world.lose("y", lives=True)
    assert world.core.strays(10) == {}, "y may be back"
    world.handle(ExecutorGone(y))
    going = ("r1", "r4", "r4/1")
    assert world.core.strays(10) == {"z": going}
    world.handle(known(y))
    assert world.core.strays(10) == {"y": going}
    assert world.handle(HandedOver(going)) == []
    assert world.core.strays(10) == {}
    world.turn("x")
    assert (world.state("r2"), world.core.num_waiting) == (State.DECODE, 0)


def test_what_waits_for_a_lost_executor_goes_elsewhere_after_a_while() -> None:
    world = World(None, description("x"))
    world.lose("x")
    world.handle(known(description("y")))
    world.submit(1)
    world.tick(9)
    assert world.core.strays(10) == {}
    world.tick(1)
    assert world.core.strays(10) == {"y": ("r1",)}
    world.rejoin("x")
    assert world.core.strays(10) == {}
    world.drain_executor("x")
    assert world.core.strays(10) == {"y": ("r1",)}
    world.drain_executor("y")
    assert world.core.strays(10) == {}, "nor is it admitted there"


def test_who_waits_for_an_executor_that_has_not_been_here_yet_does_so_for_a_while() -> None:
    world = World(None, description("x", num_blocks=4))
    world.handle(known(description("y")))
    world.handle(ExecutorsAwaited(("10.0.0.2:7601", "10.0.0.3:7601")))
    world.submit(1, prompt=40)
    world.tick(5)
    world.handle(ExecutorsAwaited(("10.0.0.2:7601",)))
    assert world.core.strays(10) == {}
    world.tick(5)
    assert world.core.strays(10) == {"y": ("r1",)}


def test_a_request_too_long_for_all_here_waits_for_another_schedulers_executor_and_fails_when_nobody_has_one() -> None:
    world = World(None, description("x", num_blocks=4))
    world.handle(known(description("y"), elsewhere=False))
    world.submit(1, prompt=40)
    world.submit(2)
    world.turn("x")
    assert (world.state("r1"), world.state("r2")) == (State.WAITING, State.DECODE)
    assert world.core.wait_reason("r1") == "it needs a larger executor: y, which is not here"
    assert world.core.strays(10) == {}, "it waits there as well as here"
    world.handle(known(description("z", num_blocks=5)))
    world.drain()
    world.check_idle()
    assert (world.state("r1"), world.state("r2")) == (State.FAILED, State.DONE)


def test_a_request_that_outgrows_its_executor_goes_to_another_schedulers_with_its_tokens() -> None:
    world = World(None, description("x", num_blocks=4))
    world.handle(known(description("y")))
    world.submit(1, prompt=12, max_tokens=20)
    for _ in range(8):
        world.turn("x")
    assert (world.state("r1"), len(world.output("r1"))) == (State.PREEMPTED, 5)
    assert world.core.strays(10) == {"y": ("r1",)}


def test_work_is_shared_between_executors_of_one_model() -> None:
    world = World(SchedulerConfig(max_num_seqs=2), description("x"), description("y"))
    for seed in (1, 2, 4, 5):
        world.submit(seed)
    world.plan("x")
    world.plan("y")
    assert [view.running for view in world.core.executors()] == [2, 2]
    world.drain()
    world.check_idle()


@pytest.mark.parametrize("state", [State.PREFILL, State.DECODE])
def test_a_request_that_ran_when_the_scheduler_died_is_taken_up_as_preempted(state: State) -> None:
    world = World(None, description())
    request = Request("r1", "tiny", (1, 2, 3), Sampling(max_tokens=8, seed=1), world.now_s)
    world.records["r1"] = Record(request, state)
    world.records["r1"].output = world.expected("r1")[:2]
    world.handle(Submitted(request, tuple(world.output("r1")), state, executor="x"))
    assert world.state("r1") is State.PREEMPTED
    preempted = world.records["r1"].transitions[0]
    assert (preempted.reason, preempted.executor) == ("scheduler restarted", "x")
    world.drain()
    assert world.output("r1") == world.expected("r1")


@pytest.mark.parametrize("state", [State.PREFILL, State.DECODE, State.PREEMPTED])
def test_a_request_stored_with_all_its_tokens_is_done(state: State) -> None:
    world = World(None, description())
    request = Request("r1", "tiny", (1, 2, 3), Sampling(max_tokens=2, seed=1), world.now_s)
    world.records["r1"] = Record(request, state)
    world.handle(Submitted(request, (5, 6), state))
    ended = world.records["r1"].ended
    assert ended is not None
    assert (ended.after, ended.finish_reason) == (State.DONE, FinishReason.LENGTH)
    assert world.plan() is None


def test_a_submit_of_a_known_request_is_not_taken_in_twice() -> None:
    world = World(None, description())
    world.submit(1)
    assert world.handle(Submitted(world.records["r1"].request)) == []
    assert world.core.num_waiting == 1


def test_plans_are_made_for_joined_executors_only() -> None:
    world = World(None)
    assert world.handle(PlanDue("nobody")) == []


def test_limits_of_the_executor_apply_where_they_are_lower() -> None:
    world = World(
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=100), description(max_num_seqs=32, max_num_batched_tokens=6)
    )
    view = world.core.executors()[0]
    assert (view.max_num_seqs, view.max_num_batched_tokens) == (6, 6), "every decode has to fit into a step"


def test_an_empty_result_column_is_legal() -> None:
    """A plan that only releases is answered with no rows."""
    world = World(None, description())
    world.submit(1)
    world.turn()
    world.cancel("r1")
    world.plan()
    result = world.step()
    assert result == Result(1, 2, (), (), (), (), (), world.executors["x"].blocks)
    assert world.deliver() == []
    world.check_idle()
