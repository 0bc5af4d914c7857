"""The memory of paged K and V: written by slot, gathered by block, in one of the formats of `quantization.py`.

Must not know: attention, layers, sequences.
"""

from __future__ import annotations

import torch

from tokenmill_executor.attention.quantization import KvFormat, dequantize, quantize


class PagedHeads:
    """K or V of all blocks, for the layers that take turns with one place in a block.

    - codes: [num_blocks, block_size, num_kv_heads, width].
    - scales: [num_blocks, block_size, num_kv_heads] float32, None where numbers are kept as they are.

    Zeros at first, for the reason given at `AttentionBackend.erase`.
    """

    __slots__ = ("_kind", "codes", "scales")

    def __init__(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, kind: KvFormat, device: torch.device
    ) -> None:
        self._kind = kind
        size = (num_blocks, block_size, num_kv_heads)
        self.codes = torch.zeros((*size, kind.width(head_dim)), dtype=kind.dtype, device=device)
        self.scales = None if kind.largest is None else torch.zeros(size, device=device)

    def storage(self) -> list[torch.Tensor]:
        """All that a block holds: [num_blocks, ...] each, contiguous, of types that torch can index."""
        return [_bytes(self.codes)] if self.scales is None else [_bytes(self.codes), self.scales]

    def write(self, slots: torch.Tensor, heads: torch.Tensor) -> None:
        """[T] and [T, num_kv_heads, head_dim]."""
        if self.scales is None:
            self.codes.flatten(0, 1).index_copy_(0, slots, heads.to(self._kind.dtype))
            return
        codes, scales = quantize(heads, self._kind)
        _bytes(self.codes).flatten(0, 1).index_copy_(0, slots, _bytes(codes))
        self.scales.flatten(0, 1).index_copy_(0, slots, scales)

    def gather(self, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[n] → [n, block_size, num_kv_heads, head_dim]."""
        if self.scales is None:
            return self.codes.index_select(0, blocks).to(dtype)
        codes = _bytes(self.codes).index_select(0, blocks).view(self._kind.dtype)
        return dequantize(codes, self.scales.index_select(0, blocks), self._kind, dtype)

    def erase(self, slots: torch.Tensor) -> None:
        for tensor in self.storage():
            tensor.flatten(0, 1).index_fill_(0, slots, 0)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """As integers where torch does not index elements of the type."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
