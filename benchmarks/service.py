"""What the service around the executor costs: output tokens a second through gRPC, against the same engine driven bare by a loop.

    python -m benchmarks.service [--model simulated] [--slots 8 --slots 64] [--repeat 3] [executor flags ...]

The bare loop and the service serve the same burst (prompts of 10 to 100 tokens, 20 to 200 output tokens, drawn with seed 42, 2.5
requests a slot) with the same batch policy: every running sequence advances by a token, and waiting prompts take the slots and
the token budget that are left. In the service, executor, scheduler and client are three processes, the ledger is SQLite, durable
against a power cut. The executor's idle share is what it reports itself: waiting for a plan while work waited. Both runs must
produce the same tokens. Bare and service take turns; the table has medians. Beside them the CPU time that a step costs in each
process, by the event loop's thread and all others: on a CPU the forward pass wants every core, so what the rest uses is its loss.
Writes it to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenmill.admin.v1 import admin_pb2
from tokenmill.inference.v1 import inference_pb2 as pb
from tokenmill.inference.v1.types_pb2 import SamplingParams
from tokenmill_executor.engine import Engine
from tokenmill_service.logs import configure_logs

from benchmarks.bare import TOKEN_BUDGET, BareLoop, Job, load_engine
from benchmarks.cpu_time import CpuTime, wait_idle
from benchmarks.tables import keep, today
from tests.fakes.calls import Caller, Stream
from tests.fakes.processes import Processes, wait_serving

REQUESTS_PER_SLOT = 2.5
PROCESSES = ("executor", "scheduler", "client")
# The cost model of a small model on a CPU.
SIMULATED = ["--simulated-step-ms", "20", "--simulated-prefill-token-us", "100", "--simulated-decode-token-us", "50"]


@dataclass(frozen=True)
class Run:
    """`idle_share`: of the wall time, what the executor waited for a plan while work waited. `cpu`: by process."""

    tokens_per_s: float
    outputs: list[list[int]]
    idle_share: float = 0.0
    steps: int = 0
    cpu: Mapping[str, CpuTime] = field(default_factory=dict)


def workload(slots: int) -> list[Job]:
    rng = random.Random(42)
    return [
        Job([rng.randrange(40, 127) for _ in range(rng.randrange(10, 101))], rng.randrange(20, 201), seed)
        for seed in range(int(slots * REQUESTS_PER_SLOT))
    ]


# ---- bare ----------------------------------------------------------------------------------------------------------------------


def run_bare(engine: Engine, jobs: Sequence[Job], slots: int) -> Run:
    loop = BareLoop(engine, jobs, slots)
    before = CpuTime.of(os.getpid())
    start_s = time.perf_counter()
    outputs = loop.run()
    wall_s = time.perf_counter() - start_s
    return Run(sum(map(len, outputs)) / wall_s, outputs, steps=loop.steps, cpu={"bare": CpuTime.of(os.getpid()).since(before)})


# ---- service -------------------------------------------------------------------------------------------------------------------


async def run_service(address: str, jobs: Sequence[Job], pids: Mapping[str, int]) -> Run:
    async with Caller(address) as caller:
        before = await _executor(caller)
        cpu_before = {name: CpuTime.of(pid) for name, pid in pids.items()}
        start_s = time.perf_counter()
        streams = await asyncio.gather(*[_generate(caller, job) for job in jobs])
        wall_s = time.perf_counter() - start_s
        cpu = {name: CpuTime.of(pid).since(cpu_before[name]) for name, pid in pids.items()}
        after = await _executor(caller)
    assert after.epoch == before.epoch, "the executor was lost in the middle of the run"
    outputs = [stream.tokens for stream in streams]
    idle_s = _idle_s(after) - _idle_s(before)
    return Run(sum(map(len, outputs)) / wall_s, outputs, idle_s / wall_s, after.steps - before.steps, cpu)


async def _generate(caller: Caller, job: Job) -> Stream:
    sampling = SamplingParams(max_tokens=job.max_tokens, seed=job.seed, temperature=0.0, ignore_eos=True)
    prompt = pb.Prompt(token_ids=pb.TokenIds(ids=job.prompt))
    return await Stream().read(caller.generate(pb.RequestSpec(prompt=prompt, sampling=sampling)))


async def _executor(caller: Caller) -> admin_pb2.Executor:
    return (await caller.admin.ListExecutors(admin_pb2.ListExecutorsRequest())).executors[0]


def _idle_s(executor: admin_pb2.Executor) -> float:
    return executor.idle_share * (time.time() - executor.joined_at.ToNanoseconds() / 1e9)


# ---- both ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    slots: int
    bare: list[Run]
    service: list[Run]

    def row(self) -> str:
        bare, service = (statistics.median(run.tokens_per_s for run in runs) for runs in (self.bare, self.service))
        ratio = statistics.median(s.tokens_per_s / b.tokens_per_s for s, b in zip(self.service, self.bare, strict=True))
        idle = statistics.median(run.idle_share for run in self.service)
        return f"| {self.slots} | {bare:,.0f} | {service:,.0f} | {ratio:.1%} | {idle:.2%} | {self.service[0].steps} |"

    def cpu_row(self) -> str:
        """Milliseconds a step."""
        cells = [f"{self._cpu_ms(self.bare, 'bare').total:.2f}"]
        for process in PROCESSES:
            spent = self._cpu_ms(self.service, process)
            cells.append(f"{spent.main:.2f} + {spent.others:.2f}")
        around = sum(self._cpu_ms(self.service, process).total for process in PROCESSES) - self._cpu_ms(self.bare, "bare").total
        return f"| {self.slots} | {' | '.join(cells)} | {around:.2f} |"

    def _cpu_ms(self, runs: Sequence[Run], process: str) -> CpuTime:
        def median(thread: str) -> float:
            seconds: list[float] = [getattr(run.cpu[process], thread) / run.steps for run in runs]
            return statistics.median(seconds) * 1e3

        return CpuTime(median("main"), median("others"))


def compare(slots: int, repeat: int, executor_flags: Sequence[str]) -> Compared:
    jobs = workload(slots)
    engine = load_engine(executor_flags, {})
    bare, service = [], []
    with Processes() as processes:
        executor = processes.executor(*executor_flags)
        flags = ("--max-num-seqs", str(slots), "--max-num-batched-tokens", str(TOKEN_BUDGET))
        scheduler = processes.scheduler(executor.address, flags=flags)
        address = scheduler.address
        pids = dict(zip(PROCESSES, (executor.pid, scheduler.pid, os.getpid()), strict=True))
        asyncio.run(wait_serving(address))
        wait_idle(executor.pid)
        for _ in range(repeat):
            bare.append(run_bare(engine, jobs, slots))
            service.append(asyncio.run(run_service(address, jobs, pids)))
            assert service[-1].outputs == bare[-1].outputs, "the service's tokens are not those of the bare loop"
    return Compared(slots, bare, service)


def table(model: str, compared: Sequence[Compared], repeat: int) -> str:
    return "\n".join(
        [
            f"# Service against bare executor, {model}, {today()}",
            "",
            f"`python -m benchmarks.service`, medians of {repeat}, {os.cpu_count()} cores ({platform.machine()}), "
            f"Python {platform.python_version()}, load {os.getloadavg()[0]:.1f} at the end.",
            "",
            "| slots | bare tokens/s | service tokens/s | service / bare (bar ≥ 95 %) | executor idle (bar ≤ 2 %) | steps |",
            "|---|---|---|---|---|---|",
            *[one.row() for one in compared],
            "",
            "CPU milliseconds a step, event loop + other threads; the last column is all that is around the bare executor.",
            "",
            f"| slots | bare | {' | '.join(PROCESSES)} | around |",
            "|---|---|---|---|---|---|",
            *[one.cpu_row() for one in compared],
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="simulated", help="as the executor's --model")
    parser.add_argument("--slots", type=int, action="append", help="sequences in a step; may be repeated (default: 8 and 64)")
    parser.add_argument("--repeat", type=int, default=3)
    arguments, executor_flags = parser.parse_known_args()
    configure_logs("console", "warning")
    # Both sides with as many threads: what the tests' processes are started with would give the service one.
    own = SIMULATED if arguments.model == "simulated" else ["--threads", str(os.cpu_count())]
    flags = ["--model", arguments.model, *own, *executor_flags]
    compared = [compare(slots, arguments.repeat, flags) for slots in arguments.slots or (8, 64)]
    name = Path(arguments.model).stem
    report = table(name, compared, arguments.repeat)
    keep(f"service-{name}", report)


if __name__ == "__main__":
    main()
