"""The burst workload, and the figures made of two runs."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from tokenmill_cli.comparison import comparison_table, figures, occupancy_plot, percentile
from tokenmill_cli.workloads import RequestTiming, Tally, WorkloadRun, burst, run_workload
from tokenmill_client import AsyncClient

from tests.unit.client.fake_server import FakeServer


def test_the_burst_is_the_same_every_time() -> None:
    workload = burst(1_000)
    assert workload == burst(1_000)
    assert workload != burst(1_000, seed=43)
    assert len(workload.requests) == 20
    assert {request.at_s for request in workload.requests} == {0.0}
    assert all(10 <= len(request.prompt) <= 100 and 20 <= request.output_tokens <= 200 for request in workload.requests)
    assert all(0 <= token_id < 1_000 for request in workload.requests for token_id in request.prompt)
    # Lengths do not hang on the vocabulary: two models get the same work.
    assert [request.output_tokens for request in burst(50_000).requests] == [request.output_tokens for request in workload.requests]


def test_a_tiny_vocabulary() -> None:
    assert all(token_id == 9 for request in burst(10).requests for token_id in request.prompt)


async def test_runs_a_workload(server: FakeServer, client: AsyncClient) -> None:
    workload = burst(1_000, count=5, output_tokens=(2, 6))
    tallies: list[int] = []

    def on_progress(tally: Tally) -> None:
        tallies.append(tally.output_tokens)

    run = await run_workload(client, workload, on_progress)
    assert [timing.output_tokens for timing in run.timings] == [request.output_tokens for request in workload.requests]
    assert [timing.prompt_tokens for timing in run.timings] == [len(request.prompt) for request in workload.requests]
    assert tallies[-1] == workload.output_tokens
    assert all(0 <= timing.sent_s <= timing.first_token_s <= timing.finished_s <= run.wall_s for timing in run.timings)
    assert all(request.spec.sampling.ignore_eos for request in server.requests.values())


def run_of(*timings: RequestTiming, wall_s: float = 10.0, occupancy: tuple[tuple[float, int], ...] = ()) -> WorkloadRun:
    return WorkloadRun(wall_s, timings, 0.5, 8, occupancy)


def test_figures() -> None:
    run = run_of(
        RequestTiming(5, 10, 0.0, 1.0, 4.0),
        RequestTiming(5, 50, 0.0, 2.0, 9.0),
        RequestTiming(5, 40, 1.0, 4.0, 10.0),
    )
    found = figures(run)
    assert found.output_tokens_per_s == pytest.approx(10.0)
    assert found.mean_time_to_first_token_s == pytest.approx(2.0)
    assert found.p99_time_to_first_token_s == pytest.approx(3.0)
    assert found.short_request_latency_s == pytest.approx(4.0)


def test_percentile_is_the_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert percentile(values, 0.99) == 99.0
    assert percentile(values, 0.5) == 50.0
    assert percentile([7.0], 0.99) == 7.0


def test_the_table_fits_80_columns_and_gives_ratios() -> None:
    slow = figures(run_of(RequestTiming(5, 100, 0.0, 4.0, 10.0), wall_s=10.0))
    fast = figures(run_of(RequestTiming(5, 100, 0.0, 1.0, 5.0), wall_s=5.0))
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
