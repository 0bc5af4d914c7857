"""Chooses tokens with the C++ kernels (cpu/csrc/sampling.cpp), from logits on a CPU, many times faster than torch does.

The rules are those of `draw`. Exponentials differ in their last digits, so once in a long time a seeded draw differs from torch's;
from its own it never does, whatever the batch, the threads and the instruction set.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from tokenmill_executor.cpu import library, support
from tokenmill_executor.runner import SampledLogprobs, SamplingInput
from tokenmill_executor.sampling.choices import Choices, is_greedy, is_plain
from tokenmill_executor.sampling.edits import edit_logits, edits_logits
from tokenmill_executor.sampling.uniform import uniforms_of_steps
from tokenmill_executor.upload import integers

Records = npt.NDArray[np.void]


def available_kernels(threads: int) -> SamplingKernels | None:
    """None where they are not built or the processor cannot run them."""
    return SamplingKernels(threads) if support.available() is None else None


class SamplingKernels:
    """`instruction_set` None is the best. Raises OSError where that is not built."""

    def __init__(self, threads: int, instruction_set: str | None = None) -> None:
        self._threads = threads
        self._library = library.load(instruction_set or library.best_instruction_set(library.processor_flags()) or "")
        self._workspace = np.empty(0, np.uint8)
        self._edited = torch.empty((0, 0))
        self._plain: Records = np.zeros(0, library.SAMPLE_ROW)
        self._plain_place = (0, 0, 0)  # of the rows that these point at: address, count, stride

    def choose(self, logits: torch.Tensor, samples: Sequence[SamplingInput], eos_token_ids: tuple[int, ...]) -> Choices:
        """[rows, vocab_size] float32, which stay as they are."""
        rows = logits if logits.stride(1) == 1 else logits.contiguous()
        records = records_of_steps(rows, samples, 1)[0]
        self._edit(rows, samples, eos_token_ids, records)
        width = max(0, min(int(records["top"].max()), rows.shape[1]))
        top_tokens, top_logprobs = np.empty((len(rows), width), np.int32), np.empty((len(rows), width), np.float32)
        self._fill_in(records, rows.shape[1], width, top_tokens.ctypes.data, top_logprobs.ctypes.data)
        asked = [row for row, sample in enumerate(samples) if sample.params.logprobs is not None]
        logprobs = {row: _logprobs(records[row], top_tokens[row], top_logprobs[row]) for row in asked}
        return Choices(records["largest"].tolist(), records["token"].tolist(), logprobs)

    def choose_largest(self, logits: torch.Tensor) -> Choices:
        """As `choose`, where all samples are plain: there is nothing to ask of any of them.

        After a step of the model none of this code is in the processor's caches: what is the same the next time is kept.
        """
        rows = logits if logits.stride(1) == 1 else logits.contiguous()
        place = (rows.data_ptr(), rows.shape[0], rows.stride(0))
        if place != self._plain_place:
            self._plain, self._plain_place = _plain_records(rows, 1)[0], place
        self._fill_in(self._plain, rows.shape[1])
        return Choices(self._plain["largest"].tolist(), self._plain["token"].tolist(), {})

    def _fill_in(self, records: Records, vocab_size: int, width: int = 0, top_tokens: int = 0, top_logprobs: int = 0) -> None:
        """Addresses of [rows, width] arrays, which are not touched where the width is 0."""
        room = self.room(vocab_size)
        self._library.tm_sample(records.ctypes.data, len(records), vocab_size, width, top_tokens, top_logprobs, self._threads, room)

    def _edit(
        self, logits: torch.Tensor, samples: Sequence[SamplingInput], eos_token_ids: tuple[int, ...], records: Records
    ) -> None:
        """Points the records of edited rows at copies of them, in memory that is kept: new pages cost more than the copy."""
        rows = [row for row, sample in enumerate(samples) if edits_logits(sample)]
        if not rows:
            return
        if self._edited.shape[1] != logits.shape[1] or len(self._edited) < len(rows):
            self._edited = torch.empty((2 * len(rows), logits.shape[1]))
        edited = self._edited[: len(rows)]
        torch.index_select(logits, 0, integers(rows, logits.device), out=edited)
        edit_logits(edited, [samples[row] for row in rows], eos_token_ids)
        records["logits"][rows] = _pointers(edited)

    def room(self, vocab_size: int) -> int:
        """The address of the memory that the kernels choose in."""
        size = self._library.tm_sample_workspace_bytes(vocab_size, self._threads)
        if size > len(self._workspace):
            self._workspace = np.empty(size, np.uint8)
        return self._workspace.ctypes.data


def records_of_steps(logits: torch.Tensor, samples: Sequence[SamplingInput], steps: int) -> Records:
    """[steps, rows]: what is asked for in this step and those that follow, whose logits come to the same place."""
    if all(map(is_plain, samples)):
        return _plain_records(logits, steps)
    params = [sample.params for sample in samples]
    records = np.empty((steps, len(samples)), library.SAMPLE_ROW)
    records["logits"] = _pointers(logits)
    records["temperature"] = [0.0 if is_greedy(param) else param.temperature for param in params]
    records["uniform"] = uniforms_of_steps(samples, steps)
    records["top_p"] = [param.top_p for param in params]
    records["min_p"] = [param.min_p for param in params]
    records["top_k"] = [param.top_k if param.top_k < logits.shape[1] else 0 for param in params]
    records["top"] = [-1 if param.logprobs is None else param.logprobs for param in params]
    return records


def _plain_records(logits: torch.Tensor, steps: int) -> Records:
    """[steps, rows], which ask for nothing but the largest."""
    records = np.zeros((steps, len(logits)), library.SAMPLE_ROW)
    records["logits"] = _pointers(logits)
    records["top"] = -1
    return records


def _pointers(rows: torch.Tensor) -> npt.NDArray[np.uint64]:
    row_bytes = rows.stride(0) * rows.itemsize
    return np.arange(len(rows), dtype=np.uint64) * np.uint64(row_bytes) + np.uint64(rows.data_ptr())


def _logprobs(record: np.void, tokens: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]) -> SampledLogprobs:
    count = int(record["top"])
    return SampledLogprobs(float(record["logprob"]), tuple(zip(tokens[:count].tolist(), logprobs[:count].tolist(), strict=True)))
