"""The operations of `ops.py` as one Triton kernel each, for CUDA: in a decode step a launch costs as much as what it does.

All compute in float32 inside and round once, where torch's own round after each operation.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill_executor.model.ops import gelu_mul

_SILU_BLOCK = 1024


@triton.jit
def rms_norm_kernel(
    out,  # [T, heads, size]
    rows,  # [T, heads, size], heads side by side
    update,  # [T, size], added to the rows first, which are overwritten; only with ADD
    weight,  # [size]
    row_stride,
    eps,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    ADD: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = tl.arange(0, SIZE_PADDED)
    mask = places < SIZE
    row = rows + token * row_stride + head * SIZE + places
    values = tl.load(row, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(update + token * SIZE + places, mask=mask, other=0.0).to(tl.float32)
        # The norm is that of what is stored, rounded.
        rounded = values.to(rows.dtype.element_ty)
        tl.store(row, rounded, mask=mask)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    weights = tl.load(weight + places, mask=mask, other=0.0).to(tl.float32)
    normalized = (values * scale * weights).to(out.dtype.element_ty)
    tl.store(out + (token * HEADS + head) * SIZE + places, normalized, mask=mask)


@triton.jit
def rotate_kernel(
    query,  # [T, NUM_HEADS, 2 * HALF], heads side by side; overwritten, as is `key`
    key,  # [T, number of KV heads, 2 * HALF]
    cos,  # [T, HALF]
    sin,
    query_stride,
    key_stride,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):
    """A program for each token and head, of queries first, then of keys."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = tl.arange(0, HALF_PADDED)
    mask = places < HALF
    if head < NUM_HEADS:
        first = query + token * query_stride + head * (2 * HALF) + places
    else:
        first = key + token * key_stride + (head - NUM_HEADS) * (2 * HALF) + places
    c = tl.load(cos + token * HALF + places, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + token * HALF + places, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(first + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(first, (x * c - y * s).to(query.dtype.element_ty), mask=mask)
    tl.store(first + HALF, (y * c + x * s).to(query.dtype.element_ty), mask=mask)


@triton.jit
def silu_mul_kernel(
    out,  # [T, size]
    gate_up,  # [T, 2 * size]
    size,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = places < size
    gate = tl.load(gate_up + token * 2 * size + places, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * size + size + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * size + places, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=mask)


class TritonOps:
    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._norm(rows, None, weight, eps)

    def add_rms_norm(
        self, hidden: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden, self._norm(hidden, update, weight, eps)

    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, num_heads, head_dim = query.shape
        rotate_kernel[(tokens, num_heads + key.shape[1])](
            query,
            key,
            cos,
            sin,
            query.stride(0),
            key.stride(0),
            NUM_HEADS=num_heads,
            HALF=head_dim // 2,
            HALF_PADDED=triton.next_power_of_2(head_dim // 2),
            num_warps=1,
        )
        return query, key

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((tokens, size))
        silu_mul_kernel[(tokens, triton.cdiv(size, _SILU_BLOCK))](out, gate_up, size, BLOCK=_SILU_BLOCK)
        return out

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gelu_mul(gate_up)

    @staticmethod
    def _norm(rows: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
        heads, size = (rows.shape[1] if rows.dim() == 3 else 1), rows.shape[-1]
        out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        padded = triton.next_power_of_2(size)
        rms_norm_kernel[(len(rows), heads)](
            out,
            rows,
            rows if update is None else update,
            weight,
            rows.stride(0),
            eps,
            HEADS=heads,
            SIZE=size,
            SIZE_PADDED=padded,
            ADD=update is not None,
            num_warps=max(1, min(16, padded // 512)),
        )
        return out
