"""Does the simulator foretell the real service? The same arrivals on both: throughput and median latencies side by side.

    python -m benchmarks.prediction [--model smollm2-135m-instruct] [--trace FILE] [--repeat 3] [executor flags ...]

First a real service is measured under fixed workloads while it writes its plan journal, and the cost of a step is fitted to that.
Then other arrivals are foretold with this cost, and sent to the real service: a burst, a Poisson process at 70 % of what the burst
came to, and with --trace the first requests of a recorded trace, a quarter as long, at the same load. Latencies are those that the
client sees. Writes a table to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median

from tokenmill_cli.bench.figures import Percentiles, figures
from tokenmill_cli.bench.measurements import Measurement, read
from tokenmill_client import Client
from tokenmill_scheduler.journal.replay import replay
from tokenmill_service.logs import configure_logs
from tokenmill_simulator.compare import Machines, run
from tokenmill_simulator.figures import Target
from tokenmill_simulator.recording import Recording
from tokenmill_simulator.requests import SimulatedRequest
from tokenmill_workloads import Arrival, at_rate, burst, poisson, prompts, read_trace, scale_lengths

from benchmarks.bare import TOKEN_BUDGET
from tests.fakes.processes import Processes, wait_serving

RESULTS = Path(__file__).parent / "results"
SLOTS = 8
LOAD = 0.7
SEED = 7
TRACE_LENGTH_SCALE = 0.25
# What the step's cost is fitted to; none of it is foretold.
CALIBRATION = (("decode-heavy", "1"), ("prefill-heavy", "0.5"), ("burst", "1"))


@dataclass(frozen=True)
class Outcome:
    """Latencies are medians over requests, in milliseconds."""

    output_tokens_per_s: float
    time_to_first_token: float
    time_per_output_token: float
    latency: float


@dataclass(frozen=True)
class Compared:
    name: str
    foretold: Outcome
    measured: Outcome


# ---- measured ------------------------------------------------------------------------------------------------------------------


@contextmanager
def scheduler(processes: Processes, executor: str, *flags: str, name: str) -> Iterator[str]:
    """Its address."""
    limits = ("--max-num-seqs", str(SLOTS), "--max-num-batched-tokens", str(TOKEN_BUDGET))
    running = processes.scheduler(executor, flags=(*limits, *flags), name=name)
    asyncio.run(wait_serving(running.address))
    yield running.address
    running.stop()


def bench(address: str, folder: Path, *argv: str) -> Measurement:
    """`tokenmill bench` in a process of its own, as clients are. Raises CalledProcessError when a request failed."""
    saved = folder / "measured.json"
    command = [sys.executable, "-m", "tokenmill_cli.main", "--server", address, "bench", *argv, "--save", str(saved)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return read(saved)


def measure(address: str, folder: Path, arrivals: Sequence[Arrival], repeat: int) -> Outcome:
    trace = folder / "arrivals.csv"
    with trace.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("at", "prompt", "output"))
        rows.writerows((arrival.at_s, arrival.prompt_tokens, arrival.output_tokens) for arrival in arrivals)
    columns = ("--columns", "at", "prompt", "output", "--seed", str(SEED), "--repeat", str(repeat))
    found = figures(bench(address, folder, "trace", str(trace), *columns).runs)
    return Outcome(
        found.output_tokens_per_s,
        _median_ms(found.time_to_first_token),
        _median_ms(found.time_per_output_token),
        _median_ms(found.latency),
    )


def _median_ms(percentiles: Percentiles | None) -> float:
    assert percentiles is not None
    return percentiles.p50 * 1e3


# ---- foretold ------------------------------------------------------------------------------------------------------------------


def calibrate(journal: Path) -> Recording:
    recording = Recording()
    replayed = replay(journal, lambda core, at_s, event, effects: recording.saw(at_s, event, effects, core.num_waiting))
    assert replayed.difference is None, "the core decides otherwise than its journal says"
    return recording


def foretell(arrivals: Sequence[Arrival], machines: Machines, vocab_size: int) -> Outcome:
    requests = [
        SimulatedRequest(arrival, prompt) for arrival, prompt in zip(arrivals, prompts(arrivals, vocab_size, SEED), strict=True)
    ]
    done = run("foretold", machines.config(SLOTS, TOKEN_BUDGET), requests, machines, Target())
    measures = done.measures
    each_s = (measures.last_token_s - measures.first_token_s) / (measures.tokens - 1)
    return Outcome(
        done.figures.output_tokens_per_s,
        done.figures.time_to_first_token_s.p50 * 1e3,
        median(each_s) * 1e3,
        done.figures.latency_s.p50 * 1e3,
    )


# ---- both ----------------------------------------------------------------------------------------------------------------------


def loads(tokens_per_s: float, count: int, trace: Path | None) -> Iterator[tuple[str, tuple[Arrival, ...]]]:
    """`tokens_per_s` is what the service can make."""
    yield "burst", burst(seed=SEED)
    mixed = burst(count, seed=SEED)
    yield f"Poisson, {count} requests", poisson(mixed, _rate(mixed, tokens_per_s), SEED)
    if trace is not None:
        recorded = scale_lengths(read_trace(trace, limit=count), TRACE_LENGTH_SCALE)
        yield f"{trace.name}, {len(recorded)} requests", at_rate(recorded, _rate(recorded, tokens_per_s))


def _rate(arrivals: Sequence[Arrival], tokens_per_s: float) -> float:
    return LOAD * tokens_per_s / fmean(arrival.output_tokens for arrival in arrivals)


def compare(options: argparse.Namespace, executor_flags: Sequence[str]) -> tuple[float, list[Compared]]:
    """How far the fitted cost is from a step (a share of the mean step), and each load foretold and measured."""
    with Processes() as processes:
        folder = processes.folder
        executor = processes.executor("--model", options.model, "--threads", str(os.cpu_count()), *executor_flags).address
        journal = folder / "journal"
        with scheduler(processes, executor, "--plan-journal", str(journal), name="calibration") as address:
            for fixed, length_scale in CALIBRATION:
                last = bench(address, folder, fixed, "--length-scale", length_scale)
            with Client(address) as client:
                vocab_size = client.list_models()[0].vocab_size
        recording = calibrate(journal)
        found = []
        with scheduler(processes, executor, name="foretold") as address:
            capacity = figures(last.runs).output_tokens_per_s
            for name, arrivals in loads(capacity, options.requests, options.trace):
                foretold = foretell(arrivals, recording.machines(), vocab_size)
                found.append(Compared(name, foretold, measure(address, folder, arrivals, options.repeat)))
    return recording.fit().error, found


def table(model: str, repeat: int, error: float, found: Sequence[Compared]) -> str:
    lines = [
        f"# Simulator against the real executor, {model}, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"`python -m benchmarks.prediction`, measured medians of {repeat}; {os.cpu_count()} cores ({platform.machine()}), load "
        f"{os.getloadavg()[0]:.1f} at the end; {SLOTS} slots. The fitted cost is {error:.1%} off a step (root of the mean square). "
        "Foretold / measured (bar: within 10 %); latencies are medians.",
        "",
        "| arrivals | output tokens/s | first token ms | time per output token ms | end-to-end ms |",
        "|---|---|---|---|---|",
    ]
    for one in found:
        cells = []
        for field in Outcome.__dataclass_fields__:
            foretold, measured = getattr(one.foretold, field), getattr(one.measured, field)
            cells.append(f"{foretold:,.1f} / {measured:,.1f} ({foretold / measured - 1:+.1%})")
        lines.append(f"| {one.name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as the executor's --model")
    parser.add_argument("--trace", type=Path, help="a recorded trace to send, too")
    parser.add_argument("--requests", type=int, default=60, help="of the Poisson process and of the trace")
    parser.add_argument("--repeat", type=int, default=3)
    options, executor_flags = parser.parse_known_args()
    configure_logs("console", "warning")
    name = Path(options.model).stem
    report = table(name, options.repeat, *compare(options, executor_flags))
    print(report)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-prediction-{name}.md").write_text(report)


if __name__ == "__main__":
    main()
