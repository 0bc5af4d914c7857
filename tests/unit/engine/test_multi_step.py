"""Plans of several steps: how far they go, what stops them, and in which order their tokens are told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest
from tokenmill.executor.v1 import executor_pb2 as pb
from tokenmill_executor.engine import Engine
from tokenmill_executor.records import Admission, Plan, Result, SequenceFault, SequenceFinish

from tests.fakes.calls import eventually
from tests.fakes.runner import POISON, OracleRunner
from tests.unit.engine.conftest import Start
from tests.unit.engine.plans import admission, oracle_output
from tests.unit.engine.scheduler import admission as message

NONE, LENGTH = SequenceFinish.NONE, SequenceFinish.LENGTH


def engine(runner: OracleRunner | None = None, num_blocks: int = 16) -> Engine:
    return Engine(runner or OracleRunner(), num_blocks, 4, 8)


def carry_out(
    engine: Engine,
    number: int,
    advance: dict[int, int],
    max_steps: int,
    admit: Sequence[Admission] = (),
    awaited: Callable[[], bool] = lambda: False,
) -> Result:
    result = engine.carry_out(Plan(7, number, (), admit, list(advance), list(advance.values()), max_steps), awaited)
    engine.check()
    return result


def test_decodes_go_on_step_by_step_and_tell_each_sequence_its_tokens_side_by_side() -> None:
    made = engine()
    first = carry_out(made, 1, {1: 9, 2: 9}, 1, [admission(1, [5, 6]), admission(2, [7])])
    result = carry_out(made, 2, {1: 4, 2: 4}, 4)
    assert (first.num_steps, result.num_steps) == (1, 4)
    assert (result.num_computed, result.num_sampled, result.finishes) == ([4, 4], [4, 4], [NONE, NONE])
    assert result.token_ids == [*oracle_output([5, 6], 5)[1:], *oracle_output([7], 5)[1:]]


def test_log_probabilities_keep_to_their_tokens() -> None:
    made = engine()
    carry_out(made, 1, {1: 1, 2: 1, 3: 1}, 1, [admission(1, [5], logprobs=0), admission(2, [6]), admission(3, [7], logprobs=2)])
    result = carry_out(made, 2, {1: 3, 2: 3, 3: 3}, 3)
    asked = [*result.token_ids[:3], *result.token_ids[6:]]
    assert [entry.logprob for entry in result.logprobs] == [-token for token in asked]
    assert [len(entry.top) for entry in result.logprobs] == [0, 0, 0, 2, 2, 2]


def test_a_sequence_that_ends_leaves_the_others_going_on() -> None:
    made = engine()
    carry_out(made, 1, {1: 1, 2: 1}, 1, [admission(1, [5], max_tokens=3), admission(2, [6])])
    result = carry_out(made, 2, {1: 5, 2: 5}, 5)
    assert (result.num_steps, result.num_sampled, result.finishes) == (5, [2, 5], [LENGTH, NONE])
    assert result.token_ids == [*oracle_output([5], 3)[1:], *oracle_output([6], 6)[1:]]
    assert result.blocks.held == 2


def test_steps_end_with_the_last_sequence() -> None:
    made = engine()
    carry_out(made, 1, {1: 1}, 1, [admission(1, [5], max_tokens=3)])
    result = carry_out(made, 2, {1: 8}, 8)
    assert (result.num_steps, result.finishes) == (2, [LENGTH])


def test_each_goes_as_far_as_the_plan_allows_it() -> None:
    made = engine()
    carry_out(made, 1, {1: 1, 2: 1}, 1, [admission(1, [5]), admission(2, [6])])
    result = carry_out(made, 2, {1: 2, 2: 4}, 4)
    assert result.num_computed == [2, 4]


def test_the_first_step_may_be_of_a_prompt_and_a_chunk_that_does_not_sample_stays_where_it_is() -> None:
    made = engine()
    result = carry_out(made, 1, {1: 5, 2: 5}, 3, [admission(1, [1, 2, 3]), admission(2, [4] * 9)])
    # Two tokens are left to the first beyond its prompt; the second is in the middle of its own.
    assert (result.num_computed, result.num_sampled, result.num_steps) == ([5, 5], [3, 0], 3)
    assert result.token_ids == oracle_output([1, 2, 3], 3)


def test_nothing_is_begun_once_something_waits() -> None:
    made, runner_steps = engine(), []

    def awaited() -> bool:
        runner_steps.append(1)
        return len(runner_steps) == 3

    carry_out(made, 1, {1: 1}, 1, [admission(1, [5])])
    result = carry_out(made, 2, {1: 6}, 6, awaited=awaited)
    assert (result.num_steps, result.token_ids) == (3, oracle_output([5], 4)[1:])
    assert carry_out(made, 3, {1: 1}, 1).token_ids == oracle_output([5], 5)[4:]


def test_blocks_that_run_short_in_a_later_step_are_that_sequences_fault_and_keep_its_tokens() -> None:
    made = engine(num_blocks=3)
    carry_out(made, 1, {1: 3, 2: 3}, 1, [admission(1, [5, 6, 7]), admission(2, [7, 8, 9])])
    result = carry_out(made, 2, {1: 4, 2: 4}, 4)
    assert (result.num_sampled, result.num_steps) == ([4, 1], 4)
    assert [(fault.sequence_id, fault.fault) for fault in result.faults] == [(2, SequenceFault.NO_BLOCKS)]
    assert result.token_ids == [*oracle_output([5, 6, 7], 5)[1:], *oracle_output([7, 8, 9], 2)[1:]]


def test_a_step_that_fails_for_one_sequence_goes_on_for_the_others() -> None:
    made = engine(OracleRunner(script={1: [7, POISON, 8, 9]}))
    carry_out(made, 1, {1: 1, 2: 1}, 1, [admission(1, [5]), admission(2, [6])])
    result = carry_out(made, 2, {1: 3, 2: 3}, 3)
    assert (result.num_sampled, result.token_ids) == ([1, 3], [POISON, *oracle_output([6], 4)[1:]])
    assert [(fault.sequence_id, fault.fault) for fault in result.faults] == [(1, SequenceFault.ERROR)]


# ---- over gRPC -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("after_all_steps", "steps"), [(False, 1), (True, 50)])
async def test_the_next_plan_ends_one_of_many_steps_after_the_step_in_progress_unless_it_lets_it_finish(
    start: Start, after_all_steps: bool, steps: int
) -> None:
    gate = threading.Event()
    runner = OracleRunner(gate=gate)
    service = await start(runner, "--block-size=4")
    assert "multi_step" in (await service.stub.Describe(pb.DescribeRequest())).features
    scheduler = await service.scheduler(1)
    try:
        await scheduler.send({1: 50}, [message(1, [5], max_tokens=60)], max_steps=50)
        await asyncio.to_thread(runner.stepping.wait, 60)
        await scheduler.send({1: 1}, after_all_steps=after_all_steps)

        async def both_are_here() -> bool:
            return service.server.thread.metrics.plans_queued == 2

        await eventually(both_are_here)
    finally:
        gate.set()
    first, second = await scheduler.result(), await scheduler.result()
    assert (first.num_steps, list(first.num_sampled), second.num_steps) == (steps, [steps], 1)
    assert [*first.token_ids, *second.token_ids] == oracle_output([5], steps + 1)
