"""How words and figures of a frame look, each for itself, and the tables they stand in. Must not know: whose they are."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

LABEL, FIGURE, QUIET, ALARM = "bold", "bold bright_white", "dim", "bold red"


def grid(columns: Sequence[str], right: Sequence[str] | None = None, left: int | None = None) -> Table:
    """Numbers are set to the right: all columns but the first, and but that at the place `left`, unless they are named."""
    table = Table(box=None, pad_edge=False, header_style=LABEL, padding=(0, 2, 0, 0))
    for place, column in enumerate(columns):
        is_number = column in right if right is not None else place not in (0, left)
        table.add_column(column, justify="right" if is_number else "left", no_wrap=True)
    return table


def short(words: str, width: int, style: str = "") -> Text:
    text = Text(words, style, no_wrap=True)
    text.truncate(max(width, 8), overflow="ellipsis")
    return text


def seconds(value: float) -> str:
    """In three figures and the unit that suits."""
    if value < 0.001:
        return f"{value * 1e6:.0f} µs"
    if value < 1:
        return f"{value * 1e3:.3g} ms" if value < 0.1 else f"{value * 1e3:.0f} ms"
    if value < 100:
        return f"{value:.3g} s"
    return f"{value / 60:.0f} min" if value < 6000 else f"{value / 3600:.0f} h"
