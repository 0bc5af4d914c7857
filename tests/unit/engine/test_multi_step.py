"""Plans of several steps: how far they go, what stops them, and in which order their tokens are told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
from tokenmill.executor.v1 import executor_pb2 as pb
from tokenmill_executor.engine import Engine
from tokenmill_executor.interrupt import Interrupt
from tokenmill_executor.records import Admission, Plan, Result, SequenceFault, SequenceFinish

from tests.fakes.calls import eventually
from tests.fakes.runner import NOT_A_NUMBER, POISON, OracleRunner
from tests.unit.engine.conftest import Start
from tests.unit.engine.plans import admission, oracle_output
from tests.unit.engine.scheduler import admission as message

NONE, LENGTH = SequenceFinish.NONE, SequenceFinish.LENGTH


@pytest.fixture(params=[(1, 0), (3, 0), (9, 0), (9, 1)], ids=["step by step", "three at once", "nine at once", "heard late"])
def runner(request: pytest.FixtureRequest) -> OracleRunner:
    """One that comes back to the engine for each step, or after several, or goes on beyond what ends a sequence."""
    steps_at_once, late = request.param
    return OracleRunner(steps_at_once=steps_at_once, late=late)


@pytest.fixture
def made(runner: OracleRunner) -> Engine:
    return Engine(runner, 16, 4, 8)


def carry_out(
    engine: Engine,
    number: int,
    advance: dict[int, int],
    max_steps: int,
    admit: Sequence[Admission] = (),
    interrupt: Interrupt | None = None,
) -> Result:
    result = engine.carry_out(Plan(7, number, (), admit, list(advance), list(advance.values()), max_steps), interrupt)
    engine.check()
    return result


def test_decodes_go_on_step_by_step_and_tell_each_sequence_its_tokens_side_by_side(made: Engine) -> None:
    first = carry_out(made, 1, {1: 9, 2: 9}, 1, [admission(1, [5, 6]), admission(2, [7])])
    result = carry_out(made, 2, {1: 4, 2: 4}, 4)
    assert (first.num_steps, result.num_steps) == (1, 4)
    assert (result.num_computed, result.num_sampled, result.finishes) == ([4, 4], [4, 4], [NONE, NONE])
    assert result.token_ids == [*oracle_output([5, 6], 5)[1:], *oracle_output([7], 5)[1:]]


def test_log_probabilities_keep_to_their_tokens(made: Engine) -> None:
    carry_out(made, 1, {1: 1, 2: 1, 3: 1}, 1, [admission(1, [5], logprobs=0), admission(2, [6]), admission(3, [7], logprobs=2)])
    result = carry_out(made, 2, {1: 3, 2: 3, 3: 3}, 3)
    asked = [*result.token_ids[:3], *result.token_ids[6:]]
    assert [entry.logprob for entry in result.logprobs] == [-token for token in asked]
    assert [len(entry.top) for entry in result.logprobs] == [0, 0, 0, 2, 2, 2]


def test_a_sequence_that_ends_leaves_the_others_going_on(made: Engine) -> None:
    carry_out(made, 1, {1: 1, 2: 1}, 1, [admission(1, [5], max_tokens=3), admission(2, [6])])
    result = carry_out(made, 2, {1: 5, 2: 5}, 5)
    assert (result.num_steps, result.num_sampled, result.finishes) == (5, [2, 5], [LENGTH, NONE])
    assert result.token_ids == [*oracle_output([5], 3)[1:], *oracle_output([6], 6)[1:]]
    assert result.blocks.held == 2


def test_steps_end_with_the_last_sequence(made: Engine) -> None:
    carry_out(made, 1, {1: 1}, 1, [admission(1, [5], max_tokens=3)])
    result = carry_out(made, 2, {1: 8}, 8)
    assert (result.num_steps, result.finishes) == (2, [LENGTH])


def test_each_goes_as_far_as_the_plan_allows_it(made: Engine) -> None:
    carry_out(made, 1, {1: 1, 2: 1}, 1, [admission(1, [5]), admission(2, [6])])
    result = carry_out(made, 2, {1: 2, 2: 4}, 4)
    assert result.num_computed == [2, 4]


def test_the_first_step_may_be_of_a_prompt_and_a_chunk_that_does_not_sample_stays_where_it_is(made: Engine) -> None:
    result = carry_out(made, 1, {1: 5, 2: 5}, 3, [admission(1, [1, 2, 3]), admission(2, [4] * 9)])
    # Two tokens are left to the first beyond its prompt; the second is in the middle of its own.
    assert (result.num_computed, result.num_sampled, result.num_steps) == ([5, 5], [3, 0], 3)
    assert result.token_ids == oracle_output([1, 2, 3], 3)


def test_nothing_is_begun_once_something_waits(made: Engine, runner: OracleRunner) -> None:
    interrupt = Interrupt()
    carry_out(made, 1, {1: 1}, 1, [admission(1, [5])])
    runner.on_step = lambda number: interrupt.ask() if number == 4 else None
    result = carry_out(made, 2, {1: 6}, 6, interrupt=interrupt)
    assert (result.num_steps, result.token_ids) == (3 + runner.late, oracle_output([5], 4 + runner.late)[1:])
    interrupt.heed()
    assert carry_out(made, 3, {1: 1}, 1).token_ids == oracle_output([5], 5 + runner.late)[-1:]


def test_a_stop_token_ends_a_sequence_in_mid_run_and_what_is_computed_beyond_it_is_not_told(made: Engine) -> None:
    stop = oracle_output([5], 3)[2]
    admissions = [admission(1, [5], stop_token_ids=(stop,), max_tokens=20), admission(2, [6], max_tokens=20)]
    carry_out(made, 1, {1: 1, 2: 1}, 1, admissions)
    result = carry_out(made, 2, {1: 9, 2: 9}, 9)
    assert (result.num_computed, result.num_sampled, result.finishes) == ([2, 9], [2, 9], [SequenceFinish.STOP, NONE])
    assert result.token_ids == [*oracle_output([5], 3)[1:], *oracle_output([6], 10)[1:]]
    assert result.blocks.held == 3


def test_blocks_taken_for_steps_that_do_not_come_go_back(made: Engine, runner: OracleRunner) -> None:
    interrupt = Interrupt()
    carry_out(made, 1, {1: 3}, 1, [admission(1, [5, 6, 7], max_tokens=30)])
    runner.on_step = lambda _: interrupt.ask()
    assert carry_out(made, 2, {1: 9}, 9, interrupt=interrupt).blocks.held == 1 + runner.late


def test_blocks_that_run_short_in_a_later_step_are_that_sequences_fault_and_keep_its_tokens(runner: OracleRunner) -> None:
    made = Engine(runner, 3, 4, 8)
    carry_out(made, 1, {1: 3, 2: 3}, 1, [admission(1, [5, 6, 7]), admission(2, [7, 8, 9])])
    result = carry_out(made, 2, {1: 4, 2: 4}, 4)
    assert (result.num_sampled, result.num_steps) == ([4, 1], 4)
    assert [(fault.sequence_id, fault.fault) for fault in result.faults] == [(2, SequenceFault.NO_BLOCKS)]
    assert result.token_ids == [*oracle_output([5, 6, 7], 5)[1:], *oracle_output([7, 8, 9], 2)[1:]]


@pytest.mark.parametrize("bad", [POISON, NOT_A_NUMBER])
def test_a_step_that_fails_for_one_sequence_goes_on_for_the_others(runner: OracleRunner, bad: int) -> None:
    """Whether it raises, and is done again in parts, or says which logits are not numbers."""
    runner.script = {1: [7, bad, 8, 9]}
    made = Engine(runner, 16, 4, 8)
    carry_out(made, 1, {1: 1, 2: 1}, 1, [admission(1, [5]), admission(2, [6])])
    result = carry_out(made, 2, {1: 3, 2: 3}, 3)
    assert (result.num_sampled, result.token_ids) == ([1, 3], [bad, *oracle_output([6], 4)[1:]])
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
