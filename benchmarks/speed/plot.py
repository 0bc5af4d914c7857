"""The speed benchmark drawn: a panel a workload, a bar for each server and precision. Needs matplotlib (`.[plots]`).

Must not know: how it was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.figure import Figure

from benchmarks.speed.peers import PeerMeasured
from benchmarks.speed.table import in_words, tokens_per_s
from benchmarks.speed.workloads import Measured, Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANEL_IN, _BAR_IN = 2.4, 0.32
_OURS, _THEIRS = "tab:blue", "0.72"
# Text stays text, and the same figures give the same file.
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "speed", "font.size": 9})


def draw(title: str, measured: Sequence[Measured], peers: Sequence[PeerMeasured], path: Path) -> None:
    """Medians of tokens/s, written as SVG."""
    workloads = {one.workload.name: one.workload for one in measured}
    names = len({one.precision for one in measured}) + len(peers)
    figure = Figure(figsize=(1.4 + _PANEL_IN * len(workloads), 0.9 + _BAR_IN * names), layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, len(workloads), sharey=True, squeeze=False)[0])
    for panel, workload in zip(panels, workloads.values(), strict=True):
        _draw_panel(panel, workload, tokens_per_s(workload.name, measured, peers))
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, metadata={"Date": None})


def _draw_panel(panel: Axes, workload: Workload, medians: Mapping[str, float | None]) -> None:
    ours = [name.startswith("tokenmill") for name in medians]
    lengths = [value or 0.0 for value in medians.values()]
    bars = panel.barh(list(medians), lengths, color=[_OURS if own else _THEIRS for own in ours])
    panel.bar_label(bars, list(map(in_words, medians.values())), padding=3)
    panel.set_title(f"{workload.name} {workload.fixed}", fontsize=9)
    panel.set_xlabel("all tokens/s" if workload.total else "output tokens/s")
    panel.set_xticks([])
    panel.set_xlim(0, 1.3 * max(lengths))
    panel.spines[["top", "right", "bottom"]].set_visible(False)
    panel.invert_yaxis()
