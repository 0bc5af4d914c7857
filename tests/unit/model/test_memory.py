"""How much memory the KV cache gets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tokenmill_executor.model.memory import control_group_limits, cpu_cache_bytes, left_of_share

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
