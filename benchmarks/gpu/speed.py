"""How near to the device's bounds is the executor? The bounds are measured in the same run; steps go through the engine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from tokenmill_executor.engine import Engine
from tokenmill_executor.records import Admission, Plan, Result
from tokenmill_executor.runner import SamplingParams

from benchmarks.gpu.shapes import BLOCK_SIZE, Executor, Scale, kv_bytes, product_weights
from benchmarks.gpu.table import Table
from tests.fakes.batches import Blocks

TOKEN_BUDGET = 8192
_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bytes a second, read and written; operations a second of a matrix product."""

    copy_rate: float
    matrix_rate: float


@dataclass(slots=True)
class Driver:
    """Plans steps as a scheduler would, without one."""

    engine: Engine
    plan_id: int = 0
    sequence_id: int = 0
    known: list[int] = field(default_factory=list)

    def admission(self, prompt: int, output: int, vocab_size: int) -> Admission:
        self.sequence_id += 1
        self.known.append(self.sequence_id)
        tokens = [(self.sequence_id * 31 + place * 7) % (vocab_size - 10) + 5 for place in range(prompt)]
        params = SamplingParams(max_tokens=output, seed=0, temperature=0.0, ignore_eos=True)
        return Admission(self.sequence_id, tokens, prompt, params)

    def step(self, advance: Sequence[int], most: int, admit: Sequence[Admission] = (), max_steps: int = 1) -> Result:
        self.plan_id += 1
        result = self.engine.carry_out(Plan(0, self.plan_id, (), admit, advance, [most] * len(advance), max_steps))
        assert not result.faults, result.faults
        return result

    def release_all(self) -> None:
        self.plan_id += 1
        self.engine.carry_out(Plan(0, self.plan_id, self.known))
        self.known = []


