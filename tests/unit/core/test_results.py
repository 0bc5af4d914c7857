"""What a result leads to: effects and their order, text stops, log probabilities, figures."""

from __future__ import annotations

from dataclasses import replace

from tokenmill_scheduler.core.effects import TokensGenerated, Transitioned
from tokenmill_scheduler.core.events import TextStop
from tokenmill_scheduler.core.plans import TokenLogprobs
from tokenmill_scheduler.core.request import FinishReason, State
from tokenmill_scheduler.core.scheduler import SchedulerConfig

from tests.simulation import oracle
from tests.simulation.world import World, description


def test_tokens_come_before_the_transitions_of_the_same_result_in_the_order_of_the_plan() -> None:
    world = World(None, description())
    world.submit(1, max_tokens=1)
    world.submit(2, max_tokens=2)
    world.plan()
    world.step()
    first, second = oracle.token(1, 0), oracle.token(2, 0)
    assert world.deliver() == [
        TokensGenerated(("r1", "r2"), (0, 0), (1, 1), (first, second), world.now_s),
        Transitioned("r1", State.PREFILL, State.DONE, world.now_s, "", "x", FinishReason.LENGTH),
        Transitioned("r2", State.PREFILL, State.DECODE, world.now_s, "", "x"),
    ]


def test_c60_tokens_after_a_text_stop_are_in_no_record_and_the_sequence_is_released() -> None:
    world = World(None, description())
    world.submit(1, max_tokens=50)
    world.turn()
    world.plan()
    world.plan()
    world.step()
    world.deliver(text_stops={1: TextStop(keep=1)})
    ended = world.records["r1"].ended
    assert ended is not None
    assert (ended.after, ended.finish_reason) == (State.DONE, FinishReason.STOP)
    world.step()
    assert world.deliver() == []
    assert world.output("r1") == world.expected("r1")[:2]
    assert world.core.counters.output_tokens == 2
    release = world.turn()
    assert release is not None
    assert release.release == (1,)
    world.check_idle()


def test_c58_a_text_stop_may_keep_none_of_the_tokens_and_beats_the_length_limit() -> None:
    world = World(None, description())
    world.submit(1, max_tokens=1)
    world.plan()
    world.step()
    world.deliver(text_stops={1: TextStop(keep=0)})
    ended = world.records["r1"].ended
    assert ended is not None
    assert ended.finish_reason is FinishReason.STOP
    assert world.output("r1") == []
    assert world.plan() is None, "the executor has finished it by itself: no release"
    world.check_idle()


def test_a_text_stop_ends_a_preempted_request() -> None:
    world = World(SchedulerConfig(max_num_seqs=1, policy="priority"), description())
    world.submit(1)
    world.plan()
    world.submit(2, priority=1)
    world.plan()
    world.step()
    assert world.core.owner("x", 1) == "r1"
    world.deliver(text_stops={1: TextStop(keep=1)})
    assert world.records["r1"].path == "waiting prefill preempted done"
    world.drain()
    world.check_idle()


def test_log_probabilities_go_to_their_request_and_are_cut_with_the_tokens() -> None:
    world = World(None, description())
    for seed in (1, 2, 4):
        world.submit(seed)
    world.plan()
    result = world.step()
    asked = {1: (TokenLogprobs(-0.5),), 2: (TokenLogprobs(-1.5),)}
    world.arriving["x"][0] = replace(result, logprobs=asked)
    tokens = world.deliver(text_stops={3: TextStop(keep=0)})[0]
    assert isinstance(tokens, TokensGenerated)
    assert tokens.request_ids == ("r1", "r2")
    assert tokens.logprobs == {"r2": (TokenLogprobs(-0.5),)}


def test_owner_knows_running_and_preempted_sequences_and_none_that_ended() -> None:
    world = World(None, description())
    world.submit(1, max_tokens=2)
    assert world.core.owner("x", 1) is None
    assert world.core.owner("nobody", 1) is None
    world.plan()
    assert world.core.owner("x", 1) == "r1"
    world.drain()
    assert world.core.owner("x", 1) is None


def test_c68_c70_figures() -> None:
    world = World(SchedulerConfig(max_num_seqs=2), description(num_blocks=10))
    for seed in (1, 2, 4):
        world.submit(seed, prompt=5, max_tokens=3)
    world.turn()
    assert (world.core.num_running, world.core.num_waiting) == (2, 1)
    assert world.core.kv_cache_usage == 0.4, "two sequences of two blocks, of ten"
    world.drain()
    counters = world.core.counters
    assert (counters.prompt_tokens, counters.output_tokens, counters.preemptions) == (15, 9, 0)
    assert counters.steps == len(world.plans)
    advanced = sum(len(plan.advance_sequence_ids) for plan in world.plans)
    assert counters.occupancy_sum == advanced / 2
    world.check_idle()


def test_c68_after_cancelling_everything_all_gauges_are_zero_within_a_step() -> None:
    world = World(SchedulerConfig(max_num_seqs=2), description())
    for seed in (1, 2, 4, 5):
        world.submit(seed)
    world.turn()
    for request_id in world.records:
        world.cancel(request_id)
    world.turn()
    world.check_idle()


def test_wait_reason_is_empty_for_what_does_not_wait() -> None:
    world = World(SchedulerConfig(max_num_batched_tokens=4), description())
    world.submit(1)
    world.submit(2)
    world.plan()
    assert world.core.wait_reason("r1") == ""
    assert world.core.wait_reason("unknown") == ""
    assert world.core.wait_reason("r2") == "others are before it in the queue"
    assert (world.core.state("r1"), world.core.state("unknown")) == (State.PREFILL, None)
