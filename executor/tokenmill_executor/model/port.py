"""The port of a forward pass: torch on any device (`decoder.py`), or a backend that replaces all of it."""

from __future__ import annotations

from typing import Protocol

import torch

from tokenmill_executor.interrupt import Interrupt
from tokenmill_executor.model.config import ModelConfig
from tokenmill_executor.runner import Batch, BlockGroup, StepOutput


class Model(Protocol):
    config: ModelConfig

    @property
    def block_groups(self) -> tuple[BlockGroup, ...]:
        """Of layers that share KV blocks."""

    def block_bytes(self, block_size: int) -> int:
        """K and V of a group's layers for one block."""

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Makes the KV cache, dropping an earlier one."""

    def storage(self) -> list[torch.Tensor]:
        """The tensors of the KV cache, [num_blocks, ...] each and contiguous: all that a block holds is in its rows."""

    def forward(self, batch: Batch) -> torch.Tensor:
        """One step. → logits of the rows that sample, [len(sample_rows), vocab_size] float32."""


class Decodes(Protocol):
    """Takes decode steps one after another, each of what the one before has sampled."""

    def steps(self, batch: Batch, most: int, interrupt: Interrupt) -> list[StepOutput]:
        """As `Runner.steps`, of sequences that only draw (see `sampling.only_draws`). Times and errors are filled in."""
