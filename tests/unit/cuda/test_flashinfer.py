"""FlashInfer's backend against a fake of the library, which computes over the page table it was given, and asserts its rules.

It needs a GPU and is not installed here; what a plan and a run are called with is what can be checked.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import structlog
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own usage
from tokenmill_executor.attention.backend import AttentionBatch, CacheShape
from tokenmill_executor.attention.choice import choose_attention
from tokenmill_executor.attention.reference import ReferenceAttention
from tokenmill_executor.model.config import ModelError

from tests.fakes.batches import Blocks

CPU = torch.device("cpu")
SHAPE = CacheShape(3, 6, 2, 64, (None, 9, None), torch.bfloat16, CPU)


class FakeWrapper:
    """Of the documented `BatchPrefillWithPagedKVCacheWrapper`: what `plan` is given is used by each `run`, in plain torch."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"
        self.plans = 0

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        given = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(tensor.dtype == torch.int32 for tensor in given)
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert int(paged_kv_indptr[-1]) == len(paged_kv_indices)
        assert bool(((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all())
        assert causal
        self.given, self.heads, self.page_size = given, (num_qo_heads, num_kv_heads, head_dim_qk), page_size
        self.scale, self.window_left, self.types = sm_scale, window_left, (q_data_type, kv_data_type)
        self.plans += 1

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        num_heads, kv_heads, head_dim = self.heads
        assert q.shape[1:] == (num_heads, head_dim)
        assert (q.dtype, paged_kv_cache[0].dtype) == self.types
        assert all(cache.shape[1:] == (self.page_size, kv_heads, head_dim) for cache in paged_kv_cache)
        starts, pages, indices, last = (tensor.tolist() for tensor in self.given)
        out = torch.empty_like(q)
        for row in range(len(last)):
            keys = (pages[row + 1] - pages[row] - 1) * self.page_size + last[row]
            k, v = (cache[indices[pages[row] : pages[row + 1]]].flatten(0, 1)[:keys] for cache in paged_kv_cache)
            queries = q[starts[row] : starts[row + 1]]
            distance = torch.arange(keys - len(queries), keys)[:, None] - torch.arange(keys)
            seen = (distance >= 0) & ((distance <= self.window_left) | (self.window_left < 0))
            query, key, value = (heads.transpose(0, 1).float() for heads in (queries, k, v))
            found = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=self.scale, enable_gqa=True)
            out[starts[row] : starts[row + 1]] = found.transpose(0, 1).to(q.dtype)
        return out


@pytest.fixture
def backend_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    fake = ModuleType("flashinfer")
    fake.BatchPrefillWithPagedKVCacheWrapper = FakeWrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.delitem(sys.modules, "tokenmill_executor.attention.flashinfer_backend", raising=False)
    module = importlib.import_module("tokenmill_executor.attention.flashinfer_backend")
    monkeypatch.setattr(module, "_WORKSPACE_BYTES", 16)
    yield module
    sys.modules.pop("tokenmill_executor.attention.flashinfer_backend", None)


def test_chunks_decodes_and_windows_are_planned_as_the_reference_computes_them(backend_module: Any) -> None:
    found, expected = backend_module.FlashInferAttention(SHAPE), ReferenceAttention(SHAPE)
    blocks = Blocks(64, 4, groups=len(SHAPE.layout.groups))
    generator = torch.Generator().manual_seed(0)
    for backend in (found, expected):
        backend.allocate(64, 4)
    long, short = blocks.track([1] * 40), blocks.track([1] * 8)
    for counts in ((30, 7), (9, 1), (1,)):
        batch = AttentionBatch.of(blocks.batch(list(zip((long, short), counts, strict=False))), CPU)
        found.prepare(batch)
        expected.prepare(batch)
        query, key, value = torch.randn(3, sum(counts), 6, 64, generator=generator).bfloat16()
        for layer in range(3):
            for backend in (found, expected):
                backend.write_kv(layer, key[:, :2], value[:, :2])
            torch.testing.assert_close(found.attend(layer, query), expected.attend(layer, query), rtol=2e-2, atol=2e-2)
    # Once a step, not once a layer, and by another wrapper than for the step ahead, which may still have to copy its plan.
    assert [[wrapper.plans for wrapper in turn] for turn in (found._planned, found._next)] == [[2] * 3, [1] * 3]


def test_it_is_chosen_by_name_where_it_can_serve(backend_module: Any) -> None:
    assert isinstance(choose_attention("flashinfer", SHAPE), backend_module.FlashInferAttention)
    with structlog.testing.capture_logs() as logs:
        assert type(choose_attention("auto", SHAPE, num_processors=1)).__name__ == "TritonAttention"
    assert logs == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_cache_dtype": "int8"}, "no int8 cache"),
        ({"sinks": 2}, "no attention sinks"),
        ({"dtype": torch.float32}, "no torch.float32 attention"),
    ],
    ids=str,
)
def test_what_it_cannot_serve_triton_does_and_a_line_says_so(backend_module: Any, changes: dict[str, Any], reason: str) -> None:
    with structlog.testing.capture_logs() as logs:
        backend = choose_attention("flashinfer", replace(SHAPE, **changes), num_processors=1)
    assert type(backend).__name__ == "TritonAttention"
    assert [(line["event"], reason in line["reason"]) for line in logs] == [("FlashInfer unused", True)]


def test_without_the_package_triton_serves() -> None:
    with structlog.testing.capture_logs() as logs:
        assert type(choose_attention("flashinfer", SHAPE, num_processors=1)).__name__ == "TritonAttention"
    assert [line["event"] for line in logs] == ["FlashInfer unused"]


def test_a_backend_that_there_is_not_is_refused() -> None:
    with pytest.raises(ModelError, match="attention backend 'sdpa' is not supported; choose auto, reference, triton or flashinfer"):
        choose_attention("sdpa", SHAPE)
