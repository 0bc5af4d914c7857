"""The flat batch of a step, against its meaning written out token by token."""

from __future__ import annotations

import pytest
from tokenmill_executor.batch import Advance, build_batch
from tokenmill_executor.blocks import BlockPool
from tokenmill_executor.records import Admission
from tokenmill_executor.runner import BlockGroup, SamplingParams
from tokenmill_executor.sequences import Limits, Sequence

BLOCK_SIZE = 4
# Known tokens and those to compute, of each sequence.
DECODES = [(1, 1), (5, 1), (8, 1), (9, 1)]
CHUNKS = [(12, 12), (30, 7), (2, 1), (17, 16)]


def advance(entry: int, known: int, count: int, start: int, pool: BlockPool) -> Advance:
    limits = Limits(vocab_size=1000, max_model_len=4000, eos_token_ids=())
    tokens = [(7 * entry + place) % 1000 for place in range(known)]
    sequence = Sequence(Admission(entry, tokens, known, SamplingParams(max_tokens=9, seed=0)), limits, pool.new_table())
    pool.allocate(sequence.table, start + count)
    return Advance(entry, sequence, start, start + count)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("longest", [0, 600])
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("shapes", [DECODES, CHUNKS, CHUNKS + DECODES], ids=["decodes", "chunks", "both"])
def test_each_token_has_its_place(shapes: list[tuple[int, int]], times: int, longest: int, groups: int) -> None:
    """Also those whose sequence has more to compute after this step, and beside a sequence of many blocks."""
    pool = BlockPool(2000, BLOCK_SIZE, (BlockGroup(),) * groups)
    wanted = [*shapes * times, *([(longest, 1)] if longest else [])]
    advances = [advance(entry, known, count, known - count, pool) for entry, (known, count) in enumerate(wanted)]
    advances.append(advance(len(advances), 40, 1, 30, pool))
    batch = build_batch(advances, BLOCK_SIZE, groups)

    tokens, positions, slots = [], [], []
    for row, one in enumerate(advances):
        blocks = one.sequence.table.rows
        assert batch.block_tables[:, row, : blocks.shape[1]].tolist() == blocks.tolist()
        assert not batch.block_tables[:, row, blocks.shape[1] :].any()
        for position in range(one.start, one.end):
            tokens.append(one.sequence.token_ids[position])
            positions.append(position)
            slots.append([block * BLOCK_SIZE + position % BLOCK_SIZE for block in blocks[:, position // BLOCK_SIZE].tolist()])
    assert batch.token_ids.tolist() == tokens
    assert batch.positions.tolist() == positions
    assert batch.slots.T.tolist() == slots
    assert batch.context_lens.tolist() == [one.end for one in advances]
    assert batch.query_starts.tolist() == [sum(one.end - one.start for one in advances[:row]) for row in range(len(advances) + 1)]
    assert batch.sample_rows.tolist() == list(range(len(advances) - 1))
    assert [sample.sequence_id for sample in batch.samples] == list(range(len(advances) - 1))
    arrays = (batch.token_ids, batch.positions, batch.slots, batch.query_starts, batch.context_lens, batch.block_tables)
    assert {array.dtype.name for array in arrays} == {"int32"}
