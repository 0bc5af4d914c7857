"""Blocks: forecast, preemption, overshoot, and pools that are too small."""

from __future__ import annotations

import pytest
from tokenmill_scheduler.core.plans import FULL_ATTENTION, BlockGroup, SequenceFault
from tokenmill_scheduler.core.request import FinishReason, State
from tokenmill_scheduler.core.scheduler import SchedulerConfig

from tests.simulation import oracle
from tests.simulation.world import World, description


def _free(world: World) -> int:
    return world.core.executors()[0].free_blocks


@pytest.mark.parametrize(
    ("num_blocks", "groups"), [(6, FULL_ATTENTION), (12, (BlockGroup(), BlockGroup(9)))], ids=["full", "windows"]
)
def test_c17_all_victims_have_work_in_flight_and_one_alone_is_chosen(num_blocks: int, groups: tuple[BlockGroup, ...]) -> None:
    """With windows, each of three needs a block of both groups, and none has left one behind yet."""
    world = World(None, description(num_blocks=num_blocks, groups=groups))
    for seed in (1, 2, 4):
        world.submit(seed, prompt=7, max_tokens=6)
    world.plan()
    world.plan()
    world.step()
    world.deliver()

    release = world.plan()

    assert release is not None
    assert (release.release, release.advance_sequence_ids) == ((3,), ())
    world.step()
    world.deliver()
    assert world.plan() is None, "its blocks are on their way: nobody else is chosen"
    assert world.core.counters.preemptions == 1
    world.step()
    world.deliver()
    resumed = world.plan()
    assert resumed is not None
    assert resumed.advance_sequence_ids == (1, 2)
    world.drain()
    world.check_idle()
    assert all(world.output(r) == world.expected(r) for r in world.records)


def test_c17_no_victim_while_a_sequence_certain_to_end_brings_blocks_back() -> None:
    world = World(None, description(num_blocks=4))
    world.submit(1, prompt=7, max_tokens=9)
    world.submit(2, prompt=7, max_tokens=2)
    world.drain()
    world.check_idle()
    assert world.core.counters.preemptions == 0


@pytest.mark.parametrize("pipelined", [True, False])
def test_c18_one_request_alone_outgrows_the_pool(pipelined: bool) -> None:
    world = World(None, description(num_blocks=4))
    world.submit(1, prompt=4, max_tokens=100)
    world.submit(2, prompt=4, max_tokens=6)
    if not pipelined:
        while world.turn():
            pass
    world.drain()
    world.check_idle()
    failed = world.records["r1"].ended
    assert failed is not None
    assert (failed.after, failed.finish_reason, failed.error_code) == (State.FAILED, FinishReason.ERROR, 8)
    assert "17 tokens" in failed.error
    assert world.output("r1") == world.expected("r1")[:13], "all that 16 positions can give"
    assert world.output("r2") == world.expected("r2")


def test_c18_a_request_that_fits_the_pool_exactly_is_done() -> None:
    world = World(SchedulerConfig(watermark=0.5), description(num_blocks=4))
    world.submit(1, prompt=4, max_tokens=13)
    world.submit(2, prompt=16, max_tokens=1)
    world.drain()
    world.check_idle()
    assert [world.state(r) for r in ("r1", "r2")] == [State.DONE, State.DONE]


def test_c18_it_moves_to_a_larger_executor_if_there_is_one() -> None:
    world = World(None, description("x", num_blocks=4), description("y", num_blocks=16))
    world.submit(1, prompt=4, max_tokens=30)
    world.drain()
    world.check_idle()
    assert world.output("r1") == world.expected("r1")
    assert [t.executor for t in world.records["r1"].transitions if t.after is State.PREFILL] == ["x", "y"]


def test_a_prompt_larger_than_any_pool_fails_and_the_next_runs() -> None:
    world = World(None, description(num_blocks=4))
    world.submit(1, prompt=17)
    world.submit(2)
    world.drain()
    world.check_idle()
    ended = world.records["r1"].ended
    assert ended is not None
    assert ended.error_code == 8
    assert world.records["r1"].path == "waiting failed"
    assert world.state("r2") is State.DONE


def test_c19_a_preemption_after_five_tokens_leaves_the_output_as_it_would_have_been() -> None:
    world = World(SchedulerConfig(max_num_seqs=1, policy="priority"), description())
    world.submit(1, max_tokens=20)
    while len(world.output("r1")) < 5:
        world.turn()
    world.submit(2, priority=1)
    world.drain()
    assert world.records["r1"].path == "waiting prefill decode preempted prefill decode done"
    assert world.output("r1") == world.expected("r1")


@pytest.mark.parametrize("overlap", [True, False])
def test_c22_overshoot_after_eos_is_dropped_and_blocks_wait_for_the_plan_that_is_out(overlap: bool) -> None:
    world = World(None, description(num_blocks=2), overlap=overlap)
    world.submit(33, prompt=4)
    world.plan()
    overshoot = world.plan()
    assert overshoot is not None
    assert overshoot.advance_sequence_ids == (1,)
    world.submit(1, prompt=3, max_tokens=2)
    world.step()
    world.deliver()
    assert world.state("r33") is State.DONE
    assert world.core.owner("x", 1) is None
    if overlap:
        assert world.plan() is None, "the plan that is out may take the one block that the result shows as free"
    world.step()
    world.deliver()
    world.drain()
    world.check_idle()
    assert world.output("r33") == [oracle.EOS]
    assert world.output("r1") == world.expected("r1")
    assert world.core.counters.stale_results == 0


