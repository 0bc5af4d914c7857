"""A request that kills executors fails alone; those that were lost with it go on."""

from __future__ import annotations

import pytest
from tokenmill_scheduler.core.request import FinishReason, State
from tokenmill_scheduler.core.scheduler import SchedulerConfig

from tests.simulation.world import World, description


def _check_quarantined(world: World, culprit: str) -> None:
    ended = world.records[culprit].ended
    assert ended is not None
    assert (ended.after, ended.finish_reason, ended.error_code) == (State.FAILED, FinishReason.ERROR, 13)
    assert (ended.reason, ended.error) == (
        "quarantined",
        "2 executors were lost while they ran this request; it is not tried again",
    )
    assert world.kills == {culprit: 2}
    others = [request_id for request_id in world.records if request_id != culprit]
    assert all(world.output(request_id) == world.expected(request_id) for request_id in others)
    world.check_idle()


@pytest.mark.parametrize("poison", [1, 3, 6])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_that_kills_two_executors_fails_alone(poison: int, overlap: bool) -> None:
    world = World(None, description(), overlap=overlap)
    for seed in range(1, 7):
        world.submit(seed)
    world.executors["x"].poison[poison] = 2
    world.drain()
    _check_quarantined(world, f"r{poison}")


def test_an_executor_that_was_only_out_of_reach_makes_no_suspects() -> None:
    """Its links break again and again; the process is the same each time."""
    world = World(None, description())
    for seed in range(1, 5):
        world.submit(seed)
    for _ in range(4):
        world.plan()
        world.lose()
        assert world.suspects() != []
        world.rejoin(same_process=True)
    assert world.suspects() == []
    world.drain()
    assert all(world.output(f"r{seed}") == world.expected(f"r{seed}") for seed in range(1, 5))
    world.check_idle()


def test_it_is_found_on_several_executors() -> None:
    world = World(SchedulerConfig(max_num_seqs=3), description("x"), description("y"))
    for seed in range(1, 9):
        world.submit(seed)
    for executor in world.executors.values():
        executor.poison[5] = 0
    world.drain()
    _check_quarantined(world, "r5")


def test_poison_at_the_end_of_a_long_prompt_is_not_acquitted_by_its_first_chunk() -> None:
    world = World(SchedulerConfig(max_num_batched_tokens=8), description())
    world.submit(1, prompt=60)
    world.submit(2, prompt=4)
    world.executors["x"].poison[1] = 55
    world.drain()
    _check_quarantined(world, "r1")


def test_poison_that_only_shows_in_decoding_is_found_too() -> None:
    world = World(None, description())
    world.submit(1, prompt=4, max_tokens=8)
    world.submit(2, prompt=4, max_tokens=8)
    world.executors["x"].poison[1] = 7
    world.drain()
    _check_quarantined(world, "r1")


def test_two_poisonous_requests_are_found_one_after_the_other() -> None:
    world = World(None, description())
    for seed in range(1, 6):
        world.submit(seed)
    world.executors["x"].poison = {2: 0, 4: 0}
    world.drain()
    assert [request_id for request_id in world.records if world.state(request_id) is State.FAILED] == ["r2", "r4"]
    assert all(kills <= 2 for kills in world.kills.values())
    world.check_idle()


def test_suspects_run_one_at_a_time_beside_those_that_decode_and_are_acquitted_by_an_answer() -> None:
    world = World(None, description())
    world.submit(1)
    world.submit(2)
    world.plan()
    world.lose()
    world.rejoin()
    world.submit(3)
    plan = world.plan()
    assert plan is not None
    assert [a.sampling.seed for a in plan.admit] == [1], "the first suspect, and nobody beside it"
    assert world.core.wait_reason("r2") == "an executor was lost while it ran: such requests are tried one at a time"
    assert world.core.wait_reason("r3") == "a request that may have killed an executor is tried alone"
    world.try_step()
    world.deliver()
    plan = world.turn()
    assert plan is not None
    assert [a.sampling.seed for a in plan.admit] == [2]
    plan = world.turn()
    assert plan is not None
    assert [a.sampling.seed for a in plan.admit] == [3], "all are acquitted"
    world.lose()
    assert world.state("r1") is State.PREEMPTED, "nothing was unanswered: nobody is suspected, nobody fails"
    world.rejoin()
    plan = world.turn()
    assert plan is not None
    assert len(plan.admit) == 3


def test_a_suspect_waits_until_what_runs_has_left_prefill() -> None:
    world = World(SchedulerConfig(max_num_batched_tokens=8, policy="priority"), description())
    world.submit(1)
    world.plan()
    world.lose()
    world.rejoin()
    world.submit(2, prompt=12, priority=1)
    for chunk in (8, 4):
        plan = world.turn()
        assert plan is not None
        assert plan.advance_max_tokens == (chunk,), "what is new is not tried beside a suspect"
    plan = world.turn()
    assert plan is not None
    assert [a.sampling.seed for a in plan.admit] == [1]
    world.drain()
    world.check_idle()


def test_those_who_run_beside_the_culprit_become_no_suspects() -> None:
    world = World(None, description())
    world.submit(1)
    world.turn()
    world.submit(2)
    world.executors["x"].poison[2] = 0
    world.turn()
    assert world.kills == {"r2": 1}
    world.turn()
    world.turn()
    assert world.state("r2") is State.FAILED
    plan = world.turn()
    assert plan is not None
    assert [a.sampling.seed for a in plan.admit] == [1]
    assert not world.on_trial("x")


def test_a_suspect_cancelled_during_its_trial_takes_the_blame_with_it() -> None:
    world = World(None, description())
    world.submit(1)
    world.turn()
    world.submit(2)
    world.plan()
    world.lose()
    world.rejoin()
    world.turn()
    world.turn()
    world.cancel("r2")
    world.lose()
    world.rejoin()
    world.drain()
    assert [world.state(r) for r in ("r1", "r2")] == [State.DONE, State.CANCELLED]
    world.check_idle()


def test_more_losses_can_be_allowed_before_a_request_is_blamed() -> None:
    world = World(SchedulerConfig(max_executor_losses=3), description())
    for seed in (1, 2, 3):
        world.submit(seed)
    world.executors["x"].poison[2] = 2
    world.drain()
    assert world.kills == {"r2": 3}
    assert [world.state(r) for r in world.records] == [State.DONE, State.FAILED, State.DONE]
    ended = world.records["r2"].ended
    assert ended is not None
    assert ended.error.startswith("3 executors were lost")


def test_an_acquittal_forgets_earlier_losses() -> None:
    world = World(SchedulerConfig(max_executor_losses=3), description())
    world.submit(1, max_tokens=40)
    for _ in range(5):
        world.plan()
        world.lose()
        world.rejoin()
        world.turn()
        world.turn()
    world.drain()
    assert world.state("r1") is State.DONE
    world.check_idle()


@pytest.mark.parametrize("lives", [True, False])
def test_c74_an_executor_that_another_scheduler_takes_back_makes_no_suspects(lives: bool) -> None:
    world = World(None, description())
    world.submit(1)
    for _ in range(3):
        world.plan()
        world.lose(lives=lives)
        world.rejoin()
    world.drain()
    assert world.state("r1") is (State.DONE if lives else State.FAILED)
    world.check_idle()
