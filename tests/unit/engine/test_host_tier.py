"""The host tier: evicted blocks come back as they were, where that is the cheaper way, and leave no trace when it fails."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tokenmill_executor.engine import Engine
from tokenmill_executor.host_tier import Rate
from tokenmill_executor.prefix import short_hash
from tokenmill_executor.records import Blocks, Result, SequenceFault

from tests.fakes.runner import OracleHostMemory, OracleRunner
from tests.unit.engine.plans import Driver, admission, hasher, oracle_output

BLOCK = 4


class Small(Driver):
    """A pool of 6 blocks, with so many of host memory. `predicted` is what a scheduler believes to be cached."""

    def __init__(self, num_host_blocks: int, num_blocks: int = 6) -> None:
        runner = OracleRunner()
        super().__init__(Engine(runner, num_blocks, BLOCK, max_num_seqs=8, hasher=hasher(BLOCK), num_host_blocks=num_host_blocks))
        assert runner.host is not None
        self.memory: OracleHostMemory = runner.host
        self.predicted: set[int] = set()

    @property
    def in_host(self) -> int:
        assert self.engine.host_tier is not None
        return len(self.engine.host_tier)

    def plan(self, *args: object, **kwargs: object) -> Result:
        result = super().plan(*args, **kwargs)  # type: ignore[arg-type]
        self.predicted -= set(result.prefix.dropped)
        self.predicted |= set(result.prefix.stored)
        return result

    def serve(self, sequence_id: int, prompt: Sequence[int]) -> Result:
        """One token of output, which ends it."""
        result = self.plan({sequence_id: 64}, [admission(sequence_id, prompt, max_tokens=1)])
        assert list(result.token_ids) == oracle_output(prompt, 1)
        assert result.blocks.held == 0
        return result


def prompt(number: int, blocks: int) -> list[int]:
    """Full blocks and one token more."""
    return [100 * number + place for place in range(blocks * BLOCK)] + [7]


def hashes(tokens: Sequence[int]) -> set[int]:
    digests: list[bytes] = []
    hashing = hasher(BLOCK)
    hashing.extend(digests, hashing.root(""), tokens, len(tokens) // BLOCK)
    return set(map(short_hash, digests))


def cached(result: Result) -> int:
    return sum(result.num_cached)


def test_evicted_blocks_come_back_from_host_memory() -> None:
    driver = Small(num_host_blocks=10)
    driver.serve(1, prompt(1, 5))
    driver.serve(2, prompt(2, 5))
    # Five blocks of the first have made room, and are expected to be found still.
    assert (driver.in_host, driver.predicted) == (5, hashes(prompt(1, 5)) | hashes(prompt(2, 5)))
    back = driver.serve(3, prompt(1, 5))
    assert (cached(back), list(back.num_computed)) == (20, [1])
    tier = driver.engine.host_tier
    assert tier is not None
    assert (tier.copied_out, tier.copied_in, tier.dropped, driver.in_host) == (10, 5, 0, 5)


def test_the_tail_of_a_chain_is_dropped_first_and_the_scheduler_told() -> None:
    driver = Small(num_host_blocks=2)
    driver.serve(1, prompt(1, 5))
    driver.serve(2, prompt(2, 5))
    assert driver.in_host == 2
    assert driver.predicted == hashes(prompt(1, 5)[: 2 * BLOCK]) | hashes(prompt(2, 5))
    assert cached(driver.serve(3, prompt(1, 5))) == 2 * BLOCK


def test_a_preempted_sequence_resumes_by_swap_with_what_it_had_generated() -> None:
    driver = Small(num_host_blocks=8)
    given = prompt(1, 2)
    first = driver.plan({1: 64}, [admission(1, given, max_tokens=12)])
    output = [*first.token_ids]
    for _ in range(5):
        output += driver.plan({1: 1}).token_ids
    # Given up for another, which needs the whole pool.
    driver.plan({}, release=[1])
    driver.serve(2, prompt(2, 5))
    back = driver.plan({3: 64}, [admission(3, given, output, max_tokens=12)])
    # 9 + 6 tokens, three full blocks.
    assert (cached(back), list(back.num_computed)) == (12, [3])
    output += back.token_ids
    while len(output) < 12:
        output += driver.plan({3: 1}).token_ids
    assert output == oracle_output(given, 12)


@pytest.mark.parametrize(("copy_s", "compute_s", "swaps"), [(0.9, 0.25, True), (1.1, 0.25, False), (1.0, 0.25, False)])
def test_the_cheaper_of_swap_and_recompute_is_taken(copy_s: float, compute_s: float, swaps: bool) -> None:
    """Seconds for a block's copy, and for computing one of its four tokens; on a tie it is computed."""
    driver = Small(num_host_blocks=10)
    tier = driver.engine.host_tier
    assert tier is not None
    driver.serve(1, prompt(1, 5))
    driver.serve(2, prompt(2, 5))
    tier._compute = Rate()
    tier.computed(100, 100 * compute_s)
    driver.memory.measured = (10, 10 * copy_s)
    back = driver.serve(3, prompt(1, 5))
    assert cached(back) == (5 * BLOCK if swaps else 0)
    # Computed anew, the blocks are on the device only.
    assert (tier.copied_in, driver.in_host) == (5 if swaps else 0, 5)
    assert driver.predicted == hashes(prompt(1, 5)) | hashes(prompt(2, 5))


