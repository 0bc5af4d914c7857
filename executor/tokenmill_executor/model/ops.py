"""The small operations between matrix products, as a port: torch's own here, fused kernels for CUDA in `triton_ops.py`.

Must not know: weights' names, attention, the cache.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own usage

from tokenmill_executor.model.rope import rotate


class Ops(Protocol):
    """What is given may be overwritten where a method says so; use what is returned."""

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm (Zhang and Sennrich 2019) over the last dimension of [T, size] or [T, heads, size], in float32 inside.

        Weights in float32 multiply before the result is rounded.
        """

    def add_rms_norm(
        self, hidden: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, size] → hidden + update, and its norm. May overwrite `hidden`."""

    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both [T, heads, head_dim], by cos and sin of [T, 1, head_dim / 2]. May overwrite them."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 * size] → silu(first half) * second half, of SwiGLU (Shazeer 2020)."""

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 * size] → gelu(first half) * second half, of GeGLU (Shazeer 2020), by the formula with tanh."""


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `Ops`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


class TorchOps:
    """For any device."""

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = rows.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (weight * wide.to(weight.dtype)).to(rows.dtype)

    def add_rms_norm(
        self, hidden: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = hidden + update
        return hidden, self.rms_norm(hidden, weight, eps)

    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rotate(query, cos, sin), rotate(key, cos, sin)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gelu_mul(gate_up)
