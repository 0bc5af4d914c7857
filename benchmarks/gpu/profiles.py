"""Where the device's time goes: the kernels of a step that take longest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu.shapes import Executor, Scale
from benchmarks.gpu.speed import Driver, fill, prefill_s
from benchmarks.gpu.table import Table


def decode(scale: Scale, executor: Executor, batch: int) -> Table:
    driver, steps = Driver(executor.engine), scale.plan_steps
    sequences = fill(driver, scale, batch)
    plan = partial(driver.step, sequences, steps, max_steps=steps)
    table = _profile(f"Kernels of a decode step of {batch}", scale, executor, plan, steps)
    driver.release_all()
    return table


def prefill(scale: Scale, executor: Executor) -> Table:
    chunk = max(scale.chunks)
    return _profile(f"Kernels of a prefill of {chunk}", scale, executor, lambda: prefill_s(scale, executor.engine, chunk))


def _profile(title: str, scale: Scale, executor: Executor, plan: Callable[[], object], steps: int = 1) -> Table:
    """Where the device's time goes in plans of so many steps."""
    from torch.profiler import ProfilerActivity, profile

    device = executor.device
    with profile(activities=[ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU]) as profiled:
        for _ in range(scale.repeats):
            plan()
    table = Table(title, ("kernel", "calls", "µs a step"), note="The twelve that take longest.")
    entries, taken = profiled.key_averages(), steps * scale.repeats
    spent = {entry.key: (entry.count / taken, _device_us(entry, device) / taken) for entry in entries}
    ordered = sorted(spent.items(), key=lambda item: -item[1][1])[:12]
    table.rows = [(name[:90].replace("|", "/"), calls, microseconds) for name, (calls, microseconds) in ordered]
    return table


def _device_us(entry: object, device: torch.device) -> float:
    name = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return float(getattr(entry, name))
