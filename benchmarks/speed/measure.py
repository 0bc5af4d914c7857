"""One workload against the real service, and against the bare engine: processes started, requests sent, times and CPU taken."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from tokenmill_cli.bench.figures import figures
from tokenmill_cli.bench.measurements import read
from tokenmill_client import Client
from tokenmill_client.admin_records import Executor
from tokenmill_executor.engine import Engine
from tokenmill_workloads import prompts

from benchmarks.bare import TOKEN_BUDGET, BareLoop, Job, load_engine
from benchmarks.cpu_time import CpuTime, wait_idle
from benchmarks.speed.workloads import PRECISIONS, SEED, WARM_UP, WARM_UP_SCALE, Measured, Run, Workload
from tests.fakes.processes import Processes, ServiceProcess, wait_serving

# ---- the service ---------------------------------------------------------------------------------------------------------------


def bench(workload: Workload, seed: int, length_scale: float, *server: str) -> Run:
    """`tokenmill bench` in a process of its own. Raises CalledProcessError when a request failed."""
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "measured.json"
        options = ["--seed", str(seed), "--warmup", "0", "--length-scale", str(length_scale), "--save", str(saved), *server]
        command = [sys.executable, "-m", "tokenmill_cli.main", "bench", workload.fixed, *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        measured = read(saved)
    found = figures(measured.runs)
    (run,) = measured.runs
    assert found.time_to_first_token is not None
    between = found.inter_token_latency
    return Run(
        tokens_per_s=found.total_tokens_per_s if workload.total else found.output_tokens_per_s,
        output_tokens=sum(timing.output_tokens for timing in run.timings),
        first_token_ms=found.time_to_first_token.p50 * 1e3,
        inter_token_ms=between.p50 * 1e3 if between else 0.0,
        cpu_ms={"client": found.client_cpu_ms_per_output_token},
    )


def run_service(workload: Workload, seed: int, length_scale: float, executor: ServiceProcess, scheduler: ServiceProcess) -> Run:
    """With what the two services used meanwhile: while the client starts and ends they have nothing to do."""
    pids = {"executor": executor.pid, "scheduler": scheduler.pid}
    idle_before = _idle_s(scheduler.address)
    before = {name: CpuTime.of(pid) for name, pid in pids.items()}
    run = bench(workload, seed, length_scale, "--server", scheduler.address)
    spent = {name: CpuTime.of(pid).since(before[name]).total for name, pid in pids.items()}
    idle_s = _idle_s(scheduler.address) - idle_before
    wall_s = workload.counted_tokens(length_scale) / run.tokens_per_s
    cpu_ms = {name: seconds * 1e3 / run.output_tokens for name, seconds in spent.items()}
    return replace(run, cpu_ms={**cpu_ms, **run.cpu_ms}, idle_share=idle_s / wall_s)


def _idle_s(address: str) -> float:
    """How long the executor has waited for a plan while work waited, since it joined."""
    with Client(address) as client:
        executor: Executor = client.admin.list_executors()[0]
    assert executor.joined_at is not None
    return executor.idle_share * (time.time() - executor.joined_at.timestamp())


# ---- the bare engine -----------------------------------------------------------------------------------------------------------


def run_bare(engine: Engine, workload: Workload, seed: int, length_scale: float, vocab_size: int) -> Run:
    """The same prompts as those that `tokenmill bench` sends with this seed."""
    arrivals = workload.arrivals(length_scale)
    jobs = [
        Job(prompt, arrival.output_tokens, seed)
        for arrival, prompt in zip(arrivals, prompts(arrivals, vocab_size, seed), strict=True)
    ]
    loop = BareLoop(engine, jobs, workload.slots)
    cpu_before, start_s = CpuTime.of(os.getpid()), time.perf_counter()
    made = sum(map(len, loop.run()))
    wall_s, spent = time.perf_counter() - start_s, CpuTime.of(os.getpid()).since(cpu_before)
    return Run(workload.counted_tokens(length_scale) / wall_s, made, cpu_ms={"bare": spent.total * 1e3 / made})


# ---- both ----------------------------------------------------------------------------------------------------------------------


def measure(model: str, precision: str, workloads: Sequence[Workload], repeat: int, length_scale: float) -> Iterator[Measured]:
    """A scheduler serves one number of slots; the executor goes on from one to the next."""
    flags = ["--model", model, "--threads", str(os.cpu_count()), *PRECISIONS[precision]]
    engine = load_engine(flags)
    with Processes() as processes:
        executor = processes.executor(*flags)
        wait_idle(executor.pid)
        for slots, group in groupby(workloads, key=lambda workload: workload.slots):
            with _scheduler(processes, executor, slots) as scheduler:
                with Client(scheduler.address) as client:
                    vocab_size = client.list_models()[0].vocab_size
                bench(WARM_UP, SEED - 1, WARM_UP_SCALE, "--server", scheduler.address)
                for workload in group:
                    measured = Measured(workload, precision)
                    for number in range(repeat):
                        seed = SEED + number
                        measured.bare.append(run_bare(engine, workload, seed, length_scale, vocab_size))
                        measured.service.append(run_service(workload, seed, length_scale, executor, scheduler))
                    yield measured


@contextmanager
def _scheduler(processes: Processes, executor: ServiceProcess, slots: int) -> Iterator[ServiceProcess]:
    flags = ("--max-num-seqs", str(slots), "--max-num-batched-tokens", str(TOKEN_BUDGET))
    scheduler = processes.scheduler(executor.address, flags=flags, name=f"scheduler-{slots}")
    asyncio.run(wait_serving(scheduler.address))
    yield scheduler
    scheduler.stop()
