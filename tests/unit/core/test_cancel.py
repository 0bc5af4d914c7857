"""Cancelling at every moment of a request's life, and results for what is not wanted any more."""

from __future__ import annotations

from tokenmill_scheduler.core.effects import Transitioned
from tokenmill_scheduler.core.events import Cancelled
from tokenmill_scheduler.core.request import FinishReason, State
from tokenmill_scheduler.core.scheduler import SchedulerConfig

from tests.simulation.world import World, description


def _seeds_admitted(world: World) -> list[int]:
    return [admission.sampling.seed for plan in world.plans for admission in plan.admit]


def test_c01_cancel_while_waiting_and_every_slot_is_busy() -> None:
    world = World(SchedulerConfig(max_num_seqs=1), description())
    world.submit(1)
    world.turn()
    world.submit(2)
    free_blocks = world.core.executors()[0].free_blocks

    effects = world.cancel("r2")

    ended = Transitioned("r2", State.WAITING, State.CANCELLED, world.now_s, "by the client", "", FinishReason.CANCELLED)
    assert effects == [ended]
    assert world.core.executors()[0].free_blocks == free_blocks
    world.drain()
    world.check_idle()
    assert _seeds_admitted(world) == [1]


def test_c02_a_cancel_accepted_before_the_last_token_wins() -> None:
    world = World(None, description())
    world.submit(1, max_tokens=1)
    world.plan()
    world.step()
    world.cancel("r1")

    assert world.deliver() == []
    assert world.records["r1"].path == "waiting prefill cancelled"
    assert world.output("r1") == []
    world.drain()
    world.check_idle()


def test_c02_a_cancel_after_the_last_token_comes_too_late() -> None:
    world = World(None, description())
    world.submit(1, max_tokens=1)
    world.turn()

    assert world.cancel("r1") == []
    assert world.records["r1"].path == "waiting prefill done"
    assert world.output("r1") == world.expected("r1")


def test_c03_cancel_a_finished_request_twice_changes_nothing() -> None:
    world = World(None, description())
    world.submit(1)
    world.drain()
    assert (world.cancel("r1"), world.cancel("r1")) == ([], [])
    assert world.state("r1") is State.DONE
    assert world.handle(Cancelled("never heard of", "")) == []


def test_c04_a_report_on_a_released_sequence_is_dropped_and_counted() -> None:
    world = World(None, description())
    world.submit(1)
    world.submit(2)
    world.plan()
    world.cancel("r1")
    released = world.plan()
    assert released is not None
    assert released.release == (1,)
    assert world.core.owner("x", 1) is None

    world.step()
    world.deliver()

    assert world.core.counters.stale_results == 1
    assert world.output("r1") == []
    assert len(world.output("r2")) == 1
    world.drain()
    world.check_idle()
    assert world.output("r2") == world.expected("r2")


def test_c07_blocks_of_a_cancelled_sequence_are_not_given_before_its_plan_has_returned() -> None:
    world = World(None, description(num_blocks=4))
    world.submit(1, prompt=12)
    world.plan()
    world.cancel("r1")
    world.submit(2, prompt=8)

    release = world.plan()
    assert release is not None
    assert (release.release, release.admit) == ((1,), ())
    world.step()
    world.deliver()
    assert world.plan() is None, "the plan that releases has not returned"
    assert world.core.wait_reason("r2") == "not enough free KV blocks"
    world.step()
    world.deliver()
    admitted = world.plan()
    assert admitted is not None
    assert [a.sequence_id for a in admitted.admit] == [2]
    world.drain()
    world.check_idle()


def test_c11_cancelled_while_waiting_it_never_appears_in_a_plan() -> None:
    world = World(SchedulerConfig(max_num_seqs=1), description())
    for seed in (1, 2, 4):
        world.submit(seed)
    world.turn()
    world.cancel("r2")
    world.drain()
    assert _seeds_admitted(world) == [1, 4]
    assert world.output("r2") == []
    assert world.records["r2"].path == "waiting cancelled"


def test_a_cancelled_request_is_in_no_plan_after_the_next() -> None:
    world = World(None, description())
    world.submit(1, max_tokens=100)
    world.turn()
    world.cancel("r1")
    plan = world.turn()
    assert plan is not None
    assert (plan.release, plan.advance_sequence_ids) == ((1,), ())
    assert world.plan() is None
    world.check_idle()


def test_cancel_of_a_preempted_request_whose_last_plan_is_out() -> None:
    world = World(SchedulerConfig(max_num_seqs=1, policy="priority"), description())
    world.submit(1)
    world.plan()
    world.submit(2, priority=1)
    world.plan()
    assert world.state("r1") is State.PREEMPTED
    world.cancel("r1")
    world.drain()
    world.check_idle()
    assert world.output("r1") == []
    assert world.output("r2") == world.expected("r2")
