"""Simulated runs side by side: one column each. Must not know: how the runs were made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from tokenmill_cli.output import table

if TYPE_CHECKING:
    from tokenmill_simulator.compare import Run
    from tokenmill_simulator.figures import Figures


def runs_table(runs: Sequence[Run]) -> Table:
    rows = [(name, *(show(run.figures) for run in runs)) for name, show in _ROWS.items()]
    for lane in runs[0].figures.lanes:
        for share in ("p50", "p99"):
            cells = [_time(getattr(run.figures.lanes[lane], share)) for run in runs]
            rows.append((f"{lane.replace('_', '-')} lane, first token {share}", *cells))
    names = [run.name for run in runs]
    return table(("", *names), [row for row in rows if any(cell != "–" for cell in row[1:])], right=names)


def _time(seconds: float) -> str:
    if seconds == 0:
        return "–"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:,.4g} s"


def _count(number: int) -> str:
    return f"{number:,}" if number else "–"


_ROWS: dict[str, Callable[[Figures], str]] = {
    "wall time": lambda f: _time(f.wall_s),
    "requests done/s": lambda f: f"{f.requests_per_s:.3g}",
    "output tokens/s": lambda f: f"{f.output_tokens_per_s:,.0f}",
    "goodput, requests/s": lambda f: f"{f.goodput:.3g}",
    "served well": lambda f: f"{f.goodput_share:.1%}",
    "not done": lambda f: _count(f.not_done),
    "refused at submit": lambda f: _count(f.refused),
    "refusals, with retries": lambda f: _count(f.refusals if f.refusals > f.refused else 0),
    "time to first token p50": lambda f: _time(f.time_to_first_token_s.p50),
    "time to first token p90": lambda f: _time(f.time_to_first_token_s.p90),
    "time to first token p99": lambda f: _time(f.time_to_first_token_s.p99),
    "inter-token p50": lambda f: _time(f.inter_token_s.p50),
    "inter-token p99": lambda f: _time(f.inter_token_s.p99),
    "latency p50": lambda f: _time(f.latency_s.p50),
    "latency p99": lambda f: _time(f.latency_s.p99),
    "batch occupancy": lambda f: f"{f.occupancy:.0%}",
    "KV usage, mean": lambda f: f"{f.kv_usage_mean:.1%}",
    "KV usage, most": lambda f: f"{f.kv_usage_max:.1%}",
    "prefix hits": lambda f: f"{f.prefix_hit_share:.1%}" if f.prefix_hit_share else "–",
    "preemptions": lambda f: _count(f.preemptions),
    "queue, mean": lambda f: f"{f.queue_mean:.1f}" if f.queue_mean else "–",
    "queue, most": lambda f: _count(f.queue_max),
    "executors busy": lambda f: f"{f.busy:.0%}",
    "mean step": lambda f: _time(f.step_s),
}
