"""The scheduler's own time a step: `handle(ResultArrived)` and `handle(PlanDue)`, with many running and many waiting.

    python benchmarks/scheduler_step.py [--running 256] [--waiting 10000] [--steps 2000] [--output FILE]

Two loads: `decode` (every slot decodes to the end of the measurement) and `churn` (requests end and others are admitted all the
time), under each policy, and once more with lanes and tenants in play (`shared`). Also the cost of the single events that touch it.
Times are the thread's own processor time, so that a busy machine does not blur them. Prints a table and writes it as markdown.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tokenmill_scheduler.core.effects import PlanIssued
from tokenmill_scheduler.core.events import Cancelled, ExecutorJoined, PlanDue, ResultArrived, Submitted, Updated
from tokenmill_scheduler.core.mirror import BlockHashes
from tokenmill_scheduler.core.plans import Blocks, ExecutorDescription, Plan, Result, SequenceFinish
from tokenmill_scheduler.core.policy import POLICIES
from tokenmill_scheduler.core.request import Lane, Request, Sampling
from tokenmill_scheduler.core.scheduler import Scheduler, SchedulerConfig

from benchmarks.tables import table_path, today

_BLOCKS = Blocks(900_000, 0, 100_000)
_BAR_MS = 1.0
# With lpm, of the 64 tokens of each prompt.
_HIT = 48


class _Executor:
    """Answers every plan at once with a token for each sequence that has its whole prompt; its pool is never short.

    The first `hit` tokens of every prompt are in its prefix cache.
    """

    def __init__(self, hit: int) -> None:
        self._hit = hit
        self._todo: dict[int, int] = {}
        self._left: dict[int, int] = {}

    def answer(self, plan: Plan) -> Result:
        for admission in plan.admit:
            self._todo[admission.sequence_id] = len(admission.token_ids) - self._hit
            self._left[admission.sequence_id] = admission.sampling.max_tokens
        sampled, finishes = [], []
        for sequence_id, count in zip(plan.advance_sequence_ids, plan.advance_max_tokens, strict=True):
            self._todo[sequence_id] -= count
            samples = self._todo[sequence_id] == 0
            self._todo[sequence_id] += samples
            self._left[sequence_id] -= samples
            sampled.append(int(samples))
            finishes.append(int(SequenceFinish.LENGTH if self._left[sequence_id] == 0 else SequenceFinish.NONE))
        ids, counts = plan.advance_sequence_ids, plan.advance_max_tokens
        tokens = tuple([7] * sum(sampled))
        admitted = {admission.sequence_id for admission in plan.admit}
        cached = tuple([self._hit if sequence_id in admitted else 0 for sequence_id in ids]) if self._hit and admitted else ()
        return Result(plan.epoch, plan.plan_id, ids, counts, tuple(sampled), tokens, tuple(finishes), _BLOCKS, num_cached=cached)


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    p50_ms: float
    p99_ms: float
    count: int


class Bench:
    """`shared`: requests of 3 lanes and 100 tenants, which share fairly."""

    def __init__(self, policy: str, running: int, waiting: int, max_tokens: Callable[[int], int], shared: bool = False) -> None:
        self.running, self.waiting, self.max_tokens, self.shared = running, waiting, max_tokens, shared
        self.scheduler = Scheduler(SchedulerConfig(running, 4096, policy=policy, fair_share=shared))
        caching = policy == "lpm"
        self.executor = _Executor(hit=_HIT if caching else 0)
        self.submitted = 0
        version = "v" if caching else None
        description = ExecutorDescription("x", "m", 16, 1_000_000, 100_000, running, 4096, 2, caching, version)
        stored = tuple(BlockHashes("v", "", 16).first(_HIT // 16, range(_HIT)))
        self.scheduler.handle(ExecutorJoined(description, 1, _BLOCKS, stored), 0.0)
        self.fill()
        self.result: Result | None = None
        for _ in range(running):
            self.step()

    def fill(self) -> None:
        while self.scheduler.num_waiting + self.scheduler.num_running < self.running + self.waiting:
            self.submit()

    def submit(self) -> str:
        self.submitted += 1
        sampling = Sampling(self.max_tokens(self.submitted), seed=1)
        number = self.submitted
        request = Request(f"r{number}", "m", tuple(range(64)), sampling, float(number), number % 5, 1e6 + number * 7 % 10_000)
        if self.shared:
            request = replace(request, tenant=f"t{number % 100}", lane=Lane(number % 3 + 1))
        self.scheduler.handle(Submitted(request), 0.0)
        return request.request_id

    def step(self) -> float:
        """Hands in the result that is due and asks for the next plan; seconds spent in the core."""
        start = time.thread_time()
        if self.result is not None:
            self.scheduler.handle(ResultArrived("x", self.result), 0.0)
        effects = self.scheduler.handle(PlanDue("x"), 0.0)
        spent = time.thread_time() - start
        plans = [effect.plan for effect in effects if isinstance(effect, PlanIssued)]
        self.result = self.executor.answer(plans[0]) if plans else None
        return spent


def _row(name: str, seconds: list[float]) -> Row:
    cuts = statistics.quantiles(seconds, n=100)
    return Row(name, cuts[49] * 1000, cuts[98] * 1000, len(seconds))


def _timed(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def _steps(policy: str, running: int, waiting: int, steps: int, shared: bool = False) -> list[Row]:
    name = f"{policy}, shared" if shared else policy
    decode = Bench(policy, running, waiting, lambda i: 90_000, shared)
    rows = [_row(f"step, decode, {name}", [decode.step() for _ in range(steps)])]
    churn = Bench(policy, running, waiting, lambda i: 20 + i % 180, shared)
    seconds = []
    for _ in range(steps):
        seconds.append(churn.step())
        churn.fill()
    return [*rows, _row(f"step, churn, {name}", seconds)]


def _events(running: int, waiting: int, count: int) -> list[Row]:
    bench = Bench("priority", running, waiting, lambda i: 90_000)
    submits = [_timed(bench.submit) for _ in range(count)]
    ids = [f"r{bench.submitted - i}" for i in range(count)]
    updates = [_timed(lambda r=r: bench.scheduler.handle(Updated(r, priority=3), 0.0)) for r in ids]  # type: ignore[misc]
    cancels = [_timed(lambda r=r: bench.scheduler.handle(Cancelled(r, ""), 0.0)) for r in ids]  # type: ignore[misc]
    named = (("submit", submits), ("update priority of a waiting request", updates), ("cancel a waiting request", cancels))
    return [_row(name, seconds) for name, seconds in named]


def _markdown(rows: list[Row], running: int, waiting: int) -> str:
    worst = max(row.p50_ms for row in rows)
    lines = [
        f"# Scheduler's own time a step, {today()}",
        "",
        f"{running} running, {waiting} waiting; Python {platform.python_version()}, {platform.machine()}, {platform.system()}.",
        f"Bar: ≤ {_BAR_MS} ms median; {'met' if worst <= _BAR_MS else 'missed'}.",
        "",
        "| what | p50 ms | p99 ms | n |",
        "|---|---:|---:|---:|",
    ]
    return "\n".join(lines + [f"| {row.name} | {row.p50_ms:.3f} | {row.p99_ms:.3f} | {row.count} |" for row in rows]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--output", type=Path, default=table_path("scheduler-step"))
    options = parser.parse_args()
    gc.freeze()
    rows = [
        row
        for shared in (False, True)
        for policy in POLICIES
        for row in _steps(policy, options.running, options.waiting, options.steps, shared)
    ]
    rows += _events(options.running, options.waiting, min(1_000, options.waiting))
    text = _markdown(rows, options.running, options.waiting)
    print(text)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text)


if __name__ == "__main__":
    main()
