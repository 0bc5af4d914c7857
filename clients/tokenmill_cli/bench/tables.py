"""Figures as tables: one measurement, or several side by side. Must not know: how they were measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from tokenmill_cli.bench.figures import Figures, Percentiles
from tokenmill_cli.output import table

_LATENCIES: tuple[tuple[str, Callable[[Figures], Percentiles | None]], ...] = (
    ("time to first token", lambda figures: figures.time_to_first_token),
    ("time per output token", lambda figures: figures.time_per_output_token),
    ("inter-token latency", lambda figures: figures.inter_token_latency),
    ("end-to-end latency", lambda figures: figures.latency),
)
_THROUGHPUTS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("output tokens/s", lambda figures: f"{figures.output_tokens_per_s:,.1f}"),
    ("total tokens/s", lambda figures: f"{figures.total_tokens_per_s:,.1f}"),
    ("requests/s", lambda figures: f"{figures.requests_per_s:,.2f}"),
    ("wall time", lambda figures: f"{figures.wall_s:.2f} s"),
    ("batch occupancy", lambda figures: "" if figures.batch_occupancy is None else f"{figures.batch_occupancy:.1%}"),
    ("client CPU per output token", lambda figures: f"{figures.client_cpu_ms_per_output_token:.3f} ms"),
    ("failed requests", lambda figures: str(figures.failed) if figures.failed else ""),
)


def latency_table(figures: Figures) -> Table:
    """Milliseconds."""
    columns = ("ms", *Percentiles.__slots__)
    rows = [(name, *(_ms(of(figures), label) for label in Percentiles.__slots__)) for name, of in _LATENCIES]
    return table(columns, rows, right=columns[1:])


def throughput(figures: Figures) -> list[tuple[str, object]]:
    """Names and values; what was not measured is empty."""
    return [(name, shown(figures)) for name, shown in _THROUGHPUTS]


def comparison(labels: Sequence[str], measured: Sequence[Figures]) -> Table:
    """One column a measurement, each but the first with its output tokens/s as a multiple of the first's."""
    base = measured[0].output_tokens_per_s
    multiples = [f"{figures.output_tokens_per_s / base:.2f}×" if base else "" for figures in measured[1:]]
    rows = [(name, *(shown(figures) for figures in measured)) for name, shown in _THROUGHPUTS]
    rows.insert(1, ("as a multiple of the first", "", *multiples))
    for name, of in _LATENCIES:
        rows += [(f"{name}, {label} ms", *(_ms(of(figures), label) for figures in measured)) for label in Percentiles.__slots__]
    return table(("", *labels), [row for row in rows if any(row[1:])], right=labels)


def _ms(percentiles: Percentiles | None, label: str) -> str:
    return "" if percentiles is None else f"{getattr(percentiles, label) * 1e3:,.1f}"
