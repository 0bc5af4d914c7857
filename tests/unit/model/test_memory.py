"""How much memory the KV cache gets."""

from __future__ import annotations

import pytest
from tokenmill_executor.model.memory import left_of_share

GIB = 1 << 30


@pytest.mark.parametrize(
    ("utilization", "others", "peak", "left"),
    [(0.9, 0, 16, 74), (0.9, 10, 16, 64), (0.5, 0, 16, 34), (1.0, 0, 0, 100), (0.2, 10, 16, 0)],
)
def test_the_kv_cache_gets_what_a_share_of_the_device_leaves(utilization: float, others: int, peak: int, left: int) -> None:
    """Of 100 GiB; as vLLM counts it, what others hold comes out of the share."""
    assert left_of_share(utilization, 100 * GIB, others * GIB, peak * GIB) == left * GIB