def test_only_steps_of_prompts_tell_what_a_token_costs() -> None:
    driver = Small(num_host_blocks=8)
    tier = driver.engine.host_tier
    assert tier is not None
    driver.plan({1: 64}, [admission(1, prompt(1, 2))])
    each = tier._compute.seconds_each
    assert each == pytest.approx(0.001 / 9)
    driver.plan({1: 1})
    assert tier._compute.seconds_each == each


def test_c15_a_swap_in_that_lacks_a_block_changes_nothing() -> None:
    driver = Small(num_host_blocks=8)
    driver.serve(1, prompt(1, 4))
    driver.serve(2, prompt(2, 5))
    before = driver.in_host, driver.predicted.copy()
    # Another holds four of the six blocks, the returning one wants five.
    driver.plan({3: 64}, [admission(3, prompt(2, 3))])
    assert driver.plan({}).blocks == Blocks(free=0, cached=2, held=4)
    refused = driver.plan({4: 64}, [admission(4, prompt(1, 4))])
    assert [fault.fault for fault in refused.faults] == [SequenceFault.NO_BLOCKS]
    assert (refused.blocks, driver.in_host) == (Blocks(free=0, cached=2, held=4), before[0])
    assert driver.predicted == before[1]
    driver.plan({}, release=[3])
    assert cached(driver.plan({4: 64})) == 4 * BLOCK


def test_a_swap_that_needs_every_slot_and_every_block() -> None:
    """What makes room for the returning chain takes the slots that this leaves; what finds none leaves the cache."""
    driver = Small(num_host_blocks=3, num_blocks=4)
    driver.serve(1, prompt(1, 3))
    driver.serve(2, prompt(2, 3))
    assert driver.in_host == 3
    back = driver.serve(3, prompt(1, 3))
    assert cached(back) == 3 * BLOCK
    tier = driver.engine.host_tier
    assert tier is not None
    assert tier.dropped == 2
    assert driver.predicted == hashes(prompt(1, 3)) | hashes(prompt(2, 3)[:BLOCK])


def test_c05_c14_an_epoch_that_ends_leaves_both_tiers_warm_and_nothing_held() -> None:
    driver = Small(num_host_blocks=8)
    driver.serve(1, prompt(1, 5))
    driver.plan({2: 64}, [admission(2, prompt(2, 5))])
    standing = driver.engine.release_all()
    assert standing.blocks == Blocks(free=1, cached=5, held=0)
    assert set(standing.prefix.stored) == hashes(prompt(1, 5)) | hashes(prompt(2, 5))
    told: set[int] = {0}
    for block, parent in zip(standing.prefix.stored, standing.prefix.parents, strict=True):
        assert parent in told
        told.add(block)
    assert cached(driver.plan({3: 64}, [admission(3, prompt(1, 5), max_tokens=1)])) == 5 * BLOCK


def test_check_finds_a_slot_that_is_lost() -> None:
    driver = Small(num_host_blocks=4)
    tier = driver.engine.host_tier
    assert tier is not None
    tier._free.pop()
    with pytest.raises(AssertionError, match="a slot of the host tier is lost"):
        driver.engine.check()
