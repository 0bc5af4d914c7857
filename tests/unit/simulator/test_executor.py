"""The model executor keeps the plan protocol where a sound scheduler never leads it: no blocks, stale sequences."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenmill_scheduler.core.plans import Admission, Blocks, Plan, SequenceFault, SequenceFinish
from tokenmill_scheduler.core.request import Sampling
from tokenmill_simulator.cache import BlockCache
from tokenmill_simulator.executor import ModelExecutor

from tests.unit.simulator.loads import COST, small_machines


def executor(num_blocks: int = 4) -> ModelExecutor:
    return ModelExecutor(small_machines(num_blocks=num_blocks).description, COST, [3, 3])


def admission(sequence_id: int, tokens: int, max_tokens: int = 9) -> Admission:
    return Admission(sequence_id, (0,) * tokens, tokens, Sampling(max_tokens, seed=sequence_id - 1))


def plan(number: int, advance: dict[int, int], admit: tuple[Admission, ...] = (), release: tuple[int, ...] = ()) -> Plan:
    return Plan(1, number, release, admit, tuple(advance), tuple(advance.values()))


def test_a_sequence_without_blocks_is_answered_alone() -> None:
    result, _ = executor().step(plan(1, {1: 12, 2: 12}, (admission(1, 12), admission(2, 12))))
    assert result.num_computed == (12, 0)
    assert result.num_sampled == (1, 0)
    assert result.faults[2].fault is SequenceFault.NO_BLOCKS
    assert result.blocks == Blocks(1, 0, 3)


def test_a_sequence_that_has_ended_takes_part_no_more() -> None:
    model = executor()
    model.step(plan(1, {1: 4}, (admission(1, 4),)))
    model.step(plan(2, {1: 1}))
    third, _ = model.step(plan(3, {1: 1}))
    late, _ = model.step(plan(4, {1: 1}))
    assert (third.num_sampled, third.finishes) == ((1,), (SequenceFinish.STOP,))
    assert (late.num_computed, late.num_sampled, late.token_ids) == ((0,), (0,), ())
    assert late.blocks == Blocks(4, 0, 0)


def test_a_limit_that_comes_first_ends_with_length() -> None:
    model = executor()
    result, _ = model.step(plan(1, {1: 4}, (admission(1, 4, max_tokens=1),)))
    assert result.finishes == (SequenceFinish.LENGTH,)


def test_released_blocks_are_free_in_the_same_plan() -> None:
    model = executor()
    model.step(plan(1, {1: 12}, (admission(1, 12),)))
    result, seconds = model.step(plan(2, {2: 16}, (admission(2, 16),), release=(1,)))
    assert (result.num_computed, result.blocks) == ((16,), Blocks(0, 0, 4))
    assert seconds == COST.step_s + 16 * COST.row_s


def test_blocks_leave_the_cache_last_of_a_chain_first() -> None:
    cache = BlockCache(4)
    cache.take(3)
    shared = cache.keep([11, 12, 13])
    cache.let_go(0, shared)
    assert cache.blocks() == Blocks(1, 3, 0)
    cache.take(2)
    assert cache.pin([11, 12, 13]) == 2
    assert cache.changes() == ((13,), (11, 12))
    assert cache.blocks() == Blocks(0, 0, 4)


def test_what_leaves_the_device_is_found_in_host_memory_until_that_is_full_too() -> None:
    """A first part of a chain stays on the device, its tail is in the host's memory: nothing is dropped, and all is found."""
    cache = BlockCache(4, num_host_blocks=2)
    cache.take(3)
    cache.let_go(0, cache.keep([11, 12, 13]))
    cache.changes()
    cache.take(2)
    assert (cache.blocks(), cache.changes()) == (Blocks(0, 2, 2), ((), ()))
    assert cache.pin([11, 12, 13]) == 2
    assert cache.bring_back([13]) == 0, "there is no block for it"
    cache.let_go(2, [])
    assert cache.bring_back([13, 14]) == 1
    assert (cache.blocks(), cache.changes()) == (Blocks(1, 0, 3), ((), ()))
    cache.let_go(0, [11, 12, 13])
    cache.take(4)
    assert cache.changes() == ((13,), ()), "the tail went there first, so it leaves first"
    assert cache.pin([11, 12]) == cache.bring_back([11, 12]) == 0
    cache.let_go(4, [])
    assert cache.bring_back([11, 12]) == 2


def test_a_block_computed_anew_is_no_more_in_host_memory() -> None:
    """So it is the newest there when it leaves the device again."""
    cache = BlockCache(1, num_host_blocks=2)
    for block in (11, 12, 11, 13):
        cache.take(1)
        cache.let_go(0, cache.keep([block]))
    cache.changes()
    cache.take(1)
    assert cache.changes() == ((12,), ())


def test_a_prefix_in_host_memory_is_copied_and_not_computed() -> None:
    description = replace(small_machines(num_blocks=4, caching=True).description, num_host_blocks=4)
    model = ModelExecutor(description, replace(COST, copy_token_s=1e-5), [1, 1, 1])
    for number, token in enumerate((7, 8, 7), 1):
        prompt = Admission(number, (token,) * 16, 16, Sampling(1, seed=0))
        result, seconds = model.step(plan(number, {number: 16}, (prompt,)))
    assert (result.num_cached, result.num_computed) == ((12,), (4,)), "the last token is computed, and its block with it"
    assert seconds == pytest.approx(COST.step_s + 4 * COST.row_s + 12e-5)
