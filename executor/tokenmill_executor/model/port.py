"""The port of a forward pass: torch on any device (`decoder.py`), or a backend that replaces all of it."""

from __future__ import annotations

from typing import Protocol

import torch

from tokenmill_executor.model.config import ModelConfig
from tokenmill_executor.runner import Batch, BlockGroup


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
