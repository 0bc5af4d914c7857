"""Records as tables for people and as JSON for programs. Must not know: commands, the server."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import click
from rich.console import Console, JustifyMethod
from rich.table import Table


def print_json(value: Any) -> None:
    """One document; a record becomes an object with its field names, a time ISO 8601."""
    click.echo(json.dumps(value, default=_plain, indent=2, ensure_ascii=False))


def print_json_line(value: Any) -> None:
    click.echo(json.dumps(value, default=_plain, ensure_ascii=False))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def show_change(as_json: bool, changed: bool, done: str, unchanged: str) -> None:
    """What a command that may be given twice has to say: that it is done, or that there was nothing to do."""
    if as_json:
        print_json({"changed": changed})
    else:
        click.echo(done if changed else unchanged)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[str] = ()) -> Table:
    """Plain columns; those named in `right` hold numbers. On a narrow terminal the last column folds."""
    grid = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        justify: JustifyMethod = "right" if column in right else "left"
        grid.add_column(column, justify=justify, no_wrap=column != columns[-1], overflow="fold")
    for row in rows:
        grid.add_row(*(str(cell) for cell in row))
    return grid


def facts(pairs: Sequence[tuple[str, object]]) -> Table:
    """Names and values, one pair a line; pairs with an empty value are left out."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        if value not in ("", None):
            grid.add_row(name, str(value))
    return grid


def show(console: Console, grid: Table) -> None:
    """Without the spaces that fill a table's last column."""
    if console.is_terminal:
        console.print(grid)
        return
    with console.capture() as captured:
        console.print(grid)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def local_time(at: datetime | None) -> str:
    return "" if at is None else at.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def age(at: datetime | None, now: datetime | None = None) -> str:
    """How long ago, in one or two units."""
    return "" if at is None else duration((now or datetime.now(UTC)) - at)


def duration(span: timedelta) -> str:
    seconds = max(0, int(span.total_seconds()))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02}s"
    if seconds < 86400:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02}m"
    return f"{seconds // 86400}d{seconds % 86400 // 3600:02}h"
