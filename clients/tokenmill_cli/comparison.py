"""Two runs of one workload side by side: the figures and their table. Must not know: how the runs were made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

from rich.table import Table

from tokenmill_cli.bench.figures import output_tokens, percentile
from tokenmill_cli.bench.runner import WorkloadRun
from tokenmill_cli.output import table

_BARS = " ▁▂▃▄▅▆▇█"
_ASCII_BARS = " .:-=+*#@"


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds, tokens per second, shares. A short request is one of the third with the fewest output tokens."""

    wall_s: float
    output_tokens_per_s: float
    mean_time_to_first_token_s: float
    p99_time_to_first_token_s: float
    batch_occupancy: float
    short_request_latency_s: float


def figures(run: WorkloadRun) -> Figures:
    first_tokens = [timing.time_to_first_token_s for timing in run.timings]
    by_length = sorted(run.timings, key=lambda timing: timing.output_tokens)
    short = by_length[: max(1, len(by_length) // 3)]
    return Figures(
        wall_s=run.wall_s,
        output_tokens_per_s=output_tokens(run) / run.wall_s,
        mean_time_to_first_token_s=fmean(first_tokens),
        p99_time_to_first_token_s=percentile(first_tokens, 0.99),
        batch_occupancy=run.batch_occupancy,
        short_request_latency_s=fmean(timing.latency_s for timing in short),
    )


def comparison_table(static: Figures, continuous: Figures) -> Table:
    """The last column says how many times better continuous is."""
    rows = [
        ("wall time", f"{static.wall_s:.2f} s", f"{continuous.wall_s:.2f} s", static.wall_s / continuous.wall_s),
        (
            "output tokens/s",
            f"{static.output_tokens_per_s:.1f}",
            f"{continuous.output_tokens_per_s:.1f}",
            continuous.output_tokens_per_s / static.output_tokens_per_s,
        ),
        _seconds("mean time to first token", static.mean_time_to_first_token_s, continuous.mean_time_to_first_token_s),
        _seconds("p99 time to first token", static.p99_time_to_first_token_s, continuous.p99_time_to_first_token_s),
        (
            "mean batch occupancy",
            f"{static.batch_occupancy:.0%}",
            f"{continuous.batch_occupancy:.0%}",
            continuous.batch_occupancy / static.batch_occupancy if static.batch_occupancy else math.nan,
        ),
        _seconds("latency of short requests", static.short_request_latency_s, continuous.short_request_latency_s),
    ]
    columns = ("", "static", "continuous", "better")
    return table(columns, [(*cells, f"{ratio:.2f}×") for *cells, ratio in rows], right=columns[1:])


def _seconds(name: str, static: float, continuous: float) -> tuple[str, str, str, float]:
    return name, f"{static:.2f} s", f"{continuous:.2f} s", static / continuous


def occupancy_plot(run: WorkloadRun, width: int, seconds_across: float, *, unicode: bool) -> str:
    """Sequences running over time as one line of bars, `seconds_across` being the whole width, full height all slots."""
    bars = _BARS if unicode else _ASCII_BARS
    cells: list[list[int]] = [[] for _ in range(width)]
    for at_s, running in run.occupancy:
        cells[min(width - 1, int(at_s / seconds_across * width))].append(running)
    used = min(width, math.ceil(run.wall_s / seconds_across * width))
    line, height = "", 0.0
    for samples in cells[:used]:
        height = fmean(samples) if samples else height
        line += bars[min(len(bars) - 1, math.ceil(height / run.slots * (len(bars) - 1)))]
    return line
