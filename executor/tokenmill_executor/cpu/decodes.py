"""Decode steps one after another in one call of the C++ kernels: forward passes, tokens and the inputs that these become.

Nothing of Python runs between two steps: after a forward pass none of it is in the processor's caches, and it takes long.
"""

from __future__ import annotations

import math

from tokenmill_executor.cpu import library
from tokenmill_executor.cpu.model import CpuModel
from tokenmill_executor.interrupt import Interrupt
from tokenmill_executor.runner import Batch, StepOutput
from tokenmill_executor.sampling import NOT_A_NUMBER, SamplingKernels, records_of_steps


class CpuDecodes:
    """Of one model, with the kernels that choose its tokens."""

    def __init__(self, model: CpuModel, kernels: SamplingKernels) -> None:
        self._model = model
        self._kernels = kernels

    def steps(self, batch: Batch, most: int, interrupt: Interrupt) -> list[StepOutput]:
        """See `model.port.Decodes`. Ends with the step in which a sequence ends or cannot be sampled, or that was interrupted."""
        logits = self._model.room_for_logits(len(batch.samples))
        rows = records_of_steps(logits, batch.samples, most)
        ends = [sample.ends for sample in batch.samples]
        record = library.decodes_record(rows, ends, len(batch.block_tables), interrupt.address)
        taken = self._model.decode(batch, record, logits, self._kernels.room(logits.shape[1]))
        forward_s, sample_s = record.forward_s / taken, record.sample_s / taken
        outputs = [StepOutput(tokens, forward_s=forward_s, sample_s=sample_s) for tokens in rows["token"][:taken].tolist()]
        largest = rows["largest"][taken - 1].tolist()
        outputs[-1].errors = {row: NOT_A_NUMBER for row, value in enumerate(largest) if not math.isfinite(value)}
        return outputs
