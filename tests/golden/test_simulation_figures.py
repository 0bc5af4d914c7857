"""The simulator's figures of a trace excerpt are as they were when somebody last read them."""

from __future__ import annotations

from tests.golden.simulation_figures import FIGURES, render


def test_figures() -> None:
    assert render() == FIGURES.read_text(encoding="utf-8"), (
        "figures changed; `python -m tests.golden.simulation_figures` writes them anew: read the difference"
    )
