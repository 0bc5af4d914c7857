"""What a part of the benchmark tells: rows under headings, kept as Markdown and as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field

Cell = str | int | float | bool


@dataclass(slots=True)
class Table:
    """`raw` has what the rows were made from. `wrong` says that something is not as it must be."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]] = field(default_factory=list)
    note: str = ""
    raw: dict[str, list[float]] = field(default_factory=dict)
    wrong: bool = False

    def markdown(self) -> str:
        lines = [f"## {self.title}", ""]
        if self.note:
            lines += [self.note, ""]
        if self.rows:
            lines += [_line(self.columns), _line(["---"] * len(self.columns)), *(_line(row) for row in self.rows), ""]
        return "\n".join(lines)


def _line(cells: tuple[Cell, ...] | list[str]) -> str:
    return f"| {' | '.join(_text(cell) for cell in cells)} |"


def _text(cell: Cell) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "NO"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
