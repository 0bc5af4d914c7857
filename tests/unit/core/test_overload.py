"""The overload controller alone, and what its stages do to plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenmill_scheduler.core.effects import OverloadChanged
from tokenmill_scheduler.core.overload import OverloadConfig, OverloadController, Signals, Stage
from tokenmill_scheduler.core.quotas import Quota
from tokenmill_scheduler.core.request import Lane, State
from tokenmill_scheduler.core.scheduler import SchedulerConfig

from tests.simulation.world import World, description

CONFIG = OverloadConfig(ttft_target_s=2.0, queue_delay_s=10.0, hold_s=2.0, recovery_s=5.0)
WAITING = Signals(standard_wait_s=11.0)
BETWEEN = Signals(standard_wait_s=7.0)
CALM = Signals()


def _stages(controller: OverloadController, signals: Signals, start_s: int, seconds: int) -> list[int]:
    """Sampled once a second."""
    stages = []
    for now_s in range(start_s, start_s + seconds):
        controller.sample(signals, now_s)
        stages.append(int(controller.stage))
    return stages


def test_it_climbs_while_it_lasts_stays_between_the_marks_and_comes_down_by_itself() -> None:
    controller = OverloadController(CONFIG)
    assert _stages(controller, WAITING, 0, 9) == [0, 0, 1, 1, 2, 2, 3, 3, 3]
    assert controller.why == "the standard lane waits 11 s, with 10 s as its mark"
    assert set(_stages(controller, BETWEEN, 9, 100)) == {3}
    assert _stages(controller, CALM, 109, 17) == [3] * 5 + [2] * 5 + [1] * 5 + [0] * 2
    assert controller.why == ""


def test_why_a_stage_lasts_is_told_as_it_is_now() -> None:
    controller = OverloadController(CONFIG)
    _stages(controller, WAITING, 0, 3)
    _stages(controller, Signals(standard_wait_s=19.0), 3, 1)
    assert controller.why == "the standard lane waits 19 s, with 10 s as its mark"
    _stages(controller, BETWEEN, 4, 1)
    assert controller.why == "the standard lane waits 19 s, with 10 s as its mark"


def test_what_is_over_before_it_is_held_changes_nothing() -> None:
    controller = OverloadController(CONFIG)
    for start_s in range(0, 100, 4):
        assert set(_stages(controller, WAITING, start_s, 2) + _stages(controller, CALM, start_s + 2, 2)) == {0}


@pytest.mark.parametrize(
    ("signals", "most"),
    [
        (Signals(real_time_wait_s=1.0), 3),
        (Signals(standard_wait_s=10.0), 3),
        (Signals(drain_s=10.0), 2),
        (Signals(kv_pressure=0.95), 2),
    ],
)
def test_only_a_delay_that_is_there_refuses_clients(signals: Signals, most: int) -> None:
    controller = OverloadController(CONFIG)
    assert max(_stages(controller, signals, 0, 60)) == most


def test_full_blocks_do_not_keep_clients_out_once_the_delay_is_over() -> None:
    controller = OverloadController(CONFIG)
    _stages(controller, WAITING, 0, 10)
    assert _stages(controller, Signals(kv_pressure=0.99), 10, 30)[-1] == Stage.BATCH_PAUSED


def test_switched_off_it_does_nothing() -> None:
    controller = OverloadController(replace(CONFIG, enabled=False))
    assert set(_stages(controller, WAITING, 0, 60)) == {0}


SIGNALS = st.builds(Signals, st.floats(0, 3), st.floats(0, 20), st.floats(0, 20), st.floats(0, 1)) | st.sampled_from(
    [CALM, WAITING, BETWEEN]
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.floats(0, 3), SIGNALS), max_size=60))
def test_it_never_flaps(samples: list[tuple[float, Signals]]) -> None:
    """One stage at a time; up after `hold_s` of nothing but high samples, down after `recovery_s` of nothing but low ones."""
    controller, now_s = OverloadController(CONFIG), 0.0
    changed_s, high_since_s, low_since_s = float("-inf"), None, None
    for passed_s, signals in samples:
        now_s += passed_s
        before = controller.stage
        delay = signals.real_time_wait_s >= 1.0 or signals.standard_wait_s >= 10.0
        high = delay or signals.drain_s >= 10.0 or signals.kv_pressure >= 0.95
        low = signals.real_time_wait_s <= 0.5 and signals.standard_wait_s <= 5.0
        high_since_s = (now_s if high_since_s is None else high_since_s) if high else None
        low_since_s = (now_s if low_since_s is None else low_since_s) if low else None
        changed = controller.sample(signals, now_s)
        assert changed == (controller.stage != before)
        if controller.stage > before:
            assert controller.stage == before + 1
            assert high_since_s is not None
            assert now_s - max(high_since_s, changed_s) >= CONFIG.hold_s
            assert delay or controller.stage < Stage.STANDARD_REFUSED
        if controller.stage < before:
            assert controller.stage == before - 1
            assert low_since_s is not None
            assert now_s - max(low_since_s, changed_s) >= CONFIG.recovery_s
        changed_s = now_s if changed else changed_s
    for _ in range(60):
        now_s += 1
        controller.sample(CALM, now_s)
    assert controller.stage == Stage.NORMAL


# ---- in the scheduler ----------------------------------------------------------------------------------------------------------


def _world(**changes: float) -> World:
    overload = OverloadConfig(**{"queue_delay_s": 2.0, "hold_s": 1.0, "recovery_s": 1.0, **changes})  # type: ignore[arg-type]
    return World(SchedulerConfig(max_num_seqs=2, policy="priority", overload=overload), description(num_blocks=64))


def _stage_changes(world: World) -> list[tuple[int, int]]:
    return [(effect.before, effect.after) for effect in world.effects if isinstance(effect, OverloadChanged)]


def _overload(world: World, stage: int) -> None:
    """Two long standard requests run, a third waits, and time passes until the stage is reached."""
    for seed in (1, 2, 4):
        world.submit(seed, max_tokens=60)
    world.turn()
    for _ in range(200):
        if world.core.overload_stage == stage:
            return
        world.tick(0.1)
    raise AssertionError(f"stage {stage} was never reached")


def test_stages_are_effects_counted_and_undone_when_nothing_waits_any_more() -> None:
    world = _world()
    _overload(world, 3)
    assert _stage_changes(world) == [(0, 1), (1, 2), (2, 3)]
    assert world.core.overload_why.startswith("the standard lane waits")
    world.drain()
    assert _stage_changes(world) == [(0, 1), (1, 2), (2, 3), (3, 2), (2, 1), (1, 0)]
    assert world.core.counters.overload_changes == 6
    assert (world.core.overload_stage, world.core.overload_why) == (Stage.NORMAL, "")
    assert world.core.next_wakeup_s() is None
    world.check_idle()


def test_stage_2_admits_nobody_of_the_batch_lane_and_lets_it_run_again() -> None:
    world = _world()
    _overload(world, 2)
    world.submit(5, lane=Lane.BATCH)
    world.submit(7, lane=Lane.REAL_TIME)
    assert world.core.wait_reason("r5").startswith("the batch lane is held back: the standard lane waits")
    while world.state("r7") is not State.DONE:
        world.turn()
    assert world.state("r5") is State.WAITING
    world.drain()
    world.check_idle()


def test_what_is_held_back_displaces_nobody() -> None:
    world = _world(hold_s=3.0)
    for seed in (1, 2):
        world.submit(seed, lane=Lane.BATCH, max_tokens=60)
    world.turn()
    world.submit(4)
    while world.core.overload_stage < 1:
        world.tick(0.1)
    world.cancel("r4")
    world.submit(5, lane=Lane.BATCH, priority=9, max_tokens=4)
    for _ in range(5):
        world.turn()
    assert [world.state(f"r{seed}") for seed in (1, 2, 5)] == [State.DECODE, State.DECODE, State.WAITING]
    world.drain()
    world.check_idle()


def test_stage_1_gives_the_batch_lane_what_is_left_one_batch_after_another() -> None:
    world = _world(hold_s=3.0)
    _overload(world, 1)
    for seed in (5, 7, 8):
        world.submit(seed, lane=Lane.BATCH, max_tokens=4)
    world.cancel("r4")
    for seed in (1, 2):
        world.cancel(f"r{seed}")
    world.turn()
    assert [world.state(f"r{seed}") for seed in (5, 7, 8)] == [State.WAITING] * 3, "others were seen waiting a moment ago"
    world.tick(0.2)
    world.turn()
    assert world.core.overload_stage == 1
    assert [world.state(f"r{seed}") for seed in (5, 7, 8)] == [State.DECODE, State.DECODE, State.WAITING]
    world.cancel("r5")
    world.turn()
    world.turn()
    assert world.state("r8") is State.WAITING, "the batch has not ended"
    world.drain()
    world.check_idle()


def test_who_waits_for_something_else_than_room_is_no_overload() -> None:
    world = _world()
    world.limit(a=Quota(max_num_seqs=0))
    world.submit(1, tenant="a")
    for _ in range(100):
        world.tick(0.1)
        world.turn()
    world.pause()
    world.submit(2)
    for _ in range(100):
        world.tick(0.1)
    world.resume()
    world.turn()
    world.drain_executor()
    world.submit(5)
    for _ in range(100):
        world.tick(0.1)
    world.undrain_executor()
    world.turn()
    world.lose()
    world.submit(4)
    for _ in range(100):
        world.tick(0.1)
    assert _stage_changes(world) == []


def _only_new_waits_count(world: World) -> None:
    """Two run and somebody waits, let go just now: nothing happens until it has waited for room as long as the mark says."""
    assert world.core.num_waiting == 1
    for _ in range(25):
        world.tick(0.1)
    assert _stage_changes(world) == []
    for _ in range(10):
        world.tick(0.1)
    assert _stage_changes(world) == [(0, 1)], "the mark is 2 s, and it is held for 1 s"


def test_a_wait_counts_from_when_the_queue_was_resumed() -> None:
    world = _world()
    for seed in (1, 2, 4):
        world.submit(seed, max_tokens=60)
    world.turn()
    world.pause()
    world.tick(60.0)
    world.resume()
    _only_new_waits_count(world)


def test_a_wait_counts_from_when_an_executor_came() -> None:
    world = _world()
    world.lose()
    for seed in (1, 2, 4):
        world.submit(seed, max_tokens=60)
    world.tick(60.0)
    world.rejoin()
    world.turn()
    _only_new_waits_count(world)


def test_a_wait_counts_from_when_an_executor_was_drained_no_more() -> None:
    world = _world()
    world.drain_executor()
    for seed in (1, 2, 4):
        world.submit(seed, max_tokens=60)
    world.tick(60.0)
    world.undrain_executor()
    world.turn()
    _only_new_waits_count(world)


@pytest.mark.parametrize("let_go", ["by a higher quota", "by the end of one"])
def test_a_wait_counts_from_when_its_tenant_was_within_its_quota(let_go: str) -> None:
    world = _world()
    world.limit(a=Quota(max_num_seqs=1))
    for seed in (1, 4):
        world.submit(seed, tenant="a", max_tokens=60)
    world.submit(2, max_tokens=60)
    world.turn()
    world.tick(60.0)
    if let_go == "by a higher quota":
        world.limit(a=Quota())
    else:
        world.cancel("r1")
        world.submit(5, priority=1, max_tokens=60)
        world.turn()
        assert world.state("r5") is State.DECODE
    _only_new_waits_count(world)


def test_a_wait_counts_from_when_its_tenant_had_tokens_again() -> None:
    world = _world()
    world.limit(a=Quota(max_tokens_per_s=1))
    world.submit(1, tenant="a", prompt=30, max_tokens=2)
    world.turn()
    world.turn()
    for seed in (2, 5):
        world.submit(seed, max_tokens=60)
    world.submit(4, tenant="a")
    world.turn()
    world.turn()
    assert world.core.wait_reason("r4").startswith("tenant a has used up")
    world.tick(0.1)
    world.tick(world.core.tokens_ready_s("a", world.now_s) - world.now_s)
    _only_new_waits_count(world)


def test_who_waits_for_another_model_s_executor_is_no_overload() -> None:
    world = _world()
    world.submit(1, max_tokens=60)
    world.submit(2, model="elsewhere")
    world.turn()
    for _ in range(100):
        world.tick(0.1)
    assert _stage_changes(world) == []


def test_a_rate_from_before_a_pause_foresees_nothing() -> None:
    """Five short ones run before a pause, and as many after it that take no time to drain, by any rate but a decayed one."""
    world = _world(queue_delay_s=20.0, hold_s=0.1)
    for seed in (1, 2, 4, 5):
        world.submit(seed)
    for _ in range(20):
        world.turn()
    world.pause()
    for seed in (7, 8, 10, 11):
        world.submit(seed, max_tokens=60)
    world.tick(60.0)
    world.resume()
    for _ in range(30):
        world.tick(0.1)
        world.turn()
    assert world.core.num_waiting
    assert _stage_changes(world) == []


def test_blocks_of_an_executor_that_admits_nobody_relieve_no_other() -> None:
    """One is drained and has all its blocks free; on the other all are promised, and somebody waits."""
    config = SchedulerConfig(max_num_seqs=4, overload=OverloadConfig(queue_delay_s=60.0, hold_s=1.0), admission="never-evict")
    world = World(config, description("x", num_blocks=64), description("y", num_blocks=16))
    world.drain_executor("x")
    for seed in (1, 2):
        world.submit(seed, prompt=4, max_tokens=60)
    world.turn("y")
    assert world.core.num_waiting == 1
    for _ in range(15):
        world.tick(0.1)
    assert world.core.overload_why.startswith("share of KV blocks promised 1,")
