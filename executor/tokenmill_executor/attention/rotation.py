"""int4 K and V in turned coordinates: a head's few large numbers are spread over all, which 16 codes hold far better.

Q and K turned alike have the same products, and an output is turned back. Source: QuaRot (Ashkboos et al., NeurIPS 2024). On
SmolLM2-135M the divergence from an unquantised cache falls to a quarter; `benchmarks/cpu_quality.py` measures what is left of it.

Must not know: how the cache is laid out, where it lies.
"""

from __future__ import annotations

import torch

from tokenmill_executor.attention.backend import AttentionBackend, AttentionBatch, CacheShape, DecodeBackend, DecodeInputs


def hadamard(size: int) -> torch.Tensor:
    """[size, size], orthogonal and symmetric: on its diagonal Hadamard matrices of the largest power of two that divides `size`."""
    block = torch.ones(1, 1)
    while size % (2 * len(block)) == 0:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)]) / 2**0.5
    return torch.kron(torch.eye(size // len(block)), block)


def rotated(backend: AttentionBackend, shape: CacheShape) -> AttentionBackend:
    """The backend itself, or for int4 with heads turned."""
    return RotatedAttention(backend, shape) if shape.kv_cache_dtype == "int4" else backend


def rotated_decodes(backend: DecodeBackend, shape: CacheShape) -> DecodeBackend:
    """As `rotated`."""
    return RotatedDecodeAttention(backend, shape) if shape.kv_cache_dtype == "int4" else backend


class RotatedAttention:
    """Any backend, with heads turned on the way in and back on the way out."""

    def __init__(self, inner: AttentionBackend, shape: CacheShape) -> None:
        self._inner = inner
        self._turn = hadamard(shape.head_dim).to(shape.device, shape.dtype)

    def allocate(self, num_blocks: int, block_size: int) -> None:
        self._inner.allocate(num_blocks, block_size)

    def storage(self) -> list[torch.Tensor]:
        return self._inner.storage()

    def prepare(self, batch: AttentionBatch) -> None:
        self._inner.prepare(batch)

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._inner.write_kv(layer, key @ self._turn, value @ self._turn)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        return self._inner.attend(layer, query @ self._turn) @ self._turn

    def erase(self, slots: torch.Tensor) -> None:
        self._inner.erase(slots)


class RotatedDecodeAttention(RotatedAttention):
    """The same for a backend whose decodes can be captured."""

    def __init__(self, inner: DecodeBackend, shape: CacheShape) -> None:
        super().__init__(inner, shape)
        self._decodes = inner

    def decode_splits(self, num_sequences: int, max_context: int) -> int:
        return self._decodes.decode_splits(num_sequences, max_context)

    def all_decode_splits(self, num_sequences: int, max_context: int) -> list[int]:
        return self._decodes.all_decode_splits(num_sequences, max_context)

    def chunk_contexts(self, max_context: int) -> list[int]:
        return self._decodes.chunk_contexts(max_context)

    def prepare_decode(self, inputs: DecodeInputs, splits: int) -> None:
        self._decodes.prepare_decode(inputs, splits)
