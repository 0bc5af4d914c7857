"""The burst workload: static against continuous batching, with equal slots and with half of them.

Must not know: traces, policies.
"""

from __future__ import annotations

import numpy as np
from tokenmill_simulator.compare import Machines, Run, candidate, machines, run
from tokenmill_simulator.figures import Target
from tokenmill_simulator.presets import preset
from tokenmill_simulator.requests import SimulatedRequest, mixed
from tokenmill_workloads import burst

from benchmarks.policies.table import table

CPU = "cpu-smollm2-bf16"
_BAR = 1.6
_SEEDS = range(1, 61)
_CLAIM = """\
“40–60 % less time, 80–150 % more tokens/s” is what is often claimed for continuous batching. With equal slots, prefill paid for and
a step with a fixed cost it becomes what the table says: {less:.0%} less time and {more:.0%} more tokens/s for the burst of seed 42,
and a median of {median:.2f}× over {seeds} other bursts ({low:.2f}–{high:.2f}×). A decode step of this machine takes nearly the same
time with one sequence as with eight, because reading the weights is most of it; so what counts is the number of steps: the sum of
each batch's longest output, against one stream that refills its slots. The gain ends where the queue does: the last requests of a
burst run in ever emptier steps under both, and 20 requests are only two and a half times the slots. The claimed figures appear when
static batching has half the slots: {half_less:.0%} less time and {half_more:.0%} more tokens/s. More slots for less padding is a
real gain of paged KV, but it is another one."""


def bursts(name: str) -> str:
    """On one machine of this preset."""
    requests = mixed(burst())
    on = machines(preset(name), requests)
    runs = {name: _run(name, requests, on) for name in ("static:8", "continuous:8", "static:4")}
    columns = ("burst of 20", "wall time", "output tokens/s", "occupancy", "mean latency of the shortest third")
    rows = [_burst_row(name, run) for name, run in runs.items()]
    equal, half = (runs[name].figures.wall_s / runs["continuous:8"].figures.wall_s for name in ("static:8", "static:4"))
    ratios = f"Continuous over static: {equal:.2f}× at equal slots, {half:.2f}× against half of them."
    text = f"## The burst on {name}\n\n{table(columns, rows)}\n{ratios}"
    if name == CPU:
        return f"{text}\n"
    return f"{text} Bar at equal slots: ≥ {_BAR}×; {'met' if equal >= _BAR else 'missed'}.\n\n{_claim(name, equal, half)}\n"


def _burst_row(name: str, run: Run) -> tuple[str, ...]:
    figures = run.figures
    wall, rate, occupancy = f"{figures.wall_s:.2f} s", f"{figures.output_tokens_per_s:.0f}", f"{figures.occupancy:.0%}"
    return name, wall, rate, occupancy, f"{_short_latency_s(run):.2f} s"


def _claim(name: str, equal: float, half: float) -> str:
    others = [_ratio(name, seed) for seed in _SEEDS]
    return _CLAIM.format(
        less=1 - 1 / equal,
        more=equal - 1,
        half_less=1 - 1 / half,
        half_more=half - 1,
        median=np.median(others),
        low=min(others),
        high=max(others),
        seeds=len(others),
    )


def _ratio(name: str, seed: int) -> float:
    requests = mixed(burst(seed=seed))
    on = machines(preset(name), requests)
    static, continuous = (_run(name, requests, on).figures.wall_s for name in ("static:8", "continuous:8"))
    return static / continuous


def _short_latency_s(run: Run) -> float:
    measures = run.measures
    short = np.argsort(measures.tokens, kind="stable")[: max(1, len(measures.tokens) // 3)]
    return float((measures.ended_s - measures.arrival_s)[short].mean())


def _run(name: str, requests: list[SimulatedRequest], on: Machines) -> Run:
    return run(name, candidate(name, on.config()), requests, on, Target())
