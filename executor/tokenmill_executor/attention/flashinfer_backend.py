"""Paged attention by the library FlashInfer (Ye et al., MLSys 2025), where it is installed.

It has run on no device: its calls are checked against a fake of the documented `BatchPrefillWithPagedKVCacheWrapper`
(`tests/unit/cuda/test_flashinfer.py`), which serves chunks, decodes and their mixtures. So it is never chosen but by name, and
decodes are not captured in graphs. It has neither quantised caches nor attention sinks.

Must not know: weights, sampling.
"""

from __future__ import annotations

import flashinfer
import numpy as np
import torch

from tokenmill_executor.attention.backend import AttentionBatch, CacheShape, PagedBackend
from tokenmill_executor.runner import Int32Array
from tokenmill_executor.upload import stage, upload

# As its documentation recommends.
_WORKSPACE_BYTES = 128 << 20


def why_not(shape: CacheShape) -> str | None:
    """None if it can serve such a cache, else the reason."""
    if shape.kv_format.largest is not None:
        return f"it has no {shape.kv_cache_dtype} cache with a scale for each token and head"
    if shape.sinks:
        return "it has no attention sinks"
    return None if shape.dtype in (torch.bfloat16, torch.float16) else f"it has no {shape.dtype} attention"


class FlashInferAttention(PagedBackend):
    """K and V of each place in a group, as its layout "NHD"; one plan of a step for each group of layers.

    Two sets of wrappers take turns: a plan is copied from pinned memory of its wrapper, and when the next one is made that copy may
    still wait for the step ahead of it.
    """

    def __init__(self, shape: CacheShape) -> None:
        super().__init__(shape)
        self._layout = shape.layout
        self._slots = torch.empty((0, 0), dtype=torch.int64)
        # What a step leaves there nobody reads.
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
        self._planned, self._next = (
            [flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD") for _ in self._layout.groups] for _ in range(2)
        )

    def prepare(self, batch: AttentionBatch) -> None:
        shape, size = self._shape, self._block_size
        self._slots = batch.slots_on_device
        self._planned, self._next = self._next, self._planned
        counts = -(-batch.context_lens // size)
        for group, tables, wrapper in zip(self._layout.groups, batch.block_tables, self._planned, strict=True):
            wrapper.plan(
                # It reads these itself, and would have the device wait for what lies there.
                self._host(batch.query_starts),
                self._host(np.concatenate([[0], np.cumsum(counts)])),
                # Blocks that a window has left behind are named 0 in the table, and masked.
                upload(np.concatenate([table[:count] for table, count in zip(tables, counts, strict=True)]), shape.device),
                self._host(batch.context_lens - (counts - 1) * size),
                shape.num_heads,
                shape.num_kv_heads,
                shape.head_dim,
                size,
                causal=True,
                sm_scale=shape.scale,
                # It counts the positions before the query's own.
                window_left=-1 if group.sliding_window is None else group.sliding_window - 1,
                q_data_type=shape.dtype,
                kv_data_type=shape.kv_format.dtype,
            )

    def _host(self, array: Int32Array) -> torch.Tensor:
        return stage(array.astype(np.int32), self._shape.device)

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        group, place = self._layout.places[layer]
        self._keys[place].write(self._slots[group], key)
        self._values[place].write(self._slots[group], value)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        group, place = self._layout.places[layer]
        out: torch.Tensor = self._planned[group].run(query, (self._keys[place].codes, self._values[place].codes))
        return out
