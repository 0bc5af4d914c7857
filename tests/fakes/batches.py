"""Flat batches over shuffled blocks, for tests and benchmarks that drive a runner or a decoder without the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from tokenmill_executor.runner import Batch, SamplingInput, SamplingParams


@dataclass(slots=True)
class Track:
    """A sequence: its known tokens, how many are computed, and its blocks, one for each group of layers."""

    sample: SamplingInput
    tokens: list[int]
    blocks: list[tuple[int, ...]] = field(default_factory=list)
    computed: int = 0


class Blocks:
    """Hands out blocks in a shuffled order, so that a table that is read wrongly shows. No window leaves a block behind."""

    def __init__(self, num_blocks: int, block_size: int, seed: int = 0, groups: int = 1) -> None:
        self.block_size = block_size
        self.groups = groups
        self._free = np.random.default_rng(seed).permutation(num_blocks).tolist()

    def track(self, tokens: Sequence[int], params: SamplingParams | None = None, sequence_id: int = 1, prompt: int = 0) -> Track:
        known = list(tokens)
        sampling = params or SamplingParams(max_tokens=1 << 20, seed=0, temperature=0.0)
        return Track(SamplingInput(sequence_id, known, prompt or len(known), sampling), known)

    def free(self, track: Track) -> None:
        self._free += [block for blocks in track.blocks for block in blocks]
        track.blocks, track.computed = [], 0

    def reserve(self, track: Track, num_tokens: int) -> None:
        """Blocks for so many tokens in all."""
        while len(track.blocks) * self.block_size < num_tokens:
            track.blocks.append(tuple(self._free.pop() for _ in range(self.groups)))

    def batch(self, advances: Sequence[tuple[Track, int]]) -> Batch:
        """Advances each by so many tokens, and counts them as computed."""
        for track, count in advances:
            self.reserve(track, track.computed + count)
        counts = np.array([count for _, count in advances])
        positions = np.concatenate([np.arange(track.computed, track.computed + count) for track, count in advances])
        slots = [
            [
                track.blocks[position // self.block_size][group] * self.block_size + position % self.block_size
                for track, count in advances
                for position in range(track.computed, track.computed + count)
            ]
            for group in range(self.groups)
        ]
        tables = np.zeros((self.groups, len(advances), max(len(track.blocks) for track, _ in advances)), dtype=np.int32)
        token_ids: list[int] = []
        for row, (track, count) in enumerate(advances):
            tables[:, row, : len(track.blocks)] = np.transpose(track.blocks)
            token_ids += track.tokens[track.computed : track.computed + count]
            track.computed += count
        sampling = [row for row, (track, _) in enumerate(advances) if track.computed == len(track.tokens)]
        return Batch(
            token_ids=np.array(token_ids, dtype=np.int32),
            positions=positions.astype(np.int32),
            slots=np.array(slots, dtype=np.int32),
            query_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            context_lens=np.array([track.computed for track, _ in advances], dtype=np.int32),
            block_tables=tables,
            sample_rows=np.array(sampling, dtype=np.int32),
            samples=[advances[row][0].sample for row in sampling],
        )
