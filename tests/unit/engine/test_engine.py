"""What the engine answers to plans, case by case, on a runner that shows crossed slots and tokens."""

from __future__ import annotations

import itertools

import pytest
from tokenmill_executor.engine import Engine
from tokenmill_executor.records import Blocks, SequenceFault, SequenceFinish
from tokenmill_executor.runner import Batch, DeviceLost, StepOutput

from tests.fakes.runner import EOS, NOT_A_NUMBER, POISON, VOCAB_SIZE, OracleRunner
from tests.unit.engine.plans import Driver, admission, oracle_output

NONE, STOP, LENGTH = SequenceFinish.NONE, SequenceFinish.STOP, SequenceFinish.LENGTH


def make(runner: OracleRunner | None = None, num_blocks: int = 16, block_size: int = 4, max_num_seqs: int = 8) -> Driver:
    ticks = itertools.count()
    return Driver(Engine(runner or OracleRunner(), num_blocks, block_size, max_num_seqs, clock=lambda: next(ticks) * 1.0))


def run_alone(driver: Driver, sequence_id: int, count: int) -> list[int]:
    """Advances one sequence, count times by one token."""
    return [token for _ in range(count) for token in driver.plan({sequence_id: 1}).token_ids]


# ---- advancing -----------------------------------------------------------------------------------------------------------------


def test_a_prompt_in_one_step_samples_and_decodes_on_its_own_tokens() -> None:
    driver = make()
    first = driver.plan({1: 100}, [admission(1, [5, 6, 7], max_tokens=4)])
    assert (first.num_computed, first.num_sampled, first.finishes) == ([3], [1], [NONE])
    assert first.blocks == Blocks(free=15, cached=0, held=1)
    assert [*first.token_ids, *run_alone(driver, 1, 3)] == oracle_output([5, 6, 7], 4)


def test_a_chunked_prompt_samples_only_at_its_end() -> None:
    driver = make()
    prompt = list(range(10, 20))
    results = [driver.plan({1: 4}, [admission(1, prompt)]), driver.plan({1: 4}), driver.plan({1: 4})]
    assert [result.num_computed for result in results] == [[4], [4], [2]]
    assert [result.num_sampled for result in results] == [[0], [0], [1]]
    assert results[-1].token_ids == oracle_output(prompt, 1)


def test_prefill_and_decode_mix_in_one_step_in_plan_order() -> None:
    driver = make()
    driver.plan({1: 9}, [admission(1, [1, 2, 3])])
    result = driver.plan({2: 3, 1: 1, 3: 9}, [admission(2, [4] * 6), admission(3, [7, 8])])
    assert result.num_computed == [3, 1, 2]
    assert result.num_sampled == [0, 1, 1]
    assert result.token_ids == [oracle_output([1, 2, 3], 2)[1], oracle_output([7, 8], 1)[0]]


def test_output_made_before_a_preemption_is_recomputed_and_continued() -> None:
    driver = make()
    whole = oracle_output([3, 1, 4], 6)
    result = driver.plan({9: 100}, [admission(9, [3, 1, 4], output=whole[:4], max_tokens=6)])
    assert (result.num_computed, result.token_ids, result.finishes) == ([7], [whole[4]], [NONE])
    last = driver.plan({9: 1})
    assert (last.token_ids, last.finishes) == ([whole[5]], [LENGTH])


def test_an_empty_plan_and_one_of_zero_tokens_step_nothing() -> None:
    runner = OracleRunner()
    driver = make(runner)
    assert driver.plan({}).token_ids == []
    assert driver.plan({1: 0}, [admission(1, [5])]).num_computed == [0]
    assert runner.num_steps == 0


def test_log_probabilities_come_for_those_that_asked_in_token_order() -> None:
    driver = make()
    admissions = [admission(1, [1], logprobs=2), admission(2, [2]), admission(3, [3], logprobs=0)]
    result = driver.plan({3: 1, 2: 1, 1: 1}, admissions)
    assert [entry.logprob for entry in result.logprobs] == [-result.token_ids[0], -result.token_ids[2]]
    assert [len(entry.top) for entry in result.logprobs] == [0, 2]


def test_times_add_up_to_what_the_clock_saw() -> None:
    result = make().plan({1: 9}, [admission(1, [5])])
    assert result.times.forward_s == pytest.approx(0.001)
    assert result.times.sample_s == pytest.approx(0.0005)
    assert result.times.prepare_s == pytest.approx(1.0 - 0.0015)


# ---- endings -------------------------------------------------------------------------------------------------------------------


