"""Sequences of one prompt share its full blocks by reference, with and without a prefix cache, and never depend on it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenmill_executor.engine import Engine
from tokenmill_executor.records import Admission, Result, SequenceFault
from tokenmill_executor.runner import BlockGroup

from tests.fakes.runner import POISON, OracleRunner
from tests.unit.engine.plans import Driver, admission, hasher, oracle_output

BLOCK = 16
PROMPT = list(range(100, 300))


def make(num_blocks: int = 64, caching: bool = False, runner: OracleRunner | None = None) -> Driver:
    engine = Engine(
        runner or OracleRunner(max_model_len=512), num_blocks, BLOCK, max_num_seqs=8, hasher=hasher(BLOCK) if caching else None
    )
    return Driver(engine)


def fork(sequence_id: int, of: int, prompt: list[int] = PROMPT, output: list[int] | None = None) -> Admission:
    plain = admission(sequence_id, prompt, output or [])
    return Admission(plain.sequence_id, plain.token_ids, plain.num_prompt_tokens, plain.params, plain.cache_salt, of)


def computed(results: list[Result]) -> int:
    return sum(sum(result.num_computed) for result in results)


@pytest.mark.parametrize("caching", [False, True])
def test_four_choices_of_a_prompt_of_200_tokens_compute_it_once(caching: bool) -> None:
    """12 of its 13 blocks are shared: 200 tokens, and 8 for each fork. All get the same tokens, as the runner reads the same."""
    driver = make(caching=caching)
    results = [driver.plan({1: 200}, [admission(1, PROMPT)])]
    results.append(driver.plan({1: 1, 2: 200, 3: 200, 4: 200}, [fork(2, 1), fork(3, 1), fork(4, 1)]))
    assert list(results[-1].num_cached) == [0, 192, 192, 192]
    assert computed(results) == 200 + 1 + 3 * 8
    assert results[-1].blocks.held == 13 + 3
    outputs: dict[int, list[int]] = {1: [], 2: [], 3: [], 4: []}
    while results[-1].blocks.held:
        results.append(driver.plan(dict.fromkeys(outputs, 1)))
    for result in results:
        tokens = iter(result.token_ids)
        for sequence_id, count in zip(result.sequence_ids, result.num_sampled, strict=True):
            outputs[sequence_id] += [next(tokens) for _ in range(count)]
    assert list(outputs.values()) == [oracle_output(PROMPT, 8)] * 4


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_at_the_edges_of_blocks_the_last_token_of_the_prompt_is_computed_by_each(length: int) -> None:
    driver = make()
    driver.plan({1: length}, [admission(1, PROMPT[:length])])
    result = driver.plan({2: length}, [fork(2, 1, PROMPT[:length])])
    shared = (length - 1) // BLOCK * BLOCK
    assert (sum(result.num_cached), sum(result.num_computed)) == (shared, length - shared)
    assert list(result.token_ids) == oracle_output(PROMPT[:length], 1)


def test_what_the_other_has_not_computed_is_computed() -> None:
    """In one plan with it nothing is there yet; a plan later, the first chunk is."""
    driver = make()
    first = driver.plan({1: 40, 2: 40}, [admission(1, PROMPT), fork(2, 1)])
    assert (list(first.num_computed), list(first.num_cached)) == ([40, 40], [])
    second = driver.plan({3: 40}, [fork(3, 1)])
    assert (list(second.num_computed), list(second.num_cached)) == ([40], [32])


def test_a_fork_of_nobody_or_of_another_prompt_computes_its_own() -> None:
    driver = make()
    driver.plan({1: 200}, [admission(1, PROMPT)])
    driver.plan({}, release=[1])
    gone = driver.plan({2: 200}, [fork(2, 1)])
    other = driver.plan({3: 200}, [fork(3, 2, PROMPT[:40] + [7] * 160)])
    assert (sum(gone.num_cached), sum(other.num_cached)) == (0, 0)
    assert list(other.token_ids) == oracle_output(PROMPT[:40] + [7] * 160, 1)


def test_one_that_comes_back_shares_the_prompt_and_computes_its_own_output() -> None:
    driver = make()
    driver.plan({1: 200}, [admission(1, PROMPT)])
    driver.plan({1: 1})
    output = oracle_output(PROMPT, 6)
    result = driver.plan({2: 200}, [fork(2, 1, output=output[:5])])
    assert (sum(result.num_cached), sum(result.num_computed)) == (192, 13)
    assert list(result.token_ids) == output[5:]


def test_shared_blocks_outlive_the_one_that_computed_them() -> None:
    driver = make()
    driver.plan({1: 200}, [admission(1, PROMPT)])
    driver.plan({2: 200}, [fork(2, 1)])
    alone = driver.plan({2: 1}, release=[1])
    assert alone.blocks.held == 13
    assert list(alone.token_ids) == oracle_output(PROMPT, 2)[1:]
    assert driver.plan({}, release=[2]).blocks.held == 0


def test_a_fork_that_gets_no_block_of_its_own_pins_nothing() -> None:
    driver = make(num_blocks=13)
    driver.plan({1: 200}, [admission(1, PROMPT)])
    result = driver.plan({2: 200}, [fork(2, 1)])
    assert [fault.fault for fault in result.faults] == [SequenceFault.NO_BLOCKS]
    assert driver.plan({}, release=[1]).blocks.held == 0
    assert list(driver.plan({2: 200}).token_ids) == oracle_output(PROMPT, 1)


def test_nothing_is_shared_of_a_step_that_failed() -> None:
    driver = make()
    prompt = [*PROMPT[:40], POISON, *PROMPT[41:]]
    first = driver.plan({1: 32}, [admission(1, prompt)])
    assert not first.faults
    assert driver.plan({1: 200}).faults
    result = driver.plan({2: 20}, [fork(2, 1, prompt)])
    assert (sum(result.num_cached), sum(result.num_computed)) == (0, 20)


def test_behind_a_window_nothing_is_shared() -> None:
    """The blocks that the other has left behind are gone, and this one has to see them."""
    runner = OracleRunner(max_model_len=512)
    runner.description = replace(runner.description, block_groups=(BlockGroup(sliding_window=20),))
    driver = make(runner=runner)
    driver.plan({1: 200}, [admission(1, PROMPT)])
    result = driver.plan({2: 200}, [fork(2, 1)])
    assert (sum(result.num_cached), sum(result.num_computed)) == (0, 200)
