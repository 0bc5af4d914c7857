"""How much memory the KV cache gets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tokenmill_executor.model.memory import control_group_limits, cpu_cache_bytes, cuda_cache_bytes, largest_batch, left_of_share
from tokenmill_executor.runner import Batch
from tokenmill_executor.sampling import TorchDraws

GIB = 1 << 30


@pytest.mark.parametrize(
    ("utilization", "others", "peak", "left"),
    [(0.9, 0, 16, 74), (0.9, 10, 16, 64), (0.5, 0, 16, 34), (1.0, 0, 0, 100), (0.2, 10, 16, 0)],
)
def test_the_kv_cache_gets_what_a_share_of_the_device_leaves(utilization: float, others: int, peak: int, left: int) -> None:
    """Of 100 GiB; as vLLM counts it, what others hold comes out of the share."""
    assert left_of_share(utilization, 100 * GIB, others * GIB, peak * GIB) == left * GIB


@pytest.mark.parametrize(
    ("groups", "files", "limits"),
    [
        ("0::/\n", {"memory.max": "2147483648\n"}, [2 << 30]),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "1024\n"}, [1024]),
        ("4:memory:/c\n1:cpu:/d\n0::/\n", {"memory/c/memory.limit_in_bytes": "7\n", "d/memory.max": "1\n"}, [7]),
        ("0::/a:b\n", {"a:b/memory.max": "5\n"}, [5]),
        ("", {}, []),
    ],
)
def test_a_container_s_limit_is_found(groups: str, files: dict[str, str], limits: list[int], tmp_path: Path) -> None:
    for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert control_group_limits(tmp_path) == limits


def test_the_default_is_a_quarter_of_the_memory_there_is(tmp_path: Path) -> None:
    """Of the machine's, where no control group has a limit; and here, whatever limits there are."""
    assert control_group_limits(tmp_path) == []
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert cpu_cache_bytes(tmp_path) == min(4 << 30, physical // 4)
    assert 0 < cpu_cache_bytes() <= min(4 << 30, physical // 4)


class FakeDevice:
    """Memory of a CUDA device as torch's allocator and the driver count it, and a `Model` on it; all in bytes.

    To capture takes `capturing` for a while; graphs keep `pool` in torch's allocator, `driver` outside of it; a step takes `step`.
    """

    block_groups = ()

    def __init__(self, capturing: int, pool: int, driver: int, step: int) -> None:
        self.capturing, self.pool, self.driver, self.step = capturing, pool, driver, step
        self.weights, self.context, self.total = 300, 50, 10_000
        self.cache = self.reserved_for_graphs = self.peak = self.of_driver = 0

    def block_bytes(self, block_size: int) -> int:
        return 2 * block_size

    def allocate(self, num_blocks: int, block_size: int) -> None:
        self.cache = num_blocks * self.block_bytes(block_size)
        self.reserved_for_graphs, self.of_driver = (self.pool, self.driver) if num_blocks else (0, 0)
        self._takes(self.capturing if num_blocks else 0)

    def forward(self, batch: Batch) -> torch.Tensor:
        self._takes(self.step)
        return torch.zeros(len(batch.sample_rows), 8)

    def storage(self) -> list[torch.Tensor]:
        return []

    def _takes(self, size: int) -> None:
        self.peak = max(self.peak, self.allocated() + size)

    def allocated(self, _: object = None) -> int:
        return self.weights + self.cache

    def reserved(self, _: object = None) -> int:
        return self.allocated() + self.reserved_for_graphs

    def reset_peak(self, _: object = None) -> None:
        self.peak = self.allocated()

    def info(self, _: object = None) -> tuple[int, int]:
        return self.total - self.reserved() - self.context - self.of_driver, self.total


@pytest.mark.parametrize(
    ("capturing", "pool", "driver", "step", "left"),
    [
        (0, 0, 0, 200, 9000 - 50 - 300 - 200),
        (10, 120, 30, 200, 9000 - 50 - 300 - 200 - 120 - 30),
        # Of a batch whose decodes take more than its largest step: what is tried at the start has to fit beside the cache, too.
        (500, 120, 30, 200, 9000 - 50 - 300 - 500 - 120 - 30),
    ],
    ids=["eager", "graphs", "decodes that take the most"],
)
def test_graphs_and_their_capture_count_when_memory_is_measured(
    monkeypatch: pytest.MonkeyPatch, capturing: int, pool: int, driver: int, step: int, left: int
) -> None:
    device = FakeDevice(capturing, pool, driver, step)
    for name, counted in {
        "memory_allocated": device.allocated,
        "memory_reserved": device.reserved,
        "reset_peak_memory_stats": device.reset_peak,
        "max_memory_allocated": lambda _: device.peak,
        "mem_get_info": device.info,
        "empty_cache": lambda: None,
        "synchronize": lambda _: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, counted)
    batch = largest_batch(64, 4, 64)
    assert cuda_cache_bytes(device, torch.device("cpu"), 0.9, batch, TorchDraws) == left  # type: ignore[arg-type]
    assert device.cache == 0
