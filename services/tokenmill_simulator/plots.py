"""Pictures of runs, as PNG files: occupancy over time, the queue over time, how latencies are distributed. Needs matplotlib.

Must not know: how runs were made.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tokenmill_simulator.compare import Run
from tokenmill_simulator.measures import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DPI = 130
_WIDTH_IN = 9.0
# Points drawn of a curve: more than this no picture shows.
_MOST_POINTS = 1500
# A curve of a distribution ends here: what is beyond is a few requests.
_TAIL = 99.9
_FAR_APART = 10
# Two runs that are alike are seen to be two.
_DASHES = ("-", "--", "-.", ":")

matplotlib.rcParams.update(
    {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3, "font.size": 10}
)


def write_plots(title: str, runs: Sequence[Run], folder: Path) -> list[Path]:
    """Makes the folder; returns the files written."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {"occupancy": occupancy(runs), "queue": queue(runs), "latency": latency(runs)}
    paths = []
    for name, figure in pictures.items():
        figure.suptitle(title, fontsize=11)
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=_DPI)
        paths.append(path)
    return paths


def occupancy(runs: Sequence[Run]) -> Figure:
    """One panel a run, one under the other, over the same time: sequences in a step; behind them the slots there are."""
    figure = Figure(figsize=(_WIDTH_IN, 1.0 + 1.6 * len(runs)), layout="constrained")
    panels: list[Axes] = list(figure.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)[:, 0])
    for panel, run in zip(panels, _continuous_first(runs), strict=True):
        times, rows = _steps(run)
        at_s, mean = _thinned(times, rows)
        panel.axhline(run.config.max_num_seqs, color="0.6", linewidth=1, linestyle="--")
        panel.fill_between(at_s, mean, step="post", alpha=0.7, linewidth=0)
        panel.set_title(
            f"{run.name}: {run.figures.occupancy:.0%} of {run.config.max_num_seqs} slots, done in {run.figures.wall_s:.4g} s",
            loc="left",
        )
        panel.set_ylabel("sequences")
        panel.yaxis.set_major_locator(MaxNLocator(integer=True))
        panel.set_ylim(bottom=0)
    panels[-1].set_xlabel("seconds since the first arrival")
    panels[-1].set_xlim(left=0)
    return figure


def queue(runs: Sequence[Run]) -> Figure:
    """Requests waiting, over time."""
    figure = Figure(figsize=(_WIDTH_IN, 4.0), layout="constrained")
    panel = figure.subplots()
    for run, dash in zip(runs, cycle(_DASHES), strict=False):
        steps = run.measures.steps
        times = np.array([step.end_s for step in steps])
        waiting = np.array([float(step.waiting) for step in steps])
        panel.step(*_thinned(times, waiting), where="post", label=run.name, linewidth=1.3, linestyle=dash)
    panel.set_xlabel("seconds since the first arrival")
    panel.set_ylabel("requests waiting")
    panel.yaxis.set_major_locator(MaxNLocator(integer=True))
    panel.set_ylim(bottom=0)
    panel.set_xlim(left=0)
    panel.legend()
    return figure


def latency(runs: Sequence[Run]) -> Figure:
    """Share of requests, or of gaps between tokens, that took at most so long."""
    figure = Figure(figsize=(_WIDTH_IN, 4.0), layout="constrained")
    first, between = figure.subplots(1, 2, sharey=True)
    for run, dash in zip(runs, cycle(_DASHES), strict=False):
        _cumulative(first, run.measures.time_to_first_token_s, run.name, dash)
        _cumulative(between, run.measures.inter_token_s, run.name, dash)
    for panel in (first, between):
        _scale(panel)
    first.set_xlabel("time to first token, ms")
    first.set_ylabel("share at most so long")
    between.set_xlabel("between tokens, ms")
    between.legend()
    return figure


def _cumulative(panel: Axes, values: Floats, name: str, dash: str) -> None:
    shares = np.linspace(0, _TAIL, 500)
    if len(values):
        times_ms = 1e3 * np.percentile(values, shares, method="inverted_cdf")
        panel.plot(times_ms, shares / 100, label=name, linewidth=1.3, linestyle=dash)


def _scale(panel: Axes) -> None:
    """By the logarithm where values are far apart."""
    values = np.concatenate([line.get_xdata() for line in panel.lines])
    if values.max() > _FAR_APART * max(values.min(), 1e-3):
        panel.set_xscale("log")
    else:
        panel.set_xlim(left=0)


def _continuous_first(runs: Sequence[Run]) -> list[Run]:
    """Static batching is drawn under continuous."""
    return sorted(runs, key=lambda run: run.config.batching == "static")


def _steps(run: Run) -> tuple[Floats, Floats]:
    """Sequences in the steps of all executors, a mean a step."""
    steps = run.measures.steps
    return np.array([step.start_s for step in steps]), np.array([float(step.sequences) for step in steps])


def _thinned(times: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Means over equal parts of the time, where there are more points than can be seen."""
    if len(times) <= _MOST_POINTS:
        return times, values
    edges = np.linspace(times.min(), times.max(), _MOST_POINTS + 1)
    part = np.clip(np.searchsorted(edges, times, side="right") - 1, 0, _MOST_POINTS - 1)
    counts = np.bincount(part, minlength=_MOST_POINTS)
    sums = np.bincount(part, weights=values, minlength=_MOST_POINTS)
    return edges[:-1][counts > 0], sums[counts > 0] / counts[counts > 0]