def measure_bounds(scale: Scale, dtype: torch.dtype, device: torch.device) -> Bounds:
    source = torch.ones(scale.copy_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy_s = _least(lambda: target.copy_(source), device)
    left = torch.randn(scale.matrix, scale.matrix, device=device).to(dtype)
    product_s = _least(lambda: left @ left, device)
    return Bounds(2 * scale.copy_bytes / copy_s, 2 * scale.matrix**3 / product_s)


def bounds_table(scale: Scale, dtype: torch.dtype, bounds: Bounds) -> Table:
    table = Table("The device", ("what", "rate"))
    table.rows = [
        ("copy, TB/s read and written", bounds.copy_rate / 1e12),
        (f"product of {scale.matrix} × {scale.matrix}, {dtype}, Tflop/s".replace("torch.", ""), bounds.matrix_rate / 1e12),
    ]
    return table


def start(make: Callable[[], Executor]) -> Table:
    started_s = time.monotonic()
    make()
    return Table("Start", ("what", "s"), [("weights, cache, kernels and graphs", time.monotonic() - started_s)])


def _least(job: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(_ROUNDS):
        wait(device)
        started_s = time.perf_counter()
        job()
        wait(device)
        times.append(time.perf_counter() - started_s)
    return min(times)


def wait(device: torch.device) -> None:
    """Until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def decode(scale: Scale, executor: Executor, bounds: Bounds) -> Table:
    """Steps of one token for each sequence, through the engine; and what the device needs for them when it never waits."""
    together, alone = f"in plans of {scale.plan_steps}", "in plans of one"
    table = Table(
        f"Decode, {scale.context} tokens of context each",
        (
            "sequences",
            "steps",
            "ms a step",
            "device ms",
            "bound ms",
            "step's share of the bound",
            "device's share",
            "gap",
            "tokens/s",
        ),
        note="Medians. Bound: weights and KV over the copy rate. Device: forward passes without a pause between them. "
        "Gap: the part of a step in which no forward pass runs. Of the steps of one plan the next is launched before the host has "
        "seen the tokens of the one that runs; the last one of a plan is waited for.",
    )
    for batch in scale.decode_batches:
        device_s = _device_s(scale, executor, batch)
        weights = product_weights(scale.config) * executor.dtype.itemsize
        bound_s = (weights + batch * scale.context * kv_bytes(scale.config, executor.dtype)) / bounds.copy_rate
        for name, walls in zip((together, alone), _decode_times(scale, executor.engine, batch), strict=True):
            wall_s = statistics.median(walls)
            gap = max(0.0, 1 - device_s / wall_s)
            shares = (bound_s / wall_s, bound_s / device_s)
            table.rows.append((batch, name, 1e3 * wall_s, 1e3 * device_s, 1e3 * bound_s, *shares, gap, batch / wall_s))
            table.raw[f"seconds a step, {batch}, {name}"] = walls
    return table


def _decode_times(scale: Scale, engine: Engine, batch: int) -> tuple[list[float], list[float]]:
    """Seconds a step in plans of several steps, and in plans of one: in turn, so that both have contexts alike."""
    driver = Driver(engine)
    sequences = fill(driver, scale, batch)
    together: list[float] = []
    alone: list[float] = []
    for _ in range(scale.decode_steps // scale.plan_steps):
        together.append(_plan_s(driver, sequences, scale.plan_steps) / scale.plan_steps)
        alone += [_plan_s(driver, sequences, 1) for _ in range(scale.plan_steps)]
    driver.release_all()
    return together, alone


def _plan_s(driver: Driver, sequences: Sequence[int], steps: int) -> float:
    started_s = time.perf_counter()
    result = driver.step(sequences, steps, max_steps=steps)
    taken_s = time.perf_counter() - started_s
    assert result.num_steps == steps, "a plan of decodes was cut short"
    return taken_s


@torch.inference_mode()
def _device_s(scale: Scale, executor: Executor, batch: int) -> float:
    """Of one forward pass, launched well ahead of the device. The engine holds no sequence meanwhile, so any block will do."""
    blocks = Blocks(executor.num_blocks, BLOCK_SIZE, groups=len(executor.model.block_groups))
    tracks = [blocks.track([5] * scale.context) for _ in range(batch)]
    for track in tracks:
        track.computed = scale.context - 1
    step = blocks.batch([(track, 1) for track in tracks])
    executor.model.forward(step)
    wait(executor.device)
    started_s = time.perf_counter()
    for _ in range(scale.decode_steps):
        executor.model.forward(step)
    wait(executor.device)
    return (time.perf_counter() - started_s) / scale.decode_steps


def fill(driver: Driver, scale: Scale, batch: int) -> list[int]:
    """Prefills so many sequences, and two steps. Contexts are `scale.context` on average over the twice `decode_steps` to come."""
    prompt = scale.context - scale.decode_steps
    admissions = [driver.admission(prompt, 4 * scale.decode_steps, scale.config.vocab_size) for _ in range(batch)]
    together = max(1, TOKEN_BUDGET // prompt)
    for start in range(0, batch, together):
        part = admissions[start : start + together]
        driver.step([admission.sequence_id for admission in part], prompt, part)
    sequences = [admission.sequence_id for admission in admissions]
    driver.step(sequences, 2, max_steps=2)
    return sequences


def prefill(scale: Scale, executor: Executor, bounds: Bounds) -> Table:
    table = Table(
        f"Prefill of {scale.prompt} tokens",
        ("chunk", "ms", "bound ms", "share of the bound", "tokens/s"),
        note="The least, to the first token. Bound: operations of all matrix products over the measured rate.",
    )
    config = scale.config
    head = config.vocab_size * config.hidden_size
    pairs = scale.prompt * scale.prompt / 2
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    bound_s = (2 * (product_weights(config) - head) * scale.prompt + 2 * head + attention) / bounds.matrix_rate
    for chunk in scale.chunks:
        times = [prefill_s(scale, executor.engine, chunk) for _ in range(scale.repeats)]
        table.rows.append((chunk, 1e3 * min(times), 1e3 * bound_s, bound_s / min(times), scale.prompt / min(times)))
        table.raw[f"chunk {chunk}"] = times
    return table


def prefill_s(scale: Scale, engine: Engine, chunk: int) -> float:
    driver = Driver(engine)
    admission = driver.admission(scale.prompt, 8, scale.config.vocab_size)
    started_s = time.perf_counter()
    result = driver.step([admission.sequence_id], chunk, [admission])
    while not result.token_ids:
        result = driver.step([admission.sequence_id], chunk)
    taken_s = time.perf_counter() - started_s
    driver.release_all()
    return taken_s


def burst(scale: Scale, executor: Executor) -> Table:
    """Requests all there at once: chunks within the token budget, beside the decodes of those that are through.

    Then plans that only decode, of several steps.
    """
    driver = Driver(executor.engine)
    waiting = [driver.admission(scale.context, scale.output, scale.config.vocab_size) for _ in range(scale.requests)]
    running: list[int] = []
    started_s = time.perf_counter()
    while waiting or running:
        room = max(1, (TOKEN_BUDGET - len(running)) // scale.context)
        admitted, waiting = waiting[:room], waiting[room:]
        sequences = [*running, *(admission.sequence_id for admission in admitted)]
        result = driver.step(sequences, scale.context, admitted, 1 if admitted else scale.plan_steps)
        running = [sequence for sequence, finish in zip(sequences, result.finishes, strict=True) if not finish]
    rate = scale.requests * scale.output / (time.perf_counter() - started_s)
    table = Table(f"{scale.requests} requests at once, {scale.context} in, {scale.output} out", ("what", "output tokens/s"))
    table.rows = [("tokenmill's engine", rate)]
    return table
