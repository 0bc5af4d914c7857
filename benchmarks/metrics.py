"""What metrics cost the scheduler's loop: their share of its CPU time a step, and the time that a scrape takes from it.

    python -m benchmarks.metrics [--running 256] [--steps 400] [--output FILE]

The loop of the service over SQLite, with a played executor whose own time is not counted. Two loads: `steady` (the same requests
decode in every step) and `churn` (two or three end in every step, and others take their place: what counts once a request, too).
Beside them what one observation a token would cost with prometheus_client's own histogram. Times are medians; the step's is CPU
time of the loop's thread.
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
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as LibraryHistogram
from tokenmill_scheduler.core.scheduler import Scheduler, SchedulerConfig
from tokenmill_scheduler.exposition import Exposition
from tokenmill_scheduler.ledger.port import Submission
from tokenmill_scheduler.ledger.sql import open_ledger
from tokenmill_scheduler.ledger.writer import LedgerWriter
from tokenmill_scheduler.loop import Loop
from tokenmill_scheduler.metrics import Metrics
from tokenmill_service.histogram import SECONDS

from tests.fakes.shell import PlayedExecutor, request

_RESULTS = Path(__file__).parent / "results"
_BAR = 0.03
_WARM_UP = 30
# Results come no faster than a fast model makes them, so that each is committed by itself, which is the dearer way.
_STEP_S = 0.002


@dataclass
class Spent:
    """Seconds in the metrics' methods: by the wall clock, since reading the thread's takes as long as they do."""

    seconds: float = 0.0

    def timed(self, method: Callable[..., None]) -> Callable[..., None]:
        def timed(*arguments: object) -> None:
            started_s = time.perf_counter()
            method(*arguments)
            self.seconds += time.perf_counter() - started_s

        return timed


@dataclass
class Measured:
    step_s: list[float] = field(default_factory=list)
    metrics_s: list[float] = field(default_factory=list)
    scrape_s: list[float] = field(default_factory=list)


@contextmanager
def timed_metrics() -> Iterator[Spent]:
    spent = Spent()
    methods: dict[str, Any] = {name: spent.timed(getattr(Metrics, name)) for name in ("happened", "committed", "stepped")}
    with patch.multiple(Metrics, **methods):
        yield spent


async def measure(running: int, steps: int, churn: bool) -> Measured:
    measured = Measured()
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
        with timed_metrics() as spent:
            for step in range(_WARM_UP + steps):
                result = executor.answer()
                spent.seconds, started_s = 0.0, time.thread_time()
                loop.answered(loop.drives[executor.facts.description.name], result)
                await asyncio.sleep(_STEP_S)
                if step >= _WARM_UP:
                    measured.step_s.append(time.thread_time() - started_s)
                    measured.metrics_s.append(spent.seconds)
        exposition = Exposition(scheduler, loop, writer, ())
        measured.scrape_s = [_cost(exposition) for _ in range(50)]
        await writer.close(5.0)
    return measured


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
        f"# Metrics' share of the loop, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"{running} running; Python {platform.python_version()}, {platform.machine()}, {platform.system()}.",
        f"Medians. Bar: ≤ {_BAR:.0%} of a step of steady decoding.",
        "",
        "| load | loop, ms a step | metrics, µs a step | share | gathering for a scrape, ms |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, measured in loads.items():
        step_s, metrics_s = statistics.median(measured.step_s), statistics.median(measured.metrics_s)
        scrape_ms = 1e3 * statistics.median(measured.scrape_s)
        lines.append(f"| {name} | {1e3 * step_s:.3f} | {1e6 * metrics_s:.1f} | {metrics_s / step_s:.1%} | {scrape_ms:.2f} |")
    lines += ["", f"prometheus_client's histogram, one observation a token: {1e6 * library_step_s(running):.0f} µs a step.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--output", type=Path, default=_RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-metrics.md")
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
