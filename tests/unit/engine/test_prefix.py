"""The prefix cache: what is found again, what is never shared, what is evicted first, and what a scheduler is told of it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import pytest
from tokenmill_executor.block_table import BlockTable
from tokenmill_executor.blocks import BlockPool
from tokenmill_executor.engine import Engine
from tokenmill_executor.prefix import PrefixHasher, PrefixIndex, hash_function, short_hash
from tokenmill_executor.records import Admission, Blocks, PrefixChanges, Result, SequenceFault

from tests.fakes.runner import NOT_A_NUMBER, POISON, OracleRunner
from tests.unit.engine.plans import Driver, admission, hasher, oracle_output

BLOCK = 4


def make(runner: OracleRunner | None = None, num_blocks: int = 16) -> Driver:
    return Driver(Engine(runner or OracleRunner(), num_blocks, BLOCK, max_num_seqs=8, hasher=hasher(BLOCK)))


def run(driver: Driver, *admissions: Admission, most: int = 64) -> list[Result]:
    """All together, each to its end."""
    results = [driver.plan({a.sequence_id: most for a in admissions}, admissions)]
    while results[-1].blocks.held:
        results.append(driver.plan({a.sequence_id: most for a in admissions}))
    return results


def tokens_of(results: Sequence[Result]) -> list[int]:
    return [token for result in results for token in result.token_ids]


def cached(result: Result) -> list[int]:
    return list(result.num_cached) or [0] * len(result.sequence_ids)


# ---- hashes --------------------------------------------------------------------------------------------------------------------


def test_the_chained_hash_is_the_documented_one() -> None:
    """As docs/plan-protocol.md defines it, written out once more."""
    version, salt, tokens = "llama bfloat16", "tenant-a", list(range(1000, 1010))
    root = hashlib.sha256(struct.pack("<I", len(version)) + version.encode() + salt.encode()).digest()
    first = hashlib.sha256(root + struct.pack("<4I", *tokens[:4])).digest()
    second = hashlib.sha256(first + struct.pack("<4I", *tokens[4:8])).digest()
    digests: list[bytes] = []
    hashes = hasher(BLOCK, version)
    hashes.extend(digests, hashes.root(salt), tokens, 1)
    hashes.extend(digests, hashes.root(salt), tokens, 2)
    assert digests == [first, second]
    assert short_hash(first) == struct.unpack(">Q", first[:8])[0]


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash"])
def test_c65_another_version_another_salt_or_another_parent_give_other_hashes(algorithm: str) -> None:
    if algorithm == "xxhash":
        pytest.importorskip("xxhash")
    seen = set()
    for version in ("a", "a2"):
        hashes = PrefixHasher(hash_function(algorithm), version, BLOCK)
        # Version and salt must not run into one another.
        for salt in ("", "2", "x"):
            for tokens in ([1, 2, 3, 4, 5, 6, 7, 8], [9, 2, 3, 4, 5, 6, 7, 8]):
                digests: list[bytes] = []
                hashes.extend(digests, hashes.root(salt), tokens, 2)
                seen.update(digests)
    assert len(seen) == 2 * 3 * 2 * 2


def test_c65_blocks_of_weights_under_another_version_are_not_found() -> None:
    pool, table, other = BlockPool(8, BLOCK), BlockTable(), BlockTable()
    old: list[bytes] = []
    new: list[bytes] = []
    for digests, version in ((old, "adapter-a 1"), (new, "adapter-a 2")):
        hashes = hasher(BLOCK, version)
        hashes.extend(digests, hashes.root(""), [1] * 8, 2)
    pool.allocate(table, 8)
    pool.store(table, old, 0, 2)
    assert pool.share(other, new) == 0
    assert pool.share(other, old) == 2
    pool.check([table, other])


# ---- hits ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [n * BLOCK + d for n in (1, 2, 3) for d in (-1, 0, 1)])
def test_the_second_of_two_equal_prompts_computes_its_last_block_only(length: int) -> None:
    driver = make()
    prompt = list(range(1, length + 1))
    cold = run(driver, admission(1, prompt, max_tokens=3))
    warm = run(driver, admission(2, prompt, max_tokens=3))
    assert tokens_of(cold) == tokens_of(warm) == oracle_output(prompt, 3)
    # The last token is computed always, so a prompt of whole blocks computes its last block.
    hit = (length - 1) // BLOCK * BLOCK
    assert (cached(cold[0]), cached(warm[0])) == ([0], [hit])
    assert list(warm[0].num_computed) == [length - hit]
    assert all(cached(result) == [0] for result in warm[1:])


def test_a_conversation_goes_on_from_its_own_output() -> None:
    driver = make()
    prompt = [1, 2, 3, 4, 5]
    output = tokens_of(run(driver, admission(1, prompt, max_tokens=8)))
    turn = [*prompt, *output, 6, 7]
    first = run(driver, admission(2, turn, max_tokens=2))[0]
    # The very last output token was never computed; 12 tokens, three blocks, were.
    assert cached(first) == [12]


def test_a_preempted_sequence_comes_back_to_its_blocks() -> None:
    driver = make()
    first = driver.plan({1: 9}, [admission(1, [1] * 9)])
    second = driver.plan({1: 1})
    driver.plan({}, release=[1])
    output = [*first.token_ids, *second.token_ids]
    resumed = driver.plan({2: 64}, [admission(2, [1] * 9, output)])
    assert (cached(resumed), list(resumed.num_computed)) == ([8], [3])
    assert resumed.token_ids == oracle_output([1] * 9, 3)[2:]


def test_the_budget_is_for_computed_tokens_a_hit_comes_on_top_and_may_sample_early() -> None:
    driver = make()
    prompt = list(range(1, 12))
    run(driver, admission(1, prompt, max_tokens=1))
    result = driver.plan({2: 3}, [admission(2, prompt)])
    assert (cached(result), list(result.num_computed), list(result.num_sampled)) == ([8], [3], [1])


def test_one_block_is_shared_by_sequences_of_one_batch() -> None:
    driver = make()
    prefix = list(range(1, 9))
    run(driver, admission(1, [*prefix, 50], max_tokens=1))
    admissions = [admission(2 + index, [*prefix, 60 + index], max_tokens=4) for index in range(4)]
    results = [driver.plan({a.sequence_id: 64 for a in admissions}, admissions)]
    assert cached(results[0]) == [8] * 4
    # Two shared blocks, and one of its own for each.
    assert results[0].blocks.held == 2 + 4
    results += [driver.plan({a.sequence_id: 1 for a in admissions}) for _ in range(3)]
    for index in range(4):
        assert [result.token_ids[index] for result in results] == oracle_output([*prefix, 60 + index], 4)


def test_a_prefix_computed_twice_at_once_is_kept_once() -> None:
    driver = make()
    prefix = list(range(1, 9))
    result = driver.plan({1: 64, 2: 64}, [admission(1, [*prefix, 50]), admission(2, [*prefix, 60])])
    assert cached(result) == [0, 0]
    assert result.blocks == Blocks(free=12, cached=0, held=4)
    output = tokens_of([result, driver.plan({1: 1, 2: 1})])
    assert output[0::2] == oracle_output([*prefix, 50], 2)
    assert output[1::2] == oracle_output([*prefix, 60], 2)


def test_salts_are_kept_apart() -> None:
    driver = make()
    run(driver, admission(1, [1] * 9, salt="a"))
    assert cached(driver.plan({2: 64}, [admission(2, [1] * 9, salt="b")])) == [0]
    assert cached(driver.plan({3: 64}, [admission(3, [1] * 9, salt="a")])) == [8]


def test_without_a_hasher_nothing_is_cached() -> None:
    driver = Driver(Engine(OracleRunner(), 16, BLOCK, max_num_seqs=8))
    for sequence_id in (1, 2):
        results = run(driver, admission(sequence_id, [1] * 9))
        assert all(result.prefix == PrefixChanges() and cached(result) == [0] for result in results)
        assert results[-1].blocks == Blocks(16, 0, 0)


# ---- nothing of a failed step --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [POISON, NOT_A_NUMBER])
def test_a_step_that_failed_leaves_nothing_in_the_index(bad: int) -> None:
    driver = make()
    result = driver.plan({1: 64, 2: 64}, [admission(1, [7, 7, 7, 7, bad]), admission(2, [5] * 9)])
    assert [fault.sequence_id for fault in result.faults] == [1]
    assert len(result.prefix.stored) == 2
    assert cached(driver.plan({3: 64}, [admission(3, [7, 7, 7, 7, 8])])) == [0]
    assert cached(driver.plan({4: 64}, [admission(4, [5] * 9)])) == [8]


def test_a_hit_on_top_of_which_the_step_fails_is_given_back() -> None:
    driver = make()
    run(driver, admission(1, [1] * 9, max_tokens=1))
    result = driver.plan({2: 64}, [admission(2, [*[1] * 8, POISON])])
    assert (cached(result), list(result.num_computed)) == ([0], [0])
    assert result.blocks == Blocks(free=14, cached=2, held=0)


def test_c15_a_hit_that_lacks_a_block_for_the_rest_is_rolled_back() -> None:
    driver = make(num_blocks=4)
    run(driver, admission(1, [1] * 9, max_tokens=1))
    # Two blocks are cached, two free; this one takes the free ones.
    driver.plan({2: 8}, [admission(2, [2] * 8)])
    result = driver.plan({3: 64}, [admission(3, [1] * 10)])
    assert [fault.fault for fault in result.faults] == [SequenceFault.NO_BLOCKS]
    assert cached(result) == [0]
    assert result.blocks == Blocks(free=0, cached=2, held=2)
    # With one block more it is a hit after all.
    again = driver.plan({3: 64}, release=[2])
    assert (cached(again), again.token_ids) == ([8], oracle_output([1] * 10, 1))


# ---- eviction ------------------------------------------------------------------------------------------------------------------


def test_cached_blocks_are_taken_when_none_is_free_the_longest_unused_first_and_tails_before_heads() -> None:
    driver = make(num_blocks=6)
    run(driver, admission(1, [1] * 9, max_tokens=1))
    run(driver, admission(2, [2] * 9, max_tokens=1))
    # Two free, four cached; a hit makes the first prompt the one used last.
    run(driver, admission(3, [1] * 9, max_tokens=1))
    result = driver.plan({4: 64}, [admission(4, [3] * 10)])
    assert result.blocks == Blocks(free=0, cached=3, held=3)
    driver.plan({}, release=[4])
    hits = driver.plan({5: 64, 6: 64}, [admission(5, [1] * 9), admission(6, [2] * 9)])
    assert cached(hits) == [8, 4]


def test_a_pinned_block_is_never_evicted() -> None:
    driver = make(num_blocks=4)
    run(driver, admission(1, [1] * 9, max_tokens=1))
    driver.plan({2: 64}, [admission(2, [1] * 9)])
    result = driver.plan({2: 1, 3: 64}, [admission(3, [3] * 8)])
    assert [fault.sequence_id for fault in result.faults] == [3]
    assert result.token_ids == oracle_output([1] * 9, 2)[1:]


# ---- what a scheduler is told --------------------------------------------------------------------------------------------------


def test_stored_and_dropped_blocks_are_told_and_a_new_scheduler_is_told_all() -> None:
    driver = make(num_blocks=3)
    first = driver.plan({1: 64}, [admission(1, [1] * 9, max_tokens=1)])
    assert len(first.prefix.stored) == 2
    assert list(first.prefix.parents) == [0, first.prefix.stored[0]]
    second = driver.plan({2: 64}, [admission(2, [2] * 7, max_tokens=1)])
    # One block was free, for the other the tail of the first prompt went.
    assert list(second.prefix.dropped) == [first.prefix.stored[1]]
    assert len(second.prefix.stored) == 1
    standing = driver.engine.release_all()
    assert set(standing.prefix.stored) == {first.prefix.stored[0], second.prefix.stored[0]}
    assert standing.blocks == Blocks(free=1, cached=2, held=0)


def test_c05_a_new_epoch_finds_the_cache_warm() -> None:
    driver = make()
    driver.plan({1: 64}, [admission(1, [1] * 9)])
    driver.engine.release_all()
    assert cached(driver.plan({1: 64}, [admission(1, [1] * 9)])) == [8]


def test_a_large_index_is_told_over_several_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill_executor.prefix.MOST_TOLD", 2)
    index = PrefixIndex()
    digests = [hashlib.sha256(bytes([number])).digest() for number in range(5)]
    for block, digest in enumerate(digests):
        index.store(block, digest, digests[block - 1] if block else None)
    index.tell_all()
    told = [index.take_changes() for _ in range(2)]
    assert [list(changes.stored) for changes in told] == [[*map(short_hash, digests[:2])], [*map(short_hash, digests[2:4])]]
    # One that is evicted before it was told needs no word at all.
    index.unreference(4)
    index.evict()
    assert index.take_changes() == PrefixChanges()
    index.unreference(3)
    index.evict()
    assert index.take_changes() == PrefixChanges(dropped=(short_hash(digests[3]),))
