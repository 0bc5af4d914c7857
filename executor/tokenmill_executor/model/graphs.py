"""Decode steps replayed from captured CUDA graphs: one launch from the host in place of some hundreds.

A graph is captured for a number of sequences, padded upwards, and a way to split their positions; its inputs lie at fixed addresses
and are filled anew before each replay, the tokens from the host or from where the step before has sampled them. All of it is queued
behind the work that the device has. Whatever is not one sampled token for each sequence goes to the decoder as it is.

All graphs are captured at the start: in service a capture would have every stream wait. On an H200 with 8 KV heads and up to 256
sequences they are 18 for contexts of 8k tokens, 33 for 32k, 52 for 128k, and hold the memory of the largest between them. What
cannot be captured runs launch by launch.

Must not know: how layers are computed, CUDA itself (`Capture` does), sampling.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial

import numpy as np
import structlog
import torch

from tokenmill_executor.attention.backend import DecodeBackend, DecodeInputs
from tokenmill_executor.model.decoder import Decoder
from tokenmill_executor.runner import Batch, BlockGroup, Int32Array
from tokenmill_executor.upload import upload_into

log = structlog.get_logger(__name__)

Replay = Callable[[], None]
# Takes a computation on tensors that stay where they are, runs it, and returns what runs it again. Raises CaptureFailed, or
# MemoryError: what has no room for graphs now has none for large steps later, so it is not made up for.
Capture = Callable[[Callable[[], None]], Replay]

# Larger decodes are bound by arithmetic, beside which launches count little.
_MOST_SEQUENCES = 512
_TOKENS, _POSITIONS, _CONTEXTS = range(3)
_NO_SLOT = -1
# Of captures between two lines in the log: some seconds.
_TOLD_EVERY = 16


class CaptureFailed(Exception):
    """A computation runs but cannot be captured; the device, its streams and its memory are as before."""


def run_eagerly(compute: Callable[[], None]) -> Replay:
    """A `Capture` that captures nothing. Kernels are compiled now all the same, and not while streams wait."""
    compute()
    return compute


def padded_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, 16, 32, then two steps a doubling; the last holds `max_num_seqs`, or is the largest worth a graph."""
    most = min(max_num_seqs, _MOST_SEQUENCES)
    steps = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384]
    return [*(size for size in steps if size < most), most]


