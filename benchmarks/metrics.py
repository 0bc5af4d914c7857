"""What metrics cost the scheduler's loop: their share of its CPU time a step, and the time that a scrape takes from it.

    python -m benchmarks.metrics [--running 256] [--steps 400] [--output FILE]

The loop of the service over SQLite, with a played executor whose own time is not counted. Two loads: `steady` (the same requests
decode in every step) and `churn` (two or three end in every step, and others take their place: what counts once a request, too).
Beside them what one observation a token would cost with prometheus_client's own histogram. Times are CPU time of the loop's thread,
means over all steps, for what is counted is put off and done for several steps at once; what putting off costs is counted, too.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as LibraryHistogram
from tokenmill_scheduler.core.scheduler import Scheduler, SchedulerConfig
from tokenmill_scheduler.exposition import Exposition
from tokenmill_scheduler.ledger.records import Submission
from tokenmill_scheduler.ledger.sql import open_ledger
from tokenmill_scheduler.ledger.writer import LedgerWriter
from tokenmill_scheduler.loop import Loop
from tokenmill_scheduler.tally import MOST, Tally
from tokenmill_service.histogram import SECONDS

from benchmarks.tables import table_path, today
from tests.fakes.shell import PlayedExecutor, request

_BAR = 0.03
_WARM_UP = 30
# Results come no faster than a fast model makes them, so that each is committed by itself, which is the dearer way.
_STEP_S = 0.002


@dataclass
class Spent:
    """Seconds of CPU for `calls` things counted."""

    seconds: float = 0.0
    calls: int = 0

    def timed(self, settle: Callable[[Tally], None]) -> Callable[[Tally], None]:
        def timed(tally: Tally) -> None:
            self.calls += len(tally)
            started_s = time.thread_time()
            settle(tally)
            self.seconds += time.thread_time() - started_s

        return timed


@dataclass
class Measured:
    """Of a step: mean CPU time of the loop, and of it for metrics."""

    step_s: float
    metrics_s: float
    scrape_s: list[float]


@contextmanager
def timed_metrics() -> Iterator[Spent]:
    spent = Spent()
    with patch.object(Tally, "settle", spent.timed(Tally.settle)):
        yield spent


def _put_off_s() -> float:
    """What it costs to put one thing off."""
    tally, times = Tally(), 20 * MOST

    def put_off() -> None:
        for _ in range(times):
            tally(_nothing)

    return min(_cost(put_off) for _ in range(50)) / times


def _nothing() -> None: ...


async def measure(running: int, steps: int, churn: bool) -> Measured:
    with tempfile.TemporaryDirectory() as folder, closing(open_ledger(f"sqlite:///{folder}/m.db", durable=False)) as ledger:
        writer = LedgerWriter(ledger, print)
        writer.start()
        scheduler = Scheduler(SchedulerConfig(max_num_seqs=running, max_num_batched_tokens=16 * running))
        loop = Loop(scheduler, writer, _no_text, orphan_grace_s=60.0)
        executor = _executor(running)
        lengths = random.Random(0)
        count = running + running * (_WARM_UP + steps) // 50 if churn else running
        for index in range(count):
            submitted = request(f"req-{index:026}", max_tokens=lengths.randrange(20, 180) if churn else 9_000)
            await writer.submit(Submission(submitted, b""))
            loop.accept(submitted)
        loop.joined(executor.drive())
        await asyncio.sleep(_STEP_S)
        await _play(loop, executor, _WARM_UP)
        with timed_metrics() as spent:
            loop_s = await _play(loop, executor, steps)
            # Settles what is still put off.
            _ = loop.metrics
        exposition = Exposition(scheduler, loop, writer, ())
        scrape_s = [_cost(exposition) for _ in range(50)]
        await writer.close(5.0)
    return Measured(loop_s / steps, (spent.seconds + spent.calls * _put_off_s()) / steps, scrape_s)


async def _play(loop: Loop, executor: PlayedExecutor, steps: int) -> float:
    """CPU seconds of the loop."""
    seconds = 0.0
    for _ in range(steps):
        result = executor.answer()
        started_s = time.thread_time()
        loop.answered(loop.drives[executor.facts.description.name], result)
        await asyncio.sleep(_STEP_S)
        seconds += time.thread_time() - started_s
    return seconds


def _executor(running: int) -> PlayedExecutor:
    executor = PlayedExecutor(total_blocks=running * 3_000)
    description = replace(executor.facts.description, max_num_seqs=running, max_num_batched_tokens=16 * running)
    executor.facts = replace(executor.facts, description=description)
    return executor


def _cost(job: Callable[[], object]) -> float:
    started_s = time.thread_time()
    job()
    return time.thread_time() - started_s


def library_step_s(running: int) -> float:
    """One observation a token, its labels looked up before."""
    histogram = LibraryHistogram("itl", "", ["lane", "policy"], buckets=SECONDS, registry=CollectorRegistry())
    child = histogram.labels("standard", "fcfs")

    def step() -> None:
        for _ in range(running):
            child.observe(0.02)

    return statistics.median(_cost(step) for _ in range(200))


def _no_text(model: str) -> NoReturn:
    raise AssertionError("no request here has stop strings")


def _markdown(running: int, loads: dict[str, Measured]) -> str:
    lines = [
        f"# Metrics' share of the loop, {today()}",
        "",
        f"{running} running; Python {platform.python_version()}, {platform.machine()}, {platform.system()}.",
        f"Bar: ≤ {_BAR:.0%} of a step.",
        "",
        "| load | loop, ms a step | metrics, µs a step | share | gathering for a scrape, ms |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, measured in loads.items():
        step_s, metrics_s = measured.step_s, measured.metrics_s
        scrape_ms = 1e3 * statistics.median(measured.scrape_s)
        lines.append(f"| {name} | {1e3 * step_s:.3f} | {1e6 * metrics_s:.1f} | {metrics_s / step_s:.1%} | {scrape_ms:.2f} |")
    lines += ["", f"prometheus_client's histogram, one observation a token: {1e6 * library_step_s(running):.0f} µs a step.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--output", type=Path, default=table_path("metrics"))
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    loads = {
        name: asyncio.run(measure(options.running, options.steps, churn)) for name, churn in (("steady", False), ("churn", True))
    }
    text = _markdown(options.running, loads)
    print(text)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text)


if __name__ == "__main__":
    main()