def test_end_of_sequence_and_stop_tokens_end_with_stop() -> None:
    driver = make(OracleRunner(script={1: [50, EOS], 2: [50, 77], 3: [50, EOS]}))
    admissions = [admission(1, [1]), admission(2, [2], stop_token_ids=(77,)), admission(3, [3], ignore_eos=True)]
    assert driver.plan({1: 1, 2: 1, 3: 1}, admissions).finishes == [NONE, NONE, NONE]
    result = driver.plan({1: 1, 2: 1, 3: 1})
    assert result.finishes == [STOP, STOP, NONE]
    assert result.token_ids == [EOS, 77, EOS]
    assert result.blocks == Blocks(free=15, cached=0, held=1)


def test_c63_end_of_sequence_as_the_last_allowed_token_counts_as_stop() -> None:
    driver = make(OracleRunner(script={1: [50, EOS], 2: [50, 51], 3: [60]}))
    driver.plan({1: 1, 2: 1}, [admission(1, [1], max_tokens=2), admission(2, [2], max_tokens=2)])
    assert driver.plan({1: 1, 2: 1}).finishes == [STOP, LENGTH]
    one = driver.plan({3: 1}, [admission(3, [3], max_tokens=1)])
    assert (one.token_ids, one.finishes) == ([60], [LENGTH])


def test_the_models_length_ends_a_sequence() -> None:
    driver = make(OracleRunner(max_model_len=5))
    assert driver.plan({1: 9}, [admission(1, [1, 2, 3], max_tokens=99)]).finishes == [NONE]
    result = driver.plan({1: 1})
    assert (result.num_sampled, result.finishes) == ([1], [LENGTH])
    assert result.blocks.held == 0


def test_c22_a_plan_already_out_when_a_sequence_ends_gets_no_token_of_it() -> None:
    """Plan N meets EOS, plan N + 1 names it still: nothing computed, no token, no fault, and its blocks serve another."""
    driver = make(OracleRunner(script={1: [EOS]}), num_blocks=1)
    assert driver.plan({1: 4}, [admission(1, [1, 2, 3])]).finishes == [STOP]
    overshoot = driver.plan({1: 1, 2: 4}, [admission(2, [4, 5, 6])])
    assert overshoot.num_computed == [0, 3]
    assert overshoot.num_sampled == [0, 1]
    assert overshoot.token_ids == oracle_output([4, 5, 6], 1)
    assert overshoot.finishes == [NONE, NONE]
    assert not overshoot.faults


def test_c36_slots_of_one_token_requests_are_free_in_the_very_next_plan() -> None:
    driver = make(num_blocks=4, block_size=4)
    for burst in range(5):
        ids = [10 * burst + index for index in range(4)]
        result = driver.plan(dict.fromkeys(ids, 4), [admission(i, [i + 1] * 4, max_tokens=1) for i in ids])
        assert result.finishes == [LENGTH] * 4
        assert result.blocks == Blocks(free=4, cached=0, held=0)


# ---- releasing -----------------------------------------------------------------------------------------------------------------


def test_c04_releasing_what_is_unknown_or_ended_and_advancing_what_is_released_are_no_errors() -> None:
    driver = make()
    driver.plan({1: 9}, [admission(1, [1, 2])])
    result = driver.plan({1: 1, 404: 1}, release=[1, 1, 404])
    assert result.num_computed == [0, 0]
    assert not result.faults
    assert result.blocks == Blocks(free=16, cached=0, held=0)


def test_c05_release_all_leaves_nothing_of_an_epoch() -> None:
    driver = make()
    driver.plan({1: 9, 2: 1}, [admission(1, [1] * 9), admission(2, [2] * 9), admission(3, [3])])
    assert driver.engine.release_all().blocks == Blocks(free=16, cached=0, held=0)
    assert driver.plan({1: 1, 2: 1, 3: 1}).num_computed == [0, 0, 0]
    # The ids are free for the next epoch.
    assert driver.plan({1: 9}, [admission(1, [5, 5])]).token_ids == oracle_output([5, 5], 1)


def test_c07_a_newcomer_takes_released_blocks_only_after_the_plan_that_releases_them() -> None:
    driver = make(num_blocks=2, block_size=4)
    driver.plan({1: 8}, [admission(1, [1] * 7)])
    refused = driver.plan({1: 1, 2: 8}, [admission(2, [2] * 7)])
    assert [(fault.sequence_id, fault.fault) for fault in refused.faults] == [(2, SequenceFault.NO_BLOCKS)]
    taken = driver.plan({2: 8}, release=[1])
    assert taken.token_ids == oracle_output([2] * 7, 1)


