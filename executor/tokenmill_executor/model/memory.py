"""How much memory the KV cache may take: on a CPU a number of bytes, on CUDA what a trial step leaves of a share of the device.

Source of the CUDA rule: vLLM's `gpu_memory_utilization`.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from tokenmill_executor.model.port import Model
from tokenmill_executor.runner import Batch, SamplingInput, SamplingParams
from tokenmill_executor.sampling import MakeDraws, Sampler

_MOST_CPU_BYTES = 4 << 30
_TRIAL_BLOCK_SIZE = 16


def physical_bytes() -> int:
    """That the machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cpu_cache_bytes(root: Path = Path("/")) -> int:
    """Without a setting: a quarter of the memory that the machine has or the container may use, at most 4 GiB."""
    return min(_MOST_CPU_BYTES, min([physical_bytes(), *control_group_limits(root)]) // 4)


def control_group_limits(root: Path = Path("/")) -> list[int]:
    """Bytes that the control groups of this process, of either version, and those around them allow it; see cgroups(7)."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    limits = []
    for _, controllers, group in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        top, name = ("memory", "memory.limit_in_bytes") if controllers else ("", "memory.max")
        around = Path(group.lstrip("/"))
        for each in (around, *around.parents):
            with suppress(OSError, ValueError):  # a limit that is not there, or "max"
                limits.append(int((root / "sys/fs/cgroup" / top / each / name).read_text(encoding="ascii")))
    return limits


def cuda_cache_bytes(model: Model, device: torch.device, utilization: float, batch: Batch, make_draws: MakeDraws) -> int:
    """That share of the device's memory, less what others hold of it and what the step of the largest `batch` needs at its peak."""
    num_blocks = int(batch.block_tables.max()) + 1
    # To capture graphs, or to try what is run without them, takes memory too, and again beside the cache to come.
    torch.cuda.reset_peak_memory_stats(device)
    model.allocate(num_blocks, _TRIAL_BLOCK_SIZE)
    torch.cuda.empty_cache()
    # What is held now though no tensor has it is that of captured graphs, which lasts as long as they do.
    graph_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    with torch.inference_mode():
        Sampler((), make_draws=make_draws).sample(model.forward(batch), batch.samples)
    torch.cuda.synchronize(device)
    peak_bytes = graph_bytes + torch.cuda.max_memory_allocated(device) - num_blocks * model.block_bytes(_TRIAL_BLOCK_SIZE)
    # Before the graphs go: what the driver keeps for them is as if others held it.
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    others_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved(device)
    model.allocate(0, _TRIAL_BLOCK_SIZE)
    torch.cuda.empty_cache()
    return left_of_share(utilization, total_bytes, others_bytes, peak_bytes)


def left_of_share(utilization: float, total_bytes: int, others_bytes: int, peak_bytes: int) -> int:
    """What that share of a device's memory leaves for the KV cache beside others' and this process's own peak."""
    return max(0, int(total_bytes * utilization) - others_bytes - peak_bytes)


def largest_batch(max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, groups: int = 1) -> Batch:
    """A step of the most tokens in the most sequences, of equal length and each in its own blocks, that all sample with top-p."""
    sequences = min(max_num_seqs, max_num_batched_tokens)
    length = min(max_num_batched_tokens // sequences, max_model_len)
    blocks = -(-length // _TRIAL_BLOCK_SIZE)
    tables = np.arange(groups * sequences * blocks, dtype=np.int32).reshape(groups, sequences, blocks)
    positions = np.tile(np.arange(length, dtype=np.int32), sequences)
    rows = np.repeat(np.arange(sequences), length)
    params = SamplingParams(max_tokens=1, seed=0, top_p=0.9)
    return Batch(
        token_ids=np.zeros(sequences * length, dtype=np.int32),
        positions=positions,
        slots=tables[:, rows, positions // _TRIAL_BLOCK_SIZE] * np.int32(_TRIAL_BLOCK_SIZE)
        + positions % np.int32(_TRIAL_BLOCK_SIZE),
        query_starts=np.arange(0, sequences * length + 1, length, dtype=np.int32),
        context_lens=np.full(sequences, length, dtype=np.int32),
        block_tables=tables,
        sample_rows=np.arange(sequences, dtype=np.int32),
        samples=[SamplingInput(row, [0], 1, params) for row in range(sequences)],
    )
