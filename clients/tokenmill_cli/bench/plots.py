"""Measurements drawn: throughput, latency distributions, occupancy over time. Needs matplotlib (`tokenmill[plots]`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tokenmill_cli.bench.figures import Figures, figures
from tokenmill_cli.bench.measurements import Measurement
from tokenmill_cli.bench.runner import RequestTiming

_DPI = 150


def draw(labels: Sequence[str], measurements: Sequence[Measurement], folder: Path) -> list[Path]:
    """Writes the plots into `folder`, which is made when it is missing, and returns their paths. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    plots = {"throughput": _throughput, "latency": _latency}
    if any(run.occupancy for measurement in measurements for run in measurement.runs):
        plots["occupancy"] = _occupancy
    paths = []
    for name, plot in plots.items():
        paths.append(folder / f"{name}.png")
        plot(labels, measurements).savefig(paths[-1], dpi=_DPI)
    return paths


def _throughput(labels: Sequence[str], measurements: Sequence[Measurement]) -> Figure:
    """Medians over the runs as bars, each run as a dot."""
    figure = Figure(figsize=(8, 1.2 + 0.5 * len(labels)), layout="constrained")
    panels: tuple[tuple[str, Callable[[Figures], float]], ...] = (
        ("output tokens/s", lambda found: found.output_tokens_per_s),
        ("total tokens/s", lambda found: found.total_tokens_per_s),
    )
    for axes, (title, of) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        for row, (colour, measurement) in enumerate(zip(_colours(len(labels)), measurements, strict=True)):
            value = of(figures(measurement.runs))
            axes.barh(row, value, color=colour)
            axes.text(0.98, row, f"{value:,.0f}", transform=axes.get_yaxis_transform(), ha="right", va="center")
            axes.scatter([of(figures([run])) for run in measurement.runs], [row] * len(measurement.runs), s=9, color="black")
        axes.set_title(title)
        axes.margins(x=0.3)
        axes.set_yticks(range(len(labels)), labels)
    figure.axes[0].invert_yaxis()
    return figure


def _latency(labels: Sequence[str], measurements: Sequence[Measurement]) -> Figure:
    """Which share of all was at most so late: all runs of a measurement together."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels: tuple[tuple[str, Callable[[RequestTiming], Iterable[float]]], ...] = (
        ("time to first token", lambda timing: [timing.time_to_first_token_s]),
        ("inter-token latency", lambda timing: timing.inter_token_latencies_s),
        ("end-to-end latency", lambda timing: [timing.latency_s]),
    )
    for axes, (title, of) in zip(figure.subplots(1, 3, sharey=True), panels, strict=True):
        for label, colour, measurement in zip(labels, _colours(len(labels)), measurements, strict=True):
            values_ms = [value * 1e3 for run in measurement.runs for timing in run.timings for value in of(timing)]
            if values_ms:
                axes.ecdf(values_ms, label=label, color=colour)
        axes.set_title(title)
        axes.set_xlabel("ms")
        _grid(axes)
    figure.axes[0].set_ylabel("share at most")
    figure.axes[-1].legend(loc="lower right")
    return figure


def _occupancy(labels: Sequence[str], measurements: Sequence[Measurement]) -> Figure:
    """Sequences running over time, in the run whose wall time is the median."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    for label, colour, measurement in zip(labels, _colours(len(labels)), measurements, strict=True):
        run = sorted(measurement.runs, key=lambda run: run.wall_s)[len(measurement.runs) // 2]
        if run.occupancy:
            times_s, running = zip(*run.occupancy, strict=True)
            axes.step(times_s, running, where="post", label=label, color=colour)
            axes.axhline(run.slots, color=colour, linestyle=":", linewidth=1)
    axes.set_xlabel("seconds since start")
    axes.set_ylabel("sequences running (dotted: most)")
    axes.set_ylim(bottom=0)
    _grid(axes)
    axes.legend()
    return figure


def _grid(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.set_xlim(left=0)


def _colours(count: int) -> list[str]:
    return [f"C{number % 10}" for number in range(count)]