# ---- blocks run out ------------------------------------------------------------------------------------------------------------


def test_no_blocks_stops_that_sequence_alone_and_it_keeps_what_it_has() -> None:
    driver = make(num_blocks=3, block_size=4)
    driver.plan({1: 4, 2: 4}, [admission(1, [1] * 4), admission(2, [2] * 8)])
    result = driver.plan({1: 1, 2: 4})
    assert result.num_computed == [1, 0]
    assert result.token_ids == oracle_output([1] * 4, 2)[1:]
    assert [(fault.sequence_id, fault.fault) for fault in result.faults] == [(2, SequenceFault.NO_BLOCKS)]
    assert result.blocks == Blocks(free=0, cached=0, held=3)
    resumed = driver.plan({2: 4}, release=[1])
    assert (resumed.num_computed, resumed.token_ids) == ([4], oracle_output([2] * 8, 1))


def test_a_chunk_needs_no_more_blocks_than_it_fills() -> None:
    driver = make(num_blocks=4, block_size=4)
    driver.plan({1: 8}, [admission(1, [1] * 8, max_tokens=1), admission(2, [2] * 16)])
    driver.plan({3: 8}, [admission(3, [3] * 8)])
    result = driver.plan({2: 8})
    assert (result.num_computed, result.faults) == ([8], [])
    assert driver.plan({2: 8}).faults[0].fault == SequenceFault.NO_BLOCKS


def test_c18_a_sequence_that_outgrows_the_pool_alone_fails_and_the_engine_lives() -> None:
    driver = make(num_blocks=2, block_size=4)
    tokens = list(driver.plan({1: 9}, [admission(1, [1] * 6, max_tokens=50)]).token_ids)
    tokens += run_alone(driver, 1, 2)
    assert tokens == oracle_output([1] * 6, 3)
    result = driver.plan({1: 1, 2: 2}, [admission(2, [2])])
    fault = result.faults[0]
    assert (fault.sequence_id, fault.fault) == (1, SequenceFault.TOO_LONG)
    assert fault.detail == "9 tokens need 3 blocks, there are 2"
    assert (result.num_computed, result.token_ids) == ([0, 1], oracle_output([2], 1))
    assert result.blocks == Blocks(free=1, cached=0, held=1)


def test_c18_a_prompt_larger_than_the_pool_fails_before_it_takes_blocks() -> None:
    result = make(num_blocks=2, block_size=4).plan({1: 2}, [admission(1, [1] * 9)])
    assert result.faults[0].fault == SequenceFault.TOO_LONG
    assert result.blocks.held == 0


# ---- failures ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 7, 8])
def test_c43_a_step_that_raises_fails_only_the_sequence_at_fault(size: int) -> None:
    for culprit in range(size):
        runner = OracleRunner()
        driver = make(runner)
        prompts = {index: [index + 1, POISON if index == culprit else 3, 4] for index in range(size)}
        result = driver.plan(dict.fromkeys(prompts, 9), [admission(index, prompt) for index, prompt in prompts.items()])
        assert [(fault.sequence_id, fault.fault) for fault in result.faults] == [(culprit, SequenceFault.ERROR)]
        assert result.faults[0].detail == "RuntimeError: poisoned input"
        assert result.num_computed == [0 if index == culprit else 3 for index in prompts]
        assert result.token_ids == [oracle_output(prompt, 1)[0] for index, prompt in prompts.items() if index != culprit]
        assert runner.num_steps <= 1 + 2 * (size - 1).bit_length()
        again = driver.plan(dict.fromkeys(prompts, 1))
        assert again.num_computed == [0 if index == culprit else 1 for index in prompts]
        assert not again.faults


def test_c43_a_runner_that_always_raises_fails_every_sequence_and_the_next_plan_is_served() -> None:
    runner = OracleRunner(broken=True)
    driver = make(runner)
    result = driver.plan(dict.fromkeys(range(5), 9), [admission(index, [index + 1]) for index in range(5)])
    assert sorted(fault.sequence_id for fault in result.faults) == list(range(5))
    assert runner.num_steps == 2 * 5 - 1
    assert result.blocks.held == 0
    runner.broken = False
    assert driver.plan({9: 9}, [admission(9, [4, 2])]).token_ids == oracle_output([4, 2], 1)


def test_a_lost_device_is_no_sequences_fault() -> None:
    runner = OracleRunner(lost=True)
    driver = make(runner)
    with pytest.raises(DeviceLost):
        driver.plan(dict.fromkeys(range(5), 9), [admission(index, [index + 1]) for index in range(5)])
    assert runner.num_steps == 1


