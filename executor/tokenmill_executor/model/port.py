"""The port of a forward pass: torch on any device (`decoder.py`), or a backend that replaces all of it."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol, runtime_checkable

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


@runtime_checkable
class DecodeModel(Model, Protocol):
    """A model that takes a decode step while the host does not yet know its tokens. `block_size` is that of its KV cache."""

    block_size: int

    def decode(self, batch: Batch, token_ids: torch.Tensor) -> torch.Tensor:
        """A step of decodes that all sample, of these tokens, [S] on the device, and not the batch's. Does not wait for the device.

        Logits as of `forward`, good until the next step. What a row stores that is not numbers stays there until `erase`.
        """

    def erase(self, batch: Batch, rows: SequenceOf[int]) -> None:
        """Has the cache forget what a `decode` of this batch has stored for these rows, since it is not numbers."""


class Decodes(Protocol):
    """Takes decode steps one after another, each of what the one before has sampled."""

    def steps(self, batch: Batch, most: int, interrupt: Interrupt) -> list[StepOutput]:
        """As `Runner.steps`, of sequences that only draw (see `sampling.only_draws`). Times and errors are filled in."""