def test_a_preempted_sequence_keeps_the_token_of_the_plan_that_is_out_even_if_it_is_the_last() -> None:
    world = World(SchedulerConfig(max_num_seqs=1, policy="priority"), description())
    world.submit(33, prompt=4)
    world.plan()
    world.submit(2, priority=1)
    world.plan()
    assert world.state("r33") is State.PREEMPTED
    assert world.core.wait_reason("r33") == "its blocks are being released"
    world.step()
    world.deliver()
    assert world.records["r33"].path == "waiting prefill preempted done"
    assert world.output("r33") == [oracle.EOS]
    world.drain()
    world.check_idle()


def test_a_preempted_sequence_is_admitted_again_only_after_its_last_plan_has_returned() -> None:
    world = World(SchedulerConfig(max_num_seqs=1, policy="priority"), description())
    world.submit(1)
    world.plan()
    world.submit(2, priority=1, max_tokens=1)
    world.plan()
    world.cancel("r2")
    world.step()
    assert world.plan() is None
    world.deliver()
    again = world.plan()
    assert again is not None
    assert [(a.sequence_id, len(a.token_ids)) for a in again.admit] == [(3, 5)]


def test_it_is_not_admitted_again_either_while_the_pipeline_has_room() -> None:
    world = World(SchedulerConfig(max_num_seqs=1, policy="priority"), description(pipeline_depth=4))
    world.submit(1)
    world.plan()
    world.submit(2, priority=1, max_tokens=1)
    world.plan()
    assert world.plan() is None, "the slot is free, and the request is still being released"
    assert world.core.wait_reason("r1") == "its blocks are being released"
    world.drain()
    world.check_idle()
    assert world.output("r1") == world.expected("r1")


def test_no_blocks_preempts_that_sequence_alone_and_is_counted() -> None:
    world = World(None, description())
    world.submit(1)
    world.submit(2)
    world.turn()
    world.executors["x"].inject[1] = SequenceFault.NO_BLOCKS
    world.turn()
    assert (world.state("r1"), world.state("r2")) == (State.PREEMPTED, State.DECODE)
    assert world.core.counters.no_blocks == 1
    world.drain()
    world.check_idle()
    assert all(world.output(r) == world.expected(r) for r in world.records)


def test_a_request_that_an_executor_never_has_blocks_for_fails_alone_with_its_tokens() -> None:
    world = World(SchedulerConfig(max_no_blocks=3), description())
    world.submit(1)
    world.submit(2)
    world.turn()
    for _ in range(20):
        world.executors["x"].inject[1] = SequenceFault.NO_BLOCKS
        world.turn()
    world.executors["x"].inject.clear()
    world.drain()
    world.check_idle()
    ended = world.records["r1"].ended
    assert ended is not None
    assert (ended.after, ended.error_code) == (State.FAILED, 8)
    assert ended.error.startswith("the executor had no free KV block, 3 times in a row")
    assert world.core.counters.no_blocks == 3
    assert world.output("r1") == world.expected("r1")[:1]
    assert world.state("r2") is State.DONE


def test_a_token_between_begins_the_count_of_no_blocks_anew() -> None:
    world = World(SchedulerConfig(max_no_blocks=3), description())
    world.submit(1, max_tokens=9)
    world.turn()
    while world.unfinished:
        for _ in range(2):
            world.executors["x"].inject[1] = SequenceFault.NO_BLOCKS
            world.turn()
        world.turn()
    assert world.core.counters.no_blocks > 3
    assert world.output("r1") == world.expected("r1")
    world.drain()
    world.check_idle()


def test_too_long_fails_that_request_and_keeps_its_tokens() -> None:
    world = World(None, description())
    world.submit(1)
    world.turn()
    world.executors["x"].inject[1] = SequenceFault.TOO_LONG
    world.drain()
    world.check_idle()
    ended = world.records["r1"].ended
    assert ended is not None
    assert (ended.after, ended.error_code) == (State.FAILED, 8)
    assert world.output("r1") == world.expected("r1")[:1]


def test_admission_books_all_known_tokens_and_the_next_at_once() -> None:
    world = World(SchedulerConfig(max_num_batched_tokens=4), description(num_blocks=10))
    world.submit(1, prompt=16)
    world.plan()
    assert _free(world) == 5, "4 blocks for the prompt and one for the token after it, though one block's worth is planned"


def test_the_watermark_keeps_blocks_from_admissions_only_while_something_runs() -> None:
    world = World(SchedulerConfig(watermark=0.25), description(num_blocks=8))
    world.submit(1, prompt=15, max_tokens=4)
    world.submit(2, prompt=11, max_tokens=4)
    world.turn()
    assert world.state("r2") is State.WAITING, "4 blocks are free, 2 of them kept back"
    world.drain()
    world.submit(4, prompt=30, max_tokens=2)
    world.drain()
    world.check_idle()
    assert world.state("r4") is State.DONE


def test_c28_chunked_and_preempted_gives_the_tokens_of_one_shot() -> None:
    world = World(SchedulerConfig(max_num_batched_tokens=3, policy="priority", max_num_seqs=1), description())
    world.submit(1, prompt=10, max_tokens=9)
    world.turn()
    world.turn()
    world.submit(2, prompt=2, max_tokens=1, priority=1)
    world.drain()
    world.check_idle()
    chunks = [plan.advance_max_tokens for plan in world.plans[:2]]
    assert chunks == [(3,), (3,)]
    assert world.records["r1"].path == "waiting prefill preempted prefill decode done"
    assert world.output("r1") == world.expected("r1")


def test_max_model_len_ends_a_request_as_length() -> None:
    world = World(None, description(max_model_len=12))
    world.submit(1, prompt=8, max_tokens=100)
    world.drain()
    world.check_idle()
    ended = world.records["r1"].ended
    assert ended is not None
    assert ended.finish_reason is FinishReason.LENGTH
    assert len(world.output("r1")) == 4