def test_a_device_lost_while_the_sequence_at_fault_is_searched_ends_the_search() -> None:
    class Failing(OracleRunner):
        def step(self, batch: Batch) -> StepOutput:
            self.broken, self.lost = self.num_steps == 0, self.num_steps > 0
            return super().step(batch)

    runner = Failing()
    with pytest.raises(DeviceLost):
        make(runner).plan(dict.fromkeys(range(4), 9), [admission(index, [index + 1]) for index in range(4)])
    assert runner.num_steps == 2


def test_logits_that_are_not_numbers_fail_that_sequence_alone() -> None:
    driver = make()
    admissions = [admission(1, [1], logprobs=1), admission(2, [NOT_A_NUMBER], logprobs=1), admission(3, [3], logprobs=1)]
    result = driver.plan({1: 1, 2: 1, 3: 1}, admissions)
    assert (result.num_computed, result.num_sampled) == ([1, 0, 1], [1, 0, 1])
    assert result.token_ids == [*oracle_output([1], 1), *oracle_output([3], 1)]
    assert len(result.logprobs) == 2
    assert [(fault.sequence_id, fault.detail) for fault in result.faults] == [(2, "logits are not numbers")]


# ---- admissions that cannot be -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (admission(1, []), "num_prompt_tokens"),
        (admission(1, [1] * 64), "max_model_len"),
        (admission(1, [VOCAB_SIZE]), "token_ids"),
        (admission(1, [-1]), "token_ids"),
        (admission(1, [1], output=[2, 3], max_tokens=2), "max_tokens"),
        (admission(1, [1], max_tokens=0), "max_tokens"),
        (admission(1, [1], stop_token_ids=(VOCAB_SIZE,)), "stop_token_ids"),
        (admission(1, [1], logit_bias=((VOCAB_SIZE, 1.0),)), "logit_bias_ids"),
        (admission(1, [1], logit_bias=((1, float("inf")),)), "logit_bias_values"),
        (admission(1, [1], temperature=float("nan")), "temperature"),
        (admission(1, [1], temperature=-0.1), "temperature"),
        (admission(1, [1], top_p=0.0), "top_p"),
        (admission(1, [1], min_p=1.5), "min_p"),
        (admission(1, [1], repetition_penalty=float("inf")), "repetition_penalty"),
        (admission(1, [1], logprobs=21), "logprobs"),
    ],
)
def test_a_bad_admission_fails_alone_and_names_its_field(bad: object, word: str) -> None:
    driver = make()
    result = driver.plan({1: 1, 2: 1}, [bad, admission(2, [5])])  # type: ignore[list-item]
    assert [(fault.sequence_id, fault.fault) for fault in result.faults] == [(1, SequenceFault.ERROR)]
    assert word in result.faults[0].detail
    assert (result.num_computed, result.token_ids) == ([0, 1], oracle_output([5], 1))


def test_the_largest_numbers_that_the_protocol_can_say_are_good() -> None:
    largest = 3.4028234663852886e38
    result = make().plan({1: 1}, [admission(1, [1], temperature=largest, repetition_penalty=largest)])
    assert not result.faults


def test_the_edges_of_the_vocabulary_and_the_longest_prompt_are_good() -> None:
    driver = make()
    good = admission(
        1, [0, VOCAB_SIZE - 3] + [1] * 61, stop_token_ids=(0, VOCAB_SIZE - 1), logit_bias=((0, 1.0), (VOCAB_SIZE - 1, -1.0))
    )
    result = driver.plan({1: 99}, [good])
    assert not result.faults
    assert (result.num_sampled, result.finishes) == ([1], [LENGTH])


def test_admitting_a_known_id_again_ends_both() -> None:
    driver = make()
    driver.plan({1: 9}, [admission(1, [1, 2])])
    result = driver.plan({1: 9}, [admission(1, [3, 4])])
    assert [(fault.sequence_id, fault.fault) for fault in result.faults] == [(1, SequenceFault.ERROR)]
    assert (result.num_computed, result.blocks.held) == ([0], 0)


def test_c54_what_one_epoch_can_make_known_is_bounded() -> None:
    driver = make(max_num_seqs=2)
    result = driver.plan({16: 1, 1: 1}, [admission(index, [1]) for index in range(20)])
    assert [fault.sequence_id for fault in result.faults] == [16, 17, 18, 19]
    assert result.num_computed == [0, 1]
