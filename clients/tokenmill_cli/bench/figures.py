"""What a benchmark's runs come to: tokens a second and latency percentiles, as medians over the runs.

Names are those of vLLM's benchmark. Must not know: how runs were made, how figures are shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from tokenmill_cli.bench.runner import RequestTiming, WorkloadRun


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Each the median over the runs. Total tokens are prompt and output tokens; of failed requests none count.

    None is what there was nothing to measure of. `batch_occupancy` in 0 to 1; `completed` and `failed` are sums.
    """

    wall_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    time_to_first_token: Percentiles | None
    time_per_output_token: Percentiles | None
    inter_token_latency: Percentiles | None
    latency: Percentiles | None
    batch_occupancy: float | None
    client_cpu_ms_per_output_token: float
    completed: int
    failed: int


def figures(runs: Sequence[WorkloadRun]) -> Figures:
    """Of one run or more of the same workload."""

    def over_runs(figure: Callable[[WorkloadRun], float]) -> float:
        return median(figure(run) for run in runs)

    def percentiles(values: Callable[[RequestTiming], Iterable[float]]) -> Percentiles | None:
        each = [[value for timing in run.timings for value in values(timing)] for run in runs]
        if not all(each):
            return None
        return Percentiles(*(median(percentile(measured, share) for measured in each) for share in (0.5, 0.9, 0.99)))

    return Figures(
        wall_s=over_runs(lambda run: run.wall_s),
        requests_per_s=over_runs(lambda run: len(run.timings) / run.wall_s),
        output_tokens_per_s=over_runs(lambda run: output_tokens(run) / run.wall_s),
        total_tokens_per_s=over_runs(lambda run: (output_tokens(run) + prompt_tokens(run)) / run.wall_s),
        time_to_first_token=percentiles(lambda timing: [timing.time_to_first_token_s]),
        time_per_output_token=percentiles(
            lambda timing: [] if timing.time_per_output_token_s is None else [timing.time_per_output_token_s]
        ),
        inter_token_latency=percentiles(lambda timing: timing.inter_token_latencies_s),
        latency=percentiles(lambda timing: [timing.latency_s]),
        batch_occupancy=over_runs(lambda run: run.batch_occupancy) if all(run.slots for run in runs) else None,
        client_cpu_ms_per_output_token=over_runs(lambda run: run.client_cpu_s * 1e3 / max(1, output_tokens(run))),
        completed=sum(len(run.timings) for run in runs),
        failed=sum(len(run.failures) for run in runs),
    )


def output_tokens(run: WorkloadRun) -> int:
    return sum(timing.output_tokens for timing in run.timings)


def prompt_tokens(run: WorkloadRun) -> int:
    return sum(timing.prompt_tokens for timing in run.timings)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