class GraphedDecoder:
    """A `Model`: `decoder`, whose attention is `attention`, with its decode steps from graphs.

    `make_capture` is called for each new cache: what was captured before, and its memory, is let go first. Once a capture has
    failed, the rest of the steps, and all of those on a later cache, are run eagerly.
    """

    def __init__(
        self, decoder: Decoder, attention: DecodeBackend, make_capture: Callable[[], Capture], max_num_seqs: int, max_model_len: int
    ) -> None:
        self.config = decoder.config
        self._decoder = decoder
        self._attention = attention
        self._make_capture = make_capture
        self._gave_up = False
        self._sizes = padded_sizes(max_num_seqs)
        self._max_model_len = max_model_len
        self._replays: dict[tuple[int, int], Replay] = {}
        self.block_size = 0
        self._inputs: _Inputs | None = None
        self._logits = torch.empty(0)

    @property
    def block_groups(self) -> tuple[BlockGroup, ...]:
        return self._decoder.block_groups

    def block_bytes(self, block_size: int) -> int:
        return self._decoder.block_bytes(block_size)

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Makes the KV cache and, for it, all graphs. Raises what `Capture` raises but CaptureFailed.

        Chunks are run in each way that they are split, so that their kernels are compiled here and not while streams wait.
        """
        self._replays.clear()  # they hold the addresses of the cache that goes
        self._inputs, self._logits = None, torch.empty(0)
        self._decoder.allocate(num_blocks, block_size)
        self.block_size = block_size
        if num_blocks == 0:
            return
        blocks = -(-self._max_model_len // block_size)
        self._inputs = _Inputs(len(self.block_groups), self._sizes[-1], blocks, self._decoder.device)
        self._logits = torch.empty((self._sizes[-1], self.config.vocab_size), device=self._decoder.device)
        self._capture_all(self._inputs)
        for context in self._attention.chunk_contexts(self._max_model_len):
            self._try_chunk(context)

    def storage(self) -> list[torch.Tensor]:
        return self._decoder.storage()

    def forward(self, batch: Batch) -> torch.Tensor:
        """As `Decoder.forward`. Logits from a graph are good until the next step."""
        count = len(batch.context_lens)
        if len(batch.token_ids) != count or len(batch.sample_rows) != count or count > self._sizes[-1]:
            return self._decoder.forward(batch)
        return self._replay(batch, None)

    def decode(self, batch: Batch, token_ids: torch.Tensor) -> torch.Tensor:
        """See `model.port.DecodeModel`."""
        if len(batch.context_lens) > self._sizes[-1]:
            return self._decoder.decode(batch, token_ids)
        return self._replay(batch, token_ids)

    def erase(self, batch: Batch, rows: SequenceOf[int]) -> None:
        """See `model.port.DecodeModel`."""
        self._decoder.erase(batch, rows)

    def _replay(self, batch: Batch, token_ids: torch.Tensor | None) -> torch.Tensor:
        """Of a batch that fits; `token_ids` in place of the batch's own."""
        assert self._inputs is not None, "allocate comes first"
        count = len(batch.context_lens)
        size = self._sizes[bisect.bisect_left(self._sizes, count)]
        splits = self._attention.decode_splits(size, int(batch.context_lens.max()))
        self._inputs.fill(batch, size, token_ids)
        # One that is not there is not captured now, in the midst of service.
        run = self._replays.get((size, splits)) or partial(self._compute, size, splits)
        run()
        return self._logits[:count]

    def _capture_all(self, inputs: _Inputs) -> None:
        # The largest first: the smaller ones then find room in its memory.
        kinds = [
            (size, splits)
            for size in reversed(self._sizes)
            for splits in reversed(self._attention.all_decode_splits(size, self._max_model_len))
        ]
        capture = run_eagerly if self._gave_up else self._make_capture()
        for done, (size, splits) in enumerate(kinds, 1):
            compute = partial(self._compute, size, splits)
            inputs.clear(size)
            try:
                replay = capture(compute)
            except CaptureFailed as error:
                self._give_up(str(error), done - 1, len(kinds))
                capture = run_eagerly
                replay = capture(compute)
            self._replays[size, splits] = replay
            if done % _TOLD_EVERY == 0 or done == len(kinds):
                log.info("decode steps prepared", done=done, of=len(kinds), captured=capture is not run_eagerly)

    def _give_up(self, reason: str, captured: int, of: int) -> None:
        self._gave_up = True
        log.warning(
            "CUDA graphs unused",
            reason=reason,
            captured=captured,
            of=of,
            instead="decode steps are launched operation by operation, as with --enforce-eager, which takes longer",
        )

    @torch.inference_mode()
    def _try_chunk(self, context: int) -> None:
        """Two tokens at the end of so many, of which none is kept."""
        batch = Batch(
            token_ids=np.zeros(2, dtype=np.int32),
            positions=np.arange(context - 2, context, dtype=np.int32),
            slots=np.full((len(self.block_groups), 2), _NO_SLOT, dtype=np.int32),
            query_starts=np.array([0, 2], dtype=np.int32),
            context_lens=np.array([context], dtype=np.int32),
            block_tables=np.zeros((len(self.block_groups), 1, -(-context // self.block_size)), dtype=np.int32),
            sample_rows=np.zeros(1, dtype=np.int32),
            samples=[],
        )
        self._decoder.forward(batch)

    @torch.inference_mode()
    def _compute(self, size: int, splits: int) -> None:
        assert self._inputs is not None
        self._attention.prepare_decode(self._inputs.attention(size), splits)
        _, normed = self._decoder.hidden(self._inputs.column(_TOKENS, size), self._inputs.column(_POSITIONS, size))
        self._logits[:size].copy_(self._decoder.logits(normed))


class _Inputs:
    """What graphs read, at addresses that stay: for each row three numbers and, for each group of layers, a slot and a block table.

    All int32. The columns of a size lie side by side, so that they come up in one copy.
    """

    def __init__(self, groups: int, rows: int, blocks: int, device: torch.device) -> None:
        # The slots behind the three.
        self._num_columns = 3 + groups
        self._columns = torch.zeros(self._num_columns * rows, dtype=torch.int32, device=device)
        self._tables = torch.zeros((groups, rows, blocks), dtype=torch.int32, device=device)
        self._counts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._zeros = torch.zeros(rows, dtype=torch.int32, device=device)
        self._filled_with: Int32Array | None = None

    def clear(self, size: int) -> None:
        """All rows are padding, which reads and writes no block."""
        upload_into(self._of_size(size), self._padding(size))

    def fill(self, batch: Batch, size: int, token_ids: torch.Tensor | None) -> None:
        """The batch's rows, then padding up to `size`; what lies in tables beyond a row's context is never read."""
        _, count, width = batch.block_tables.shape
        columns = self._padding(size)
        columns[:, :count] = batch.token_ids, batch.positions, batch.context_lens, *batch.slots
        upload_into(self._of_size(size), columns)
        if token_ids is not None:
            self.column(_TOKENS, size)[:count].copy_(token_ids)
        # Of steps that follow one another it is the same array, made for all of them.
        if batch.block_tables is not self._filled_with:
            upload_into(self._tables[:, :count, :width], np.ascontiguousarray(batch.block_tables))
            self._filled_with = batch.block_tables

    def _padding(self, rows: int) -> Int32Array:
        columns = np.zeros((self._num_columns, rows), dtype=np.int32)
        columns[3:] = _NO_SLOT
        return columns

    def _of_size(self, size: int) -> torch.Tensor:
        return self._columns[: self._num_columns * size].view(self._num_columns, size)

    def column(self, index: int, size: int) -> torch.Tensor:
        return self._of_size(size)[index]

    def attention(self, size: int) -> DecodeInputs:
        return DecodeInputs(
            slots=self._of_size(size)[3:],
            context_lens=self.column(_CONTEXTS, size),
            block_tables=self._tables[:, :size],
            rows=self._counts[:size],
            firsts=self._zeros[:size],
            query_starts=self._counts[: size + 1],
        )
