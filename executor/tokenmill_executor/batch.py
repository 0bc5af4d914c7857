"""Builds the flat batch of one step from the sequences it advances.

Must not know: plans, the pool, runners. Blocks for every advanced position are in the sequences' tables already.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from tokenmill_executor.runner import Batch
from tokenmill_executor.sequences import Sequence


@dataclass(frozen=True, slots=True)
class Advance:
    """`sequence` goes on by `count` >= 1 tokens; `entry` is its place in the plan's columns."""

    entry: int
    sequence: Sequence
    count: int


def build_batch(advances: SequenceOf[Advance], block_size: int) -> Batch:
    """One row for each advance, in order; see `Batch` for shapes. `advances` must not be empty."""
    starts = np.array([advance.sequence.computed for advance in advances], dtype=np.int32)
    counts = np.array([advance.count for advance in advances], dtype=np.int32)
    known = np.array([advance.sequence.known for advance in advances], dtype=np.int32)
    query_starts = np.zeros(len(advances) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_starts[1:])
    # Position of a token: its index in the flat batch, moved so that its sequence's first lands on `start`.
    rows = np.repeat(np.arange(len(advances), dtype=np.int32), counts)
    positions = np.arange(query_starts[-1], dtype=np.int32) + (starts - query_starts[:-1])[rows]
    tables = _block_tables(advances)
    slots = tables[rows, positions // block_size] * np.int32(block_size) + positions % np.int32(block_size)
    context_lens = starts + counts
    sample_rows = np.flatnonzero(context_lens == known).astype(np.int32)
    return Batch(
        token_ids=_token_ids(advances),
        positions=positions,
        slots=slots,
        query_starts=query_starts,
        context_lens=context_lens,
        block_tables=tables,
        sample_rows=sample_rows,
        samples=[advances[row].sequence.sampling for row in sample_rows.tolist()],
    )


def _token_ids(advances: SequenceOf[Advance]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    tokens: list[int] = []
    for advance in advances:
        start = advance.sequence.computed
        tokens += advance.sequence.token_ids[start : start + advance.count]
    return np.array(tokens, dtype=np.int32)


def _block_tables(advances: SequenceOf[Advance]) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    width = max(len(advance.sequence.table) for advance in advances)
    tables = np.zeros((len(advances), width), dtype=np.int32)
    for row, advance in zip(tables, advances, strict=True):
        row[: len(advance.sequence.table)] = advance.sequence.table.blocks
    return tables
