"""Static against continuous batching on the real executor: the burst workload, with equal slots and with half of them.

    python -m benchmarks.batching [--model smollm2-135m-instruct] [--repeat 3] [executor flags ...]

Twenty requests at once through gRPC, the client in a process of its own. What `make demo` shows live, kept as a table; the same on
a simulated A100 is in `benchmarks.policies`. Writes a table to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from tokenmill_cli.bench.measurements import machine, read
from tokenmill_cli.comparison import Figures, figures

from benchmarks.tables import keep, today
from tests.fakes.processes import Processes, wait_serving

# Batching and slots.
WAYS = (("static", 4), ("static", 8), ("continuous", 8))
ROWS: dict[str, Callable[[Figures], float]] = {
    "wall time, s": lambda found: found.wall_s,
    "output tokens/s": lambda found: found.output_tokens_per_s,
    "mean time to first token, s": lambda found: found.mean_time_to_first_token_s,
    "p99 time to first token, s": lambda found: found.p99_time_to_first_token_s,
    "mean batch occupancy": lambda found: found.batch_occupancy,
    "latency of short requests, s": lambda found: found.short_request_latency_s,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as the executor's --model")
    parser.add_argument("--repeat", type=int, default=3)
    arguments, executor_flags = parser.parse_known_args()
    with Processes() as processes:
        executor = processes.executor("--model", arguments.model, *executor_flags)
        runs = [_measure(processes, executor.address, batching, slots, arguments.repeat) for batching, slots in WAYS]
    model = Path(arguments.model).stem.lower()
    table = _table(model, arguments.repeat, runs)
    keep(f"batching-{model}", table)


def _measure(processes: Processes, executor: str, batching: str, slots: int, repeat: int) -> list[Figures]:
    name = f"{batching}-{slots}"
    scheduler = processes.scheduler(executor, flags=("--batching", batching, "--max-num-seqs", str(slots)), name=name)
    asyncio.run(wait_serving(scheduler.address))
    saved = processes.folder / f"{name}.json"
    options = ["--server", scheduler.address, "--repeat", str(repeat), "--save", str(saved)]
    subprocess.run([sys.executable, "-m", "tokenmill_cli.main", "bench", "burst", *options], check=True, stdout=subprocess.DEVNULL)
    scheduler.stop()
    return [figures(run) for run in read(saved).runs]


def _table(model: str, repeat: int, runs: Sequence[Sequence[Figures]]) -> str:
    names = [f"{batching}, {slots} slots" for batching, slots in WAYS]
    lines = []
    for row, figure in ROWS.items():
        values = [median(figure(run) for run in way) for way in runs]
        lines.append(f"| {row} | {' | '.join(f'{value:.2f}' for value in values)} | {values[1] / values[2]:.2f} |")
    return "\n".join(
        (
            f"# Static against continuous batching, {model}, {today()}",
            "",
            f"`python -m benchmarks.batching`, the burst workload through gRPC, medians of {repeat}; {machine()}.",
            "",
            f"| | {' | '.join(names)} | static 8 / continuous 8 |",
            f"|---|{'---|' * (len(names) + 1)}",
            *lines,
            "",
        )
    )


if __name__ == "__main__":
    main()
