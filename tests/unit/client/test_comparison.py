"""The demo's figures and table, made of two runs."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from tokenmill_cli.bench.runner import RequestTiming, WorkloadRun
from tokenmill_cli.comparison import comparison_table, figures, occupancy_plot


def timing(output_tokens: int, sent_s: float, first_s: float, finished_s: float) -> RequestTiming:
    return RequestTiming(5, sent_s, finished_s, (first_s, finished_s), (1, output_tokens - 1))


def run_of(*timings: RequestTiming, wall_s: float = 10.0, occupancy: tuple[tuple[float, int], ...] = ()) -> WorkloadRun:
    return WorkloadRun(wall_s, timings, 0.5, 8, occupancy)


def test_figures() -> None:
    found = figures(run_of(timing(10, 0.0, 1.0, 4.0), timing(50, 0.0, 2.0, 9.0), timing(40, 1.0, 4.0, 10.0)))
    assert found.output_tokens_per_s == pytest.approx(10.0)
    assert found.mean_time_to_first_token_s == pytest.approx(2.0)
    assert found.p99_time_to_first_token_s == pytest.approx(3.0)
    assert found.short_request_latency_s == pytest.approx(4.0)


def test_the_table_fits_80_columns_and_gives_ratios() -> None:
    slow = figures(run_of(timing(100, 0.0, 4.0, 10.0), wall_s=10.0))
    fast = figures(run_of(timing(100, 0.0, 1.0, 5.0), wall_s=5.0))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(comparison_table(slow, fast))
    lines = console.export_text().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    cells = {line[:25].strip(): line[25:].split() for line in lines}
    assert cells["wall time"] == ["10.00", "s", "5.00", "s", "2.00×"]
    assert cells["output tokens/s"] == ["10.0", "20.0", "2.00×"]
    assert cells["mean time to first token"] == ["4.00", "s", "1.00", "s", "4.00×"]
    assert cells["mean batch occupancy"] == ["50%", "50%", "1.00×"]


def test_occupancy_plot() -> None:
    run = run_of(wall_s=8.0, occupancy=((0.0, 8), (2.5, 4), (7.9, 0)))
    assert occupancy_plot(run, 8, 8.0, unicode=True) == "██▄▄▄▄▄ "
    assert occupancy_plot(run, 8, 16.0, unicode=False) == "@== "
