"""The block pool: what it hands out, takes back and counts."""

from __future__ import annotations

import pytest
from tokenmill_executor.block_table import BlockTable
from tokenmill_executor.blocks import BlockPool
from tokenmill_executor.records import Blocks


def test_a_table_grows_only_by_the_blocks_that_are_missing() -> None:
    pool, table = BlockPool(8, 4), BlockTable()
    pool.allocate(table, 1)
    pool.allocate(table, 4)
    assert table.blocks.tolist() == [0]
    pool.allocate(table, 9)
    assert table.blocks.tolist() == [0, 1, 2]
    assert pool.counts() == Blocks(free=5, cached=0, held=3)
    pool.check([table])


def test_more_than_is_free_cannot_be_allocated() -> None:
    pool, first, second = BlockPool(4, 4), BlockTable(), BlockTable()
    pool.allocate(first, 12)
    pool.allocate(second, 4)
    assert not pool.can_allocate(second, 5)
    with pytest.raises(AssertionError, match="allocate without can_allocate"):
        pool.allocate(second, 5)
    assert pool.can_allocate(second, 4)
    assert second.blocks.tolist() == [3]
    pool.check([first, second])


def test_released_blocks_are_taken_again_first_block_first() -> None:
    pool, first, second = BlockPool(8, 4), BlockTable(), BlockTable()
    pool.allocate(first, 12)
    pool.release(first)
    pool.release(first)
    assert pool.counts() == Blocks(free=8, cached=0, held=0)
    assert pool.can_allocate(second, 32)
    pool.allocate(second, 32)
    assert second.blocks.tolist() == list(range(8))
    pool.check([second])


def test_a_long_table_keeps_its_first_blocks_as_it_grows() -> None:
    pool, table = BlockPool(100, 1), BlockTable()
    for count in range(1, 101):
        pool.allocate(table, count)
    assert table.blocks.tolist() == list(range(100))


def test_check_finds_a_block_held_twice_and_one_that_leaked() -> None:
    pool, table, stranger = BlockPool(4, 4), BlockTable(), BlockTable()
    pool.allocate(table, 8)
    stranger.extend(table.blocks.tolist())
    with pytest.raises(AssertionError):
        pool.check([table, stranger])
    with pytest.raises(AssertionError):
        pool.check([])


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0, 16)
