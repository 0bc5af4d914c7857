"""Builds the flat batch of one step from the sequences it advances.

Must not know: plans, the pool, runners. Blocks for every advanced position are in the sequences' tables already.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from tokenmill_executor.runner import Batch, Int32Array
from tokenmill_executor.sequences import Sequence


# Not frozen: hundreds are made each step, and a frozen record takes twice as long to make.
@dataclass(slots=True)
class Advance:
    """`sequence` is computed from position `start` up to, not with, `end`; `entry` is its place in the plan's columns.

    `start` is beyond `sequence.computed` where what lies between came from the prefix cache.
    """

    entry: int
    sequence: Sequence
    start: int
    end: int


def build_batch(advances: SequenceOf[Advance], block_size: int, num_groups: int = 1) -> Batch:
    """One row for each advance, in order; see `Batch` for shapes. `advances` must not be empty."""
    context_lens = np.array([advance.end for advance in advances], dtype=np.int32)
    rows, positions, query_starts = _places(advances, context_lens)
    tables = _block_tables(advances, num_groups)
    slots = tables[:, rows, positions // block_size] * np.int32(block_size) + positions % np.int32(block_size)
    sample_rows = [row for row, advance in enumerate(advances) if advance.end == len(advance.sequence.token_ids)]
    return Batch(
        token_ids=_token_ids(advances),
        positions=positions,
        slots=slots,
        query_starts=query_starts,
        context_lens=context_lens,
        block_tables=tables,
        sample_rows=np.array(sample_rows, dtype=np.int32),
        samples=[advances[row].sequence.sampling for row in sample_rows],
    )


def _places(advances: SequenceOf[Advance], context_lens: Int32Array) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Of each token its row and its position, and `query_starts`."""
    num_rows = len(advances)
    if all(advance.end - advance.start == 1 for advance in advances):
        return np.arange(num_rows, dtype=np.int32), context_lens - np.int32(1), np.arange(num_rows + 1, dtype=np.int32)
    starts = np.array([advance.start for advance in advances], dtype=np.int32)
    counts = context_lens - starts
    query_starts = np.zeros(num_rows + 1, dtype=np.int32)
    np.cumsum(counts, out=query_starts[1:])
    rows = np.repeat(np.arange(num_rows, dtype=np.int32), counts)
    # Position of a token: its index in the flat batch, moved so that its sequence's first lands on `start`.
    positions = np.arange(query_starts[-1], dtype=np.int32) + (starts - query_starts[:-1])[rows]
    return rows, positions, query_starts


def _token_ids(advances: SequenceOf[Advance]) -> Int32Array:
    tokens: list[int] = []
    for advance in advances:
        tokens += advance.sequence.token_ids[advance.start : advance.end]
    return np.array(tokens, dtype=np.int32)


def _block_tables(advances: SequenceOf[Advance], num_groups: int) -> np.ndarray[tuple[int, int, int], np.dtype[np.int32]]:
    tables = [advance.sequence.table for advance in advances]
    counts = [table.count for table in tables]
    whole = np.zeros((num_groups, len(tables), max(counts)), dtype=np.int32)
    # Row after row: one copy of all is no faster, and numpy lets go of the interpreter for it, which another thread then takes.
    for row, table in enumerate(tables):
        whole[:, row, : table.count] = table.rows
    return whole
