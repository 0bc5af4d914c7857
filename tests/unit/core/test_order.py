"""Who runs when: arrival, priority, preempted ones, overtaking, slots."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from tokenmill_scheduler.core.counters import Preemption
from tokenmill_scheduler.core.events import PolicyChanged, QuotasChanged, Updated
from tokenmill_scheduler.core.lanes import guaranteed_slots
from tokenmill_scheduler.core.lengths import OutputLengths
from tokenmill_scheduler.core.live import LiveRequest
from tokenmill_scheduler.core.policy import POLICIES
from tokenmill_scheduler.core.prediction import Prediction
from tokenmill_scheduler.core.quotas import Quota
from tokenmill_scheduler.core.request import Lane, Request, Sampling, State
from tokenmill_scheduler.core.scheduler import SchedulerConfig

from tests.simulation.world import World, description


def _admitted(world: World) -> list[int]:
    return [admission.sampling.seed for plan in world.plans for admission in plan.admit]


def _states(world: World, seeds: Iterable[int]) -> list[str]:
    return [world.state(f"r{seed}").value for seed in seeds]


def test_fcfs_runs_in_order_of_arrival_whatever_the_priority() -> None:
    world = World(SchedulerConfig(max_num_seqs=1), description())
    for seed in (5, 2, 4):
        world.submit(seed, priority=seed)
    world.drain()
    assert _admitted(world) == [5, 2, 4]


def test_priority_runs_higher_sooner_and_ties_by_arrival() -> None:
    world = World(SchedulerConfig(max_num_seqs=1, policy="priority"), description())
    for seed, priority in ((1, 0), (2, 1), (4, 0), (5, 2)):
        world.submit(seed, priority=priority)
    world.drain()
    assert _admitted(world) == [5, 2, 1, 4]


def test_c25_a_preempted_request_resumes_before_its_equals() -> None:
    world = World(SchedulerConfig(max_num_seqs=1, policy="priority"), description())
    world.submit(2, priority=-1)
    world.tick(1)
    world.submit(1, priority=0)
    world.turn()
    world.update("r2", priority=0)
    world.submit(4, priority=1)
    world.drain()
    assert _admitted(world) == [1, 4, 1, 2], "r2 arrived before r1, and is its equal"


def test_c25_nobody_overtakes_a_preempted_request_that_does_not_fit() -> None:
    world = World(None, description(num_blocks=6))
    for seed in (1, 2):
        world.submit(seed, prompt=8, max_tokens=9)
    while not world.records["r2"].path.endswith("preempted"):
        world.turn()
    world.submit(4, prompt=1, max_tokens=1)
    world.turn()
    assert world.state("r4") is State.WAITING
    world.drain()
    assert _admitted(world) == [1, 2, 2, 4]


def test_c33_a_higher_arrival_preempts_one_victim_and_an_equal_none() -> None:
    world = World(SchedulerConfig(max_num_seqs=3, policy="priority"), description())
    for seed in (1, 2, 4):
        world.submit(seed, max_tokens=20)
    world.turn()
    world.submit(5, priority=0)
    world.turn()
    assert _states(world, (1, 2, 4, 5)) == ["decode", "decode", "decode", "waiting"]

    world.submit(7, priority=1)
    plan = world.turn()

    assert plan is not None
    assert plan.release == (3,), "the latest of the lowest"
    assert len(plan.advance_sequence_ids) == 3
    assert _states(world, (1, 2, 4, 5, 7)) == ["decode", "decode", "preempted", "waiting", "decode"]
    world.drain()
    world.check_idle()
    assert world.core.counters.preemptions == 1
    assert all(world.output(r) == world.expected(r) for r in world.records)


def test_c33_a_higher_arrival_takes_blocks_from_the_lower() -> None:
    world = World(SchedulerConfig(policy="priority"), description(num_blocks=6))
    world.submit(1, prompt=8, max_tokens=4)
    world.submit(2, prompt=8, max_tokens=4)
    world.turn()
    world.submit(4, prompt=10, max_tokens=2, priority=1)
    world.turn()
    assert _states(world, (1, 2, 4)) == ["decode", "preempted", "waiting"]
    world.turn()
    assert _states(world, (1, 2, 4)) == ["decode", "preempted", "decode"]
    world.drain()
    world.check_idle()


def test_c33_nobody_is_preempted_if_that_would_not_make_enough_room() -> None:
    world = World(SchedulerConfig(policy="priority"), description(num_blocks=6))
    world.submit(1, prompt=11, max_tokens=8, priority=2)
    world.submit(2, prompt=3, max_tokens=8)
    world.turn()
    world.submit(4, prompt=18, max_tokens=2, priority=1)
    world.turn()
    assert _states(world, (1, 2, 4)) == ["decode", "decode", "waiting"]
    world.drain()
    world.check_idle()
    assert all(world.output(r) == world.expected(r) for r in world.records)


def test_c33_static_batches_are_not_disturbed() -> None:
    world = World(SchedulerConfig(max_num_seqs=1, policy="priority", batching="static"), description())
    world.submit(1)
    world.turn()
    world.submit(2, priority=1)
    world.drain()
    assert world.core.counters.preemptions == 0


def test_no_more_run_than_there_are_slots_while_others_have_their_last_step_before_them() -> None:
    """Two of one token each have the step, two others its successor: those run when their step does, and each is counted once."""
    world = World(SchedulerConfig(max_num_seqs=2, watermark=0.0), description())
    for seed in range(1, 5):
        world.submit(seed, max_tokens=1, lane=Lane.BATCH if seed > 2 else Lane.STANDARD)
    counts = []
    for _ in range(2):
        world.plan()
        counts.append((world.core.running_by_lane(), world.core.executors()[0].running, world.core.num_running))
    standard, batch = ({Lane.REAL_TIME: 0, Lane.STANDARD: s, Lane.BATCH: b} for s, b in ((2, 0), (0, 2)))
    assert counts == [(standard, 2, 2), (standard, 2, 4)], "the second plan is behind the first"
    world.step()
    world.deliver()
    assert world.core.running_by_lane() == batch
    world.step()
    world.deliver()
    assert sum(world.core.running_by_lane().values()) == 0
    world.check_idle()


def test_c36_slots_of_requests_with_one_token_are_reusable_in_the_very_next_plan() -> None:
    world = World(SchedulerConfig(max_num_seqs=4), description())
    for seed in (1, 2, 4, 5, 7, 8, 10, 11):
        world.submit(seed, max_tokens=1)
    first, second = world.plan(), world.plan()
    assert first is not None
    assert second is not None
    assert (first.advance_sequence_ids, second.advance_sequence_ids) == ((1, 2, 3, 4), (5, 6, 7, 8))
    world.drain()
    world.check_idle()
    assert len(world.plans) == 2


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_overtakes_past_a_head_that_does_not_fit_are_bounded(allowed: int) -> None:
    world = World(SchedulerConfig(max_overtakes=allowed), description(num_blocks=8))
    world.submit(1, prompt=15, max_tokens=40)
    world.turn()
    world.submit(2, prompt=28, max_tokens=1)
    for seed in (4, 5, 7, 8, 10, 11):
        world.submit(seed, prompt=1, max_tokens=1)
    for _ in range(8):
        world.turn()
    assert _admitted(world)[1:] == [4, 5, 7][:allowed]
    world.cancel("r1")
    world.drain()
    world.check_idle()
    assert _admitted(world)[1 + allowed] == 2


def test_a_lower_priority_does_not_overtake_a_higher_that_does_not_fit() -> None:
    world = World(SchedulerConfig(policy="priority"), description(num_blocks=8))
    world.submit(1, prompt=15, max_tokens=10, priority=3)
    world.turn()
    world.submit(2, prompt=28, max_tokens=1, priority=2)
    world.submit(4, prompt=1, max_tokens=1, priority=1)
    world.turn()
    assert world.state("r4") is State.WAITING
    world.drain()
    assert _admitted(world) == [1, 2, 4]


def test_a_lane_s_guarantee_keeps_no_higher_lane_waiting_while_none_of_it_fits() -> None:
    world = World(SchedulerConfig(max_num_seqs=4, lane_shares=(0, 0, 50)), description(num_blocks=8))
    world.submit(1, prompt=15, max_tokens=40)
    world.turn()
    for seed in range(11, 21):
        world.submit(seed, prompt=28, max_tokens=1, lane=Lane.BATCH)
    world.submit(2, prompt=1, max_tokens=1, lane=Lane.REAL_TIME)
    world.turn()
    assert _states(world, (1, 2)) == ["decode", "done"]


def test_c25_a_preempted_request_keeps_no_higher_lane_waiting() -> None:
    world = World(SchedulerConfig(max_num_seqs=4, lane_shares=(0, 0, 50)), description(num_blocks=8))
    world.submit(1, prompt=14, max_tokens=30, lane=Lane.BATCH)
    world.submit(2, prompt=14, max_tokens=17)
    while world.state("r1") is not State.PREEMPTED:
        world.turn()
    world.turn()
    assert world.core.wait_reason("r1") == "not enough free KV blocks"
    world.submit(4, prompt=1, max_tokens=1, lane=Lane.REAL_TIME)
    world.turn()
    assert _states(world, (1, 2, 4)) == ["preempted", "decode", "done"]
    world.drain()
    world.check_idle()


def test_a_lower_lane_does_not_overtake_a_higher_that_does_not_fit() -> None:
    world = World(SchedulerConfig(lane_shares=(0, 0, 0)), description(num_blocks=8))
    world.submit(1, prompt=15, max_tokens=10, lane=Lane.REAL_TIME)
    world.turn()
    world.submit(2, prompt=28, max_tokens=1, lane=Lane.REAL_TIME)
    world.submit(4, prompt=1, max_tokens=1)
    world.turn()
    assert world.state("r4") is State.WAITING
    world.drain()
    assert _admitted(world) == [1, 2, 4]


def test_c71_sjf_runs_the_short_one_first_and_the_long_one_within_the_bound_under_endless_short_ones() -> None:
    world = World(SchedulerConfig(max_num_seqs=1, policy="sjf", ageing_turn=4), description())
    world.submit(1, max_tokens=40)
    world.submit(2, max_tokens=2)
    for seed in range(4, 40):
        world.submit(seed, max_tokens=2)
        world.turn()
        world.turn()
    assert _admitted(world)[:5] == [2, 4, 5, 1, 6]
    world.drain()
    world.check_idle()


def test_a_request_that_ran_for_its_age_is_not_displaced_by_the_next_of_higher_priority() -> None:
    world = World(SchedulerConfig(max_num_seqs=1, policy="priority", ageing_turn=2, max_priority_wait_s=10.0), description())
    world.submit(1, max_tokens=20)
    world.submit(2, priority=1, max_tokens=2)
    world.submit(4, priority=1, max_tokens=2)
    world.turn()
    world.tick(10.0)
    for seed in (5, 7, 8):
        world.submit(seed, priority=1, max_tokens=2)
        world.turn()
    assert world.state("r1") is State.DECODE
    world.drain()
    assert _admitted(world) == [2, 1, 4, 5, 7, 8]


def test_a_request_that_ran_for_its_age_is_not_the_one_given_up_when_blocks_run_short() -> None:
    config = SchedulerConfig(max_num_seqs=2, policy="priority", ageing_turn=1, max_priority_wait_s=0.0)
    world = World(config, description(num_blocks=6))
    world.submit(1, prompt=8, max_tokens=9)
    world.submit(2, prompt=8, max_tokens=9, priority=1)
    world.drain()
    world.check_idle()
    assert _admitted(world) == [1, 2, 2], "it would wait as long again"


@pytest.mark.parametrize("policy", POLICIES)
def test_c25_a_preempted_request_resumes_before_its_equals_under_every_policy(policy: str) -> None:
    world = World(SchedulerConfig(max_num_seqs=1, policy=policy, ageing_turn=1), description())
    world.submit(1, max_tokens=9)
    world.turn()
    world.submit(2, max_tokens=9)
    world.submit(4, max_tokens=8, lane=Lane.REAL_TIME)
    world.drain()
    assert _admitted(world) == [1, 4, 1, 2]


def test_edf_runs_the_earliest_deadline_first_and_those_without_one_last() -> None:
    world = World(SchedulerConfig(max_num_seqs=1, policy="edf"), description())
    for seed, wait_s in ((1, None), (2, 900.0), (4, 300.0), (5, None), (7, 600.0)):
        world.submit(seed, deadline_s=None if wait_s is None else world.now_s + wait_s)
    world.update("r5", deadline_s=world.now_s + 100.0)
    world.drain()
    assert _admitted(world) == [5, 4, 7, 2, 1]


def test_a_policy_that_changes_puts_what_waits_in_its_order_and_leaves_what_runs_alone() -> None:
    world = World(SchedulerConfig(max_num_seqs=1), description())
    world.submit(1, max_tokens=9)
    world.turn()
    for seed, max_tokens in ((2, 9), (4, 3), (5, 6)):
        world.submit(seed, max_tokens=max_tokens)
    world.change_policy(PolicyChanged("sjf", fair_share=True, lane_shares=(50, 40, 10)))
    world.drain()
    world.check_idle()
    assert _admitted(world) == [1, 4, 5, 2]


def test_tenants_that_share_fairly_take_turns_within_one_plan() -> None:
    world = World(SchedulerConfig(max_num_seqs=6, fair_share=True, weights={"b": 2.0}), description())
    for seed in range(1, 7):
        world.submit(seed, tenant="a")
    for seed in range(7, 13):
        world.submit(seed, tenant="b")
    plan = world.turn()
    assert plan is not None
    assert [admission.sampling.seed for admission in plan.admit] == [1, 7, 8, 2, 9, 10]


def test_a_tenant_that_asked_for_nothing_has_saved_nothing_up() -> None:
    world = World(SchedulerConfig(max_num_seqs=1, fair_share=True), description())
    world.submit(1, tenant="b")
    world.drain()
    for seed in range(2, 12):
        world.submit(seed, tenant="a")
    world.drain()
    for seed in range(12, 16):
        world.submit(seed, tenant="a")
        world.submit(seed + 10, tenant="b")
    world.drain()
    first = [world.records[f"r{seed}"].request.tenant for seed in _admitted(world)[-8:-4]]
    assert sorted(first) == ["a", "a", "b", "b"]


def test_accounts_of_tenants_go_on_when_the_policy_changes() -> None:
    world = World(SchedulerConfig(max_num_seqs=1, fair_share=True), description())
    for seed in range(1, 5):
        world.submit(seed, tenant="a", max_tokens=20)
    world.submit(5, tenant="b", max_tokens=1)
    while world.state("r2") is State.WAITING:
        world.turn()
    for seed in range(6, 11):
        world.submit(seed, tenant="b", max_tokens=1)
    world.handle(PolicyChanged("sjf", fair_share=True, lane_shares=(50, 40, 10)))
    world.drain()
    assert _admitted(world) == [1, 5, 2, 6, 7, 8, 9, 10, 3, 4], "b had less, and goes on until it has had as much"


def test_c33_a_higher_lane_takes_what_a_lower_has_beyond_its_guarantee_and_no_more() -> None:
    world = World(SchedulerConfig(max_num_seqs=8, lane_shares=(50, 20, 30)), description())
    for seed in range(1, 9):
        world.submit(seed, lane=Lane.BATCH)
    world.turn()
    for seed in range(11, 21):
        world.submit(seed, lane=Lane.REAL_TIME)
    world.turn()
    assert world.core.counters.preempted == {Preemption.DISPLACED: 6}
    world.drain()
    world.check_idle()


def test_a_lane_keeps_its_guarantee_though_the_first_of_it_cannot_run_here() -> None:
    x, y = description("x", num_blocks=4), description("y", num_blocks=32)
    world = World(SchedulerConfig(max_num_seqs=3), x, y)
    world.handle(QuotasChanged(Quota(), {"poor": Quota(max_num_seqs=0)}))
    world.submit(1, prompt=40, lane=Lane.BATCH)
    world.submit(2, lane=Lane.BATCH, tenant="poor")
    world.submit(4, prompt=2, max_tokens=1, lane=Lane.BATCH)
    for seed in (5, 7, 8):
        world.submit(seed, prompt=2, max_tokens=1, lane=Lane.REAL_TIME)
    plan = world.plan("x")
    assert plan is not None
    assert 4 in [admission.sampling.seed for admission in plan.admit]


def test_sjf_judges_tenants_that_set_max_tokens_carelessly_by_the_outputs_they_made() -> None:
    prediction = Prediction(OutputLengths())
    careless = Request("c", "m", (1,), Sampling(max_tokens=1000, seed=0), 0.0, tenant="careless")
    careful = Request("d", "m", (1,), Sampling(max_tokens=40, seed=0), 0.0, tenant="careful")
    for _ in range(20):
        prediction.observe(careless, 10)
        prediction.observe(careful, 38)

    def remaining(request: Request, made: int = 0) -> int:
        return prediction.remaining(LiveRequest(request, 1, State.WAITING, [7] * made))

    assert (remaining(careless), remaining(careless, 4), remaining(careful)) == (10, 6, 40)
    assert remaining(careless, 10) == 990, "it has outgrown what was expected"
    assert remaining(replace(careless, tenant="unknown")) == 1000


def test_a_new_priority_moves_a_waiting_request_and_is_told() -> None:
    world = World(SchedulerConfig(max_num_seqs=1, policy="priority"), description())
    for seed in (1, 2, 4):
        world.submit(seed)
    assert world.update("r4", priority=5) == [Updated("r4", 5)]
    world.drain()
    assert _admitted(world) == [4, 1, 2]
    assert world.update("r4", priority=6) == [], "it has ended"


def test_a_new_priority_of_a_running_request_saves_it_from_being_the_victim() -> None:
    world = World(SchedulerConfig(max_num_seqs=2, policy="priority"), description())
    world.submit(1, max_tokens=20)
    world.submit(2, max_tokens=20)
    world.turn()
    world.update("r2", priority=1)
    world.submit(4, priority=1)
    world.turn()
    assert _states(world, (1, 2, 4)) == ["preempted", "decode", "decode"]


def test_decodes_come_first_then_prefills_by_what_is_left_of_the_budget() -> None:
    world = World(SchedulerConfig(max_num_batched_tokens=10), description())
    world.submit(1, prompt=4)
    world.turn()
    world.submit(2, prompt=12)
    world.submit(4, prompt=12)
    plan = world.turn()
    assert plan is not None
    assert (plan.advance_sequence_ids, plan.advance_max_tokens) == ((1, 2), (1, 9))
    plan = world.turn()
    assert plan is not None
    assert (plan.advance_sequence_ids, plan.advance_max_tokens) == ((1, 2, 3), (1, 3, 6))


def test_no_plan_when_there_is_nothing_to_do_or_the_pipeline_is_full() -> None:
    world = World(None, description(pipeline_depth=2))
    assert world.plan() is None
    world.submit(1, max_tokens=9)
    assert world.plan() is not None
    assert world.plan() is not None
    assert world.plan() is None
    world.step()
    world.deliver()
    assert world.plan() is not None


def test_no_plan_for_a_sequence_that_the_plans_out_bring_to_its_end() -> None:
    world = World(None, description(pipeline_depth=4))
    world.submit(1, max_tokens=2)
    assert [world.plan() is not None for _ in range(3)] == [True, True, False]


def test_lanes_come_before_priorities() -> None:
    world = World(SchedulerConfig(policy="priority", max_num_seqs=1), description())
    world.submit(1, priority=9, lane=Lane.BATCH)
    world.submit(2, priority=0)
    world.submit(3, priority=1)
    world.submit(4, priority=-9, lane=Lane.REAL_TIME)
    world.drain()
    assert _admitted(world) == [4, 3, 2, 1]


def test_c33_a_real_time_request_displaces_one_of_the_standard_lane_and_never_its_like() -> None:
    world = World(SchedulerConfig(policy="priority", max_num_seqs=1), description())
    world.submit(1, priority=9)
    world.turn()
    world.submit(2, priority=9, lane=Lane.BATCH)
    world.submit(3, lane=Lane.REAL_TIME)
    world.turn()
    assert world.state("r1") is State.PREEMPTED
    world.drain()
    assert _admitted(world) == [1, 3, 1, 2]


@pytest.mark.parametrize("policy", POLICIES)
def test_lanes_come_before_every_policy(policy: str) -> None:
    world = World(SchedulerConfig(max_num_seqs=1, policy=policy), description())
    for seed, lane in ((1, Lane.BATCH), (2, Lane.STANDARD), (4, Lane.REAL_TIME), (5, Lane.BATCH)):
        world.submit(seed, lane=lane)
    world.drain()
    assert _admitted(world) == [4, 2, 1, 5]


@pytest.mark.parametrize(
    ("shares", "slots", "guaranteed"),
    [
        ((50, 40, 10), 8, (4, 3, 1)),
        ((50, 40, 10), 2, (0, 0, 0)),
        ((90, 5, 5), 10, (8, 1, 1)),
        ((90, 5, 5), 3, (1, 1, 1)),
        ((0, 100, 0), 2, (0, 2, 0)),
        ((0, 0, 0), 8, (0, 0, 0)),
    ],
)
def test_a_lane_with_a_share_has_a_slot_where_there_are_enough_at_the_largest_one_s_cost(
    shares: tuple[int, int, int], slots: int, guaranteed: tuple[int, int, int]
) -> None:
    assert tuple(guaranteed_slots(shares, slots).values()) == guaranteed
