"""Layers with sliding windows: what their blocks coming back means for who fits, who is given up and who waits."""

from __future__ import annotations

import pytest
from tokenmill_scheduler.core.forecast import Forecast
from tokenmill_scheduler.core.plans import BlockGroup
from tokenmill_scheduler.core.request import FinishReason, State
from tokenmill_scheduler.core.scheduler import SchedulerConfig

from tests.simulation import oracle
from tests.simulation.world import World, description

FULL = BlockGroup()


def test_a_long_prompt_books_its_window_and_the_chunks_on_their_way() -> None:
    forecast = Forecast(16, 1000, (BlockGroup(512),), depth=2, step_tokens=64)
    # 511 positions before the first of 128 on their way touch at most 41 blocks.
    assert (forecast.blocks(32_768), forecast.blocks(100)) == (41, 7)
    assert forecast.least(32_768) == 33
    mixed = Forecast(16, 1000, (FULL, BlockGroup(512), BlockGroup(512, 20)), depth=2, step_tokens=64)
    assert mixed.blocks(32_768) == 2048 + 41 + 43


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_of_32k_tokens_runs_in_few_blocks_beside_others(overlap: bool) -> None:
    executor = description(
        block_size=16, num_blocks=60, max_model_len=40_000, max_num_batched_tokens=64, groups=(BlockGroup(512, 4),)
    )
    world = World(None, executor, overlap=overlap)
    world.submit(1, prompt=32_768, max_tokens=5)
    for seed in (2, 4):
        world.submit(seed, prompt=30, max_tokens=40)
    world.drain()
    world.check_idle()
    assert world.core.counters.preemptions == 0
    assert all(world.output(r) == world.expected(r) for r in world.records)


@pytest.mark.parametrize("overlap", [False, True])
def test_decodes_go_on_for_ever_in_the_blocks_that_windows_take(overlap: bool) -> None:
    """Two sequences of 80 tokens in a pool of 6 blocks of 4: each keeps 3 at most."""
    world = World(SchedulerConfig(watermark=0.0), description(num_blocks=6, groups=(BlockGroup(5),)), overlap=overlap)
    for seed in (1, 2):
        world.submit(seed, prompt=4, max_tokens=80)
    world.drain()
    world.check_idle()
    assert world.core.counters.preemptions == 0
    assert all(world.output(r) == world.expected(r) for r in world.records)


def test_c18_one_request_alone_outgrows_the_pool_where_a_layer_sees_all() -> None:
    world = World(None, description(num_blocks=8, groups=(FULL, BlockGroup(4))))
    world.submit(1, prompt=4, max_tokens=100)
    world.submit(2, prompt=4, max_tokens=6)
    world.drain()
    world.check_idle()
    failed = world.records["r1"].ended
    assert failed is not None
    assert (failed.after, failed.finish_reason, failed.error_code) == (State.FAILED, FinishReason.ERROR, 8)
    kept = len(world.output("r1"))
    assert world.output("r1") == world.expected("r1")[:kept]
    assert kept >= 21, "6 blocks of all its tokens, beside 2 of the window"
    assert world.output("r2") == world.expected("r2")


def test_c18_nothing_outgrows_a_pool_that_holds_its_windows() -> None:
    world = World(None, description(num_blocks=4, groups=(BlockGroup(6),)))
    world.submit(1, prompt=50, max_tokens=100)
    world.drain()
    world.check_idle()
    assert world.output("r1") == world.expected("r1")


@pytest.mark.parametrize("overlap", [False, True])
def test_c22_overshoot_after_eos_is_dropped_and_blocks_wait_for_the_plan_that_is_out_with_windows(overlap: bool) -> None:
    world = World(None, description(num_blocks=2, groups=(BlockGroup(3),)), overlap=overlap)
    world.submit(33, prompt=4)
    world.plan()
    overshoot = world.plan()
    assert overshoot is not None
    assert overshoot.advance_sequence_ids == (1,)
    world.submit(1, prompt=3, max_tokens=2)
    world.step()
    world.deliver()
    assert world.state("r33") is State.DONE
    if overlap:
        assert world.plan() is None, "the plan that is out may take the one block that the result shows as free"
    world.step()
    world.deliver()
    world.drain()
    world.check_idle()
    assert world.output("r33") == [oracle.EOS]
    assert world.output("r1") == world.expected("r1")
    assert world.core.counters.stale_results == 0
